"""Routed SwiGLU experts, from tokens to tokens. See `reference` for the mathematics.

N tokens of width D, k experts each, E experts of hidden width F. Nothing here waits for the device: no size depends on
the routing.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.moe import reference
from kernels.moe.reference import Order, combine, gather, swiglu
from kernels.moe.selection import top_k
from kernels.mxfp8 import QUANTIZED, check_recipe

__all__ = ["Order", "combine", "experts", "gather", "is_fused", "swiglu", "top_k"]

GROUPS = {"bf16": 0, **QUANTIZED}
"""Elements that share a scale, by recipe; 0 is not quantised."""
FLOATS = (torch.bfloat16, torch.float32)


def experts(
    x: Tensor,
    selected_experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    recipe: str,
    backend: str | None = None,
) -> Tensor:
    """out_n = sum_j weights[n, j] * expert selected_experts[n, j] of x_n; each is W_down (silu(W_gate x) * (W_up x)).

    Args:
        x: [N, D]; selected_experts: [N, k] int64, 0..E - 1; weights: [N, k], usually float32.
        gate_up: [E, 2F, D], W_gate in rows 0:F and W_up in rows F:2F; down: [E, O, F], of which O is D as a rule.
        recipe: of the products, one of `kernels.mxfp8.RECIPES`.
    Returns:
        [N, O] in autocast's dtype under autocast, otherwise in that of x. Gradients for all but `selected_experts`.
    Raises:
        ValueError: unknown recipe, or shapes that don't fit together.
    """
    check_recipe(recipe)
    if gate_up.dim() != 3:
        raise ValueError(f"gate_up must be [E, 2F, D], got {list(gate_up.shape)}")
    num_experts, double, dim = gate_up.shape
    if x.dim() != 2 or x.shape[1] != dim:
        raise ValueError(f"x must be [N, {dim}], as wide as gate_up {list(gate_up.shape)}, got {list(x.shape)}")
    if double % 2 or down.dim() != 3 or (down.shape[0], down.shape[2]) != (num_experts, double // 2):
        raise ValueError(
            f"down must be [E, O, F] = [{num_experts}, O, {double // 2}] for gate_up [E, 2F, D] = "
            f"{list(gate_up.shape)}, got {list(down.shape)}"
        )
    if selected_experts.shape != weights.shape or weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"selected_experts and weights must be [{x.shape[0]}, k], a row for each token, got "
            f"{list(selected_experts.shape)} and {list(weights.shape)}"
        )
    out_dtype = dispatch.autocast_dtype(x)
    facts = _facts(gate_up, down, recipe, out_dtype)
    return dispatch.choose("moe_experts", backend, x, **facts)(x, selected_experts, weights, gate_up, down, recipe)


def is_fused(x: Tensor, gate_up: Tensor, down: Tensor, recipe: str) -> bool:
    """Whether `experts` of rows like x is one operator, not products and passes one after the other."""
    facts = _facts(gate_up, down, recipe, dispatch.autocast_dtype(x))
    return dispatch.serving("moe_experts", x, **facts) != "reference"


def _facts(gate_up: Tensor, down: Tensor, recipe: str, out_dtype: torch.dtype) -> dict[str, Hashable]:
    num_experts, double, dim = gate_up.shape
    return {
        # Without a recipe, operands have the dtype of the result.
        "operands": {torch.bfloat16: "bf16"}.get(out_dtype, str(out_dtype)) if recipe == "none" else recipe,
        "out_dtype": out_dtype,
        "dim": dim,
        "expert_dim": double // 2,
        "num_experts": num_experts,
        "out_dim": down.shape[1],
    }


def _hopper(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    operands: str,
    out_dtype: torch.dtype,
    dim: int,
    expert_dim: int,
    num_experts: int,
    out_dim: int,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)):
        return reason
    if operands not in GROUPS:
        return f"multiplies operands of {', '.join(GROUPS)}, not {operands}"
    if dtype not in FLOATS or out_dtype not in FLOATS:
        return f"takes and returns bfloat16 or float32, not {dtype} and {out_dtype}"
    if dim % 32 or out_dim % 32 or expert_dim % 128:
        return (
            f"needs dim and out_dim in multiples of 32 and expert_dim in multiples of 128, got {dim}, {out_dim} and "
            f"{expert_dim}"
        )
    if num_experts > 1024:
        return f"counts up to 1024 experts at once, got {num_experts}"
    return None


def _in_the_product(
    *, device: str, capability: Hashable, dtype: torch.dtype, group: int, in_features: int, out_features: int
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)):
        return reason
    if group not in (0, 128):
        return f"multiplies bfloat16 or codes whose scales 128 elements share, not {group}"
    multiple = 128 if group else 64
    if in_features % multiple or out_features % 128:
        return f"needs features in multiples of {multiple} and 128, got {in_features} and {out_features}"
    return None


# Inside of the fused experts: from the rows of the first product to those of the second one. The reference is the
# product and SwiGLU one after the other.
dispatch.declare(
    "moe_hidden",
    Backend("hopper", "kernels.moe.hopper.hidden:in_the_product", _in_the_product),
    Backend("reference", "kernels.moe.hopper.hidden:in_passes"),
)
dispatch.declare(
    "moe_experts",
    Backend("hopper", "kernels.moe.hopper.experts:experts", _hopper),
    Backend("reference", reference.experts),
)


@dispatch.flops("moe_experts")
def _flops(x: Tensor, selected_experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, recipe: str) -> float:
    return 2 * selected_experts.numel() * (gate_up[0].numel() + down[0].numel())
