"""What multiplies quantised operands on a device, in words: the numeric contract of each execution path.

On one device `dispatch` gives the products of a recipe to one backend, on another to another. Scales and codes are the
same everywhere; what differs is how the products of codes are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch

_GROUPED = {
    "hopper": "FP8 products of codes, their sums over 128 terms scaled and added in float32",
    "hopper_strict": "operands dequantised exactly to bfloat16 on their way to the products, added in float32",
    "torch": "block-scaled products of codes by PyTorch, added in float32 (never run)",
}

# Backends that quantise, or the reference that dequantises as well, in plain PyTorch: passes over memory.
_IN_PASSES = {"torch", "reference"}


def _dequantised(device: torch.device) -> str:
    return f"operands dequantised exactly to {'bfloat16' if device.type == 'cuda' else 'float32'}, added in float32"


LEAST_RATIO = 600
"""N K / (N + K) of a weight [N, K] from which on a linear layer gains: for each row its three products take time in
proportion to N K, and the quantisation of x and of dy in proportion to N + K. A layer of 1,024 x 1,024 (512) gains by
itself, but not in a training (docs/mxfp8.md)."""


def multiplies_linear_codes(weight: Tensor, group: int, device: torch.device) -> bool:
    """Whether kernels of `device` quantise and multiply the operands of `kernels.mxfp8.linear` with this weight [N, K],
    under autocast to bfloat16 and with the recipe of this `group`.

    Otherwise plain PyTorch quantises or dequantises them in memory, which takes longer than products in bfloat16.
    """
    return _serving_linear(weight, group, device) not in _IN_PASSES


def linear_gains(weight: Tensor) -> bool:
    """Whether products of codes save a linear layer with this weight [N, K] more than it costs to quantise."""
    out_features, in_features = weight.shape
    return out_features * in_features >= LEAST_RATIO * (out_features + in_features)


def _serving_linear(weight: Tensor, group: int, device: torch.device) -> str:
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    facts = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    return dispatch.serving("mxfp8_linear", like, **facts, group=group, out_dtype=torch.bfloat16)


def multiplies_expert_codes(
    gate_up: Tensor, recipe: str, group: int, device: torch.device, out_dim: int | None = None
) -> bool:
    """As `multiplies_linear_codes`, for `kernels.moe.experts` with gate_up [E, 2F, D] and `out_dim` outputs, by
    default D: all its products, so narrow experts that are one operator around products of dequantised operands do not
    count."""
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    return not _IN_PASSES & _serving_experts(like, gate_up, recipe, group, out_dim)[1]


def linear_execution(weight: Tensor, group: int) -> str:
    """How `kernels.mxfp8.linear` of this weight [N, K] under autocast to bfloat16 multiplies; `group` the recipe's."""
    name = _serving_linear(weight, group, weight.device)
    return f"{name}: {_dequantised(weight.device) if name == 'reference' else _GROUPED[name]}"


def multiplies_grouped_codes(weight: Tensor, device: torch.device) -> bool:
    """As `multiplies_linear_codes`, for `kernels.mxfp8.grouped_mm` with this weight [E, N, K]."""
    return _serving_grouped(weight, device) not in _IN_PASSES


def grouped_execution(weight: Tensor) -> str:
    """How `kernels.mxfp8.grouped_mm` of this weight [E, N, K] multiplies quantised operands."""
    name = _serving_grouped(weight, weight.device)
    return f"{name}: {_dequantised(weight.device) if name == 'reference' else _GROUPED[name]}"


def _serving_grouped(weight: Tensor, device: torch.device) -> str:
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    return dispatch.serving("mxfp8_grouped_mm", like, in_features=weight.shape[2], out_features=weight.shape[1])


def experts_execution(gate_up: Tensor, recipe: str, group: int, out_dim: int | None = None) -> str:
    """How `kernels.moe.experts` under autocast to bfloat16 multiplies; gate_up [E, 2F, D], `group` the recipe's."""
    layer, paths = _serving_experts(gate_up.new_empty(0, dtype=torch.bfloat16), gate_up, recipe, group, out_dim)
    return f"{layer}: " + "; ".join(_GROUPED.get(path, _dequantised(gate_up.device)) for path in sorted(paths))


def _serving_experts(
    like: Tensor, gate_up: Tensor, recipe: str, group: int, out_dim: int | None
) -> tuple[str, set[str]]:
    """(what serves the layer, what serves its products)."""
    num_experts, double, dim = gate_up.shape
    facts = {"dim": dim, "expert_dim": double // 2, "num_experts": num_experts, "out_dim": out_dim or dim}
    layer = dispatch.serving("moe_experts", like, operands=recipe, out_dtype=torch.bfloat16, **facts)
    widths = [(dim, double), (double // 2, out_dim or dim)]
    if layer == "reference":
        names = {dispatch.serving("mxfp8_grouped_mm", like, in_features=k, out_features=n) for k, n in widths}
        if names == {"reference"}:
            return layer, names
        layer = ", ".join(sorted(names))
    return layer, {
        dispatch.serving(f"mxfp8_grouped_{kind}", like, group=group, in_features=k, out_features=n)
        for kind in ("fprop", "wgrad")
        for k, n in widths
    }
