"""Linear layers and grouped products whose operands are MXFP8, and the format itself. See `reference` for both.

Recipes: "none" multiplies in the operands' own dtype, "bf16" rounds them to bfloat16, "mxfp8" quantises the operands
of all three products (forward, input gradient, weight gradient), "mxfp8_g128" does so with scales that 128 elements
share (128 x 128 of a weight). All of them accumulate in float32 and return autocast's dtype under autocast, otherwise
the dtype of x; gradients have the dtype of their tensor. A ValueError names shapes that do not fit and
recipes that are unknown.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.mxfp8 import grouped, matmul, mlp, plain, reference, split
from kernels.mxfp8.execution import (
    experts_execution,
    grouped_execution,
    linear_execution,
    linear_gains,
    multiplies_expert_codes,
    multiplies_grouped_codes,
    multiplies_linear_codes,
)
from kernels.mxfp8.reference import BLOCK, GROUPS, MXTensor, swizzle_scales, unswizzle_scales

QUANTIZED = {"mxfp8": 32, "mxfp8_g128": 128}
"""Elements that share a scale, by recipe."""
RECIPES = ("none", "bf16", *QUANTIZED)
# Where torch._grouped_mm is a CUTLASS kernel; elsewhere it is a loop of its own.
CUTLASS_CHIPS = ((9, 0), (10, 0))

__all__ = [
    "QUANTIZED",
    "RECIPES",
    "MXTensor",
    "check_recipe",
    "dequantize",
    "experts_execution",
    "float32_linear",
    "grouped_execution",
    "grouped_mm",
    "linear",
    "linear_execution",
    "linear_gains",
    "multiplies_expert_codes",
    "multiplies_grouped_codes",
    "multiplies_linear_codes",
    "quantize",
    "silu_mlp",
    "swizzle_scales",
    "unswizzle_scales",
]


def quantize(
    x: Tensor, axis: int = -1, *, block_size: int = BLOCK, square: bool = False, backend: str | None = None
) -> MXTensor:
    """MXFP8 of x (any floating dtype, any shape) with blocks of 32 along `axis`; not differentiable.

    With block_size 128, four neighbouring blocks share a scale, with `square` 128 x 128 elements of the last two axes.
    ValueError for integers, scalars, other sizes, and squares of anything but matrices in blocks of 128.
    """
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"quantize takes a floating tensor of at least one axis, got {x.dtype} {tuple(x.shape)}")
    if block_size not in GROUPS:
        raise ValueError(f"block_size must be one of {GROUPS}, got {block_size}")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis {axis} is not one of x {tuple(x.shape)}, which has axes {-x.dim()} to {x.dim() - 1}")
    axis = axis % x.dim()
    if square and (block_size == BLOCK or x.dim() < 2 or axis < x.dim() - 2):
        raise ValueError(
            f"square needs block_size=128 and one of the last two axes of a matrix, got block_size={block_size}, "
            f"axis {axis} of {tuple(x.shape)}"
        )
    # Kernels are chosen by axes counted from the end.
    choice = dispatch.choose("mxfp8_quantize", backend, x, axis=axis - x.dim())
    return choice(x.detach(), axis, block_size, square)


def dequantize(quantized: MXTensor, dtype: torch.dtype = torch.float32, *, backend: str | None = None) -> Tensor:
    """The values that the codes and scales stand for."""
    return dispatch.choose("mxfp8_dequantize", backend, quantized.codes)(quantized, dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str, backend: str | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N]; weights are usually float32 masters, whatever x is."""
    check_recipe(recipe)
    _check_features(x, weight)
    out_dtype = dispatch.autocast_dtype(x)
    facts: dict[str, Hashable] = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    if recipe in QUANTIZED:
        facts |= {"group": QUANTIZED[recipe], "out_dtype": out_dtype}
        product = dispatch.choose("mxfp8_linear", backend, x, **facts)
        y = product(x.reshape(-1, x.shape[-1]), weight, bias, out_dtype, QUANTIZED[recipe])
        return y.reshape(*x.shape[:-1], weight.shape[0])
    if recipe == "bf16":
        x, weight, bias = x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
    return dispatch.choose("linear", backend, x, **facts)(x, weight, bias).to(out_dtype)


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] in float32, or in the weight's dtype if that is wider, whatever autocast
    says: -> [..., N]."""
    _check_features(x, weight)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    chosen = dispatch.choose_in_eager("float32_linear", backend, x, in_features=weight.shape[1], weight=dtype)
    return cast(Tensor, chosen(x, weight, bias))


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, *, recipe: str = "bf16", backend: str | None = None) -> Tensor:
    """Each row of x [M, K] times its expert's matrix: weight [E, N, K] -> [M, N].

    `ends` [E] int32 on the device are offsets without their leading 0: rows of expert e are ends[e - 1]:ends[e], of any
    number including 0. Rows from ends[E - 1] on give zeros and have zero gradients.
    """
    check_recipe(recipe)
    _check_features(x, weight)
    if ends.shape != weight.shape[:1]:
        raise ValueError(
            f"ends must be [{weight.shape[0]}], one end per expert as in offsets[1:], got {list(ends.shape)}"
        )
    out_dtype = dispatch.autocast_dtype(x)
    facts = {"in_features": weight.shape[2], "out_features": weight.shape[1]}
    if recipe in QUANTIZED:
        product = dispatch.choose("mxfp8_grouped_mm", backend, x, **facts)
        return product(x, weight, ends, out_dtype, QUANTIZED[recipe])
    if recipe == "bf16":
        x, weight = x.bfloat16(), weight.bfloat16()
    else:
        x, weight = dispatch.autocast_operands(x=x, weight=weight)
    return dispatch.choose("grouped_mm", backend, x, **facts)(x, weight, ends).to(out_dtype)


def silu_mlp(
    x: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    factor: Tensor | None = None,
    *,
    recipe: str,
    backend: str | None = None,
) -> Tensor:
    """(silu(x inner^T + bias) outer^T + outer_bias) * factor, two quantised `linear` layers: x [..., D] -> [..., E].

    inner is [F, D], bias [F], outer [E, F], outer_bias [E], factor [..., E]; weights and biases are usually float32
    masters. Each product and the activation is rounded to the dtype of the result before it is read again. ValueError
    for other shapes, and for a recipe that does not quantise.
    """
    if recipe not in QUANTIZED:
        raise ValueError(f"recipe must be one of {', '.join(QUANTIZED)}, got {recipe!r}")
    _check_features(x, inner)
    shapes = [tuple(each.shape) for each in (bias, outer, outer_bias)]
    hidden, width = inner.shape[0], outer.shape[0]
    out_shape = (*x.shape[:-1], width)
    if shapes != [(hidden,), (width, hidden), (width,)] or (factor is not None and factor.shape != out_shape):
        raise ValueError(
            f"x {tuple(x.shape)} and inner {tuple(inner.shape)} take bias [{hidden}], outer [E, {hidden}], "
            f"outer_bias [E] and a factor {(*x.shape[:-1], 'E')}; got {', '.join(map(str, shapes))} and "
            f"{None if factor is None else tuple(factor.shape)}"
        )
    out_dtype, group = dispatch.autocast_dtype(x), QUANTIZED[recipe]
    if factor is not None and factor.dtype is not out_dtype:
        return silu_mlp(x, inner, bias, outer, outer_bias, recipe=recipe, backend=backend) * factor
    facts = {
        "widths": tuple(map(int, (x.shape[-1], hidden, width))),
        "bias": bias.dtype,
        "group": group,
        "out_dtype": out_dtype,
    }
    chosen = dispatch.choose_in_eager("mxfp8_silu_mlp", backend, x, **facts)
    rows, factor = x.reshape(-1, x.shape[-1]), None if factor is None else factor.reshape(-1, width)
    return chosen(rows, inner, bias, outer, outer_bias, factor, out_dtype, group).view(out_shape)


def _check_features(x: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features and weight takes {weight.shape[-1]}: {tuple(weight.shape)}")


def check_recipe(recipe: str) -> None:
    """ValueError naming the known recipes unless `recipe` is one of them."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")


def _last_axes(*, device: str, capability: Hashable, dtype: torch.dtype, axis: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if axis < -2:
        return f"quantises along one of the last two axes, not along {axis}"
    return None


def _hopper(
    *, device: str, capability: Hashable, dtype: torch.dtype, in_features: int, out_features: int, multiple: int = 64
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, torch.bfloat16):
        return reason
    if in_features % 64 or out_features % 64:
        return f"needs features in multiples of 64, got {in_features} and {out_features}"
    if multiple % 64:
        return f"sums over 64 rows of a group at a time, the groups are only known as multiples of {multiple}"
    return None


def _hopper_linear(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    in_features: int,
    out_features: int,
    group: int,
    out_dtype: torch.dtype,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if group != 128:
        return f"takes scales over 128 elements, not over {group}"
    if in_features % 128 or out_features % 128:
        return f"needs features in multiples of 128, got {in_features} and {out_features}"
    if out_dtype is not torch.bfloat16:
        return f"rounds to bfloat16, and the result is {out_dtype}: use autocast"
    return None


def _hopper_silu_mlp(
    *, widths: tuple[int, int, int], bias: torch.dtype, group: int, out_dtype: torch.dtype, **facts: Any
) -> str | None:
    for k, n in pairwise(widths):
        if reason := _hopper_linear(in_features=k, out_features=n, group=group, out_dtype=out_dtype, **facts):
            return reason
    return dispatch.needs_dtype(bias, *dispatch.FLOATS)


def _split(
    *, device: str, capability: Hashable, dtype: torch.dtype, in_features: int, weight: torch.dtype
) -> str | None:
    if device != "cuda" or not isinstance(capability, tuple) or capability < (8, 0):
        return "needs tensor cores that multiply bfloat16"
    if dtype is not torch.bfloat16 or weight is not torch.float32:
        return f"splits float32 weights for rows of bfloat16, got {weight} and {dtype}"
    return None if in_features >= 256 else f"takes longer for rows of less than 256 features, got {in_features}"


def _cutlass(
    *, device: str, capability: Hashable, dtype: torch.dtype, in_features: int, out_features: int, multiple: int = 1
) -> str | None:
    if reason := dispatch.needs_capability(device, capability, *CUTLASS_CHIPS) or dispatch.needs_dtype(
        dtype, torch.bfloat16
    ):
        return reason
    if in_features % 8 or out_features % 8:
        return f"needs rows of whole 16-byte units (features in multiples of 8), got {in_features} and {out_features}"
    return None


def _block_scaled(*, dtype: torch.dtype, in_features: int, out_features: int, **facts: Any) -> str | None:
    return dispatch.needs_dtype(dtype, *dispatch.FLOATS) or grouped.block_scaled(
        in_features=in_features, out_features=out_features, **facts
    )


dispatch.declare(
    "mxfp8_quantize",
    Backend("hopper", "kernels.mxfp8.hopper.quantize.operators:quantize", _last_axes),
    Backend("reference", reference.quantize),
)
dispatch.declare("mxfp8_dequantize", Backend("reference", reference.dequantize))
dispatch.declare("linear", Backend("reference", functional.linear))
dispatch.declare("float32_linear", Backend("split", split.linear, _split), Backend("reference", split.reference))
dispatch.declare(
    "mxfp8_linear",
    Backend("hopper", "kernels.mxfp8.hopper.linear:linear", _hopper_linear),
    Backend("torch", "kernels.mxfp8.scaled:linear", _block_scaled),
    Backend("reference", matmul.linear),
)
dispatch.declare(
    "mxfp8_silu_mlp",
    Backend("hopper", "kernels.mxfp8.hopper.silu_mlp:silu_mlp", _hopper_silu_mlp),
    Backend("reference", mlp.silu_mlp),
)
dispatch.declare(
    "grouped_mm",
    Backend("hopper", "kernels.mxfp8.hopper.operators:grouped_mm", _hopper),
    Backend("torch", plain.torch_grouped_mm, _cutlass),
    Backend("reference", plain.grouped_mm),
)
dispatch.declare(
    "grouped_wgrad",
    Backend("hopper", "kernels.mxfp8.hopper.operators:grouped_wgrad", _hopper),
    Backend("torch", plain.torch_grouped_wgrad, _cutlass),
    Backend("reference", plain.grouped_wgrad),
)
dispatch.declare(
    "mxfp8_grouped_mm",
    Backend("torch", "kernels.mxfp8.scaled:grouped_mm", _block_scaled),
    Backend("reference", matmul.grouped_mm),
)


@dispatch.flops("linear", "float32_linear", "mxfp8_linear", "grouped_mm", "mxfp8_grouped_mm")
def _flops(x: Tensor, weight: Tensor, *rest: object) -> float:
    return 2 * x.numel() * weight.shape[-2]
