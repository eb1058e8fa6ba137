"""`python -m tools.gelu_plot FILE`: errors of polynomial GELUs and of their derivatives against the erf form."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kernels.core.activations import GELU_POLY_LIMIT, activate, derivative

# The series that the CuTe DSL kernel of ads_model_kernel_library uses, around 0.
TAYLOR = (0.39894228, -0.06649038, 0.00997356)


def taylor(x: Tensor) -> Tensor:
    return 0.5 * x + sum(factor * x ** (2 * power + 2) for power, factor in enumerate(TAYLOR))


def taylor_derivative(x: Tensor) -> Tensor:
    return 0.5 + sum((2 * power + 2) * factor * x ** (2 * power + 1) for power, factor in enumerate(TAYLOR))


def main(path: str) -> None:
    from matplotlib.figure import Figure

    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = (("value", activate, taylor), ("derivative", derivative, taylor_derivative))
    for axes, (what, form, series) in zip(figure.subplots(1, 2), panels, strict=True):
        others = {name: form(name, x) for name in ("gelu_tanh", "gelu_poly")} | {"Taylor, degree 6": series(x)}
        for label, other in others.items():
            axes.semilogy(x, (other - form("gelu", x)).abs().clamp(min=1e-8), label=label)
        for limit in (-GELU_POLY_LIMIT, GELU_POLY_LIMIT):
            axes.axvline(limit, color="grey", linewidth=0.5, linestyle="dotted")
        axes.axhline(2**-8, color="grey", linewidth=0.5, linestyle="dashed", label="bfloat16 rounding at 1")
        axes.set(xlabel="score", ylabel=f"error of the {what}", ylim=(1e-6, 10))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
