"""Two quantised linear layers with SiLU between them, one operator after the other, each by its own backend: the
reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.tokens import activate


def silu_mlp(
    x: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    factor: Tensor | None,
    out_dtype: torch.dtype,
    group: int,
) -> Tensor:
    """(silu(x inner^T + bias) outer^T + outer_bias) * factor: x [M, D], inner [F, D], outer [E, F], factor [M, E].

    Products, the activation and the result are each rounded to `out_dtype`, which the factor has.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        facts = {"in_features": weight.shape[1], "out_features": weight.shape[0], "group": group}
        chosen = dispatch.choose("mxfp8_linear", None, x, **facts, out_dtype=out_dtype)
        return chosen(x, weight, bias, out_dtype, group)

    hidden = activate(linear(x, inner), bias, "silu")
    if factor is None:
        return linear(hidden, outer, outer_bias)
    return activate(linear(hidden, outer), outer_bias, factor=factor)
