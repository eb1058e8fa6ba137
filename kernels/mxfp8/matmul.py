"""Linear layer and grouped product on MXFP8 operands by quantising, dequantising and multiplying: the reference.

A backend of `mxfp8_linear` or `mxfp8_grouped_mm` is one differentiable function, so that it is free to fuse the six
quantisations with what surrounds them. This one keeps the high-precision x and weight for the backward, which
quantises them again along the other axis.

The multiplication is exact up to its float32 accumulation: dequantised operands are float32 on the CPU and bfloat16 on
a GPU, where tensor cores take them. (bfloat16 drops magnitudes below 2^-133, which only scale bytes 0 to 2 can reach.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.mxfp8.reference import BLOCK


def _operand(x: Tensor, axis: int, group: int, second: bool = False) -> Tensor:
    """x rounded to MXFP8 with blocks along `axis`, in the dtype that its device multiplies.

    The `second` operand of a product is in squares, if groups have 128 elements.
    """
    choice = dispatch.choose("mxfp8_quantize", None, x, axis=axis - x.dim())
    quantized = choice(x, axis, group, second and group != BLOCK)
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    return dispatch.choose("mxfp8_dequantize", None, quantized.codes)(quantized, dtype)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] -> float32 [M, N]."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else torch.mm(a, b)


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in `dtype`. A function may not return what a cast left as it was: compiled by PyTorch 2.11 it would have
    gradients of zeros.
    """
    return y if y.dtype == dtype else y.to(dtype)


def refuse_second_derivatives() -> None:
    """RuntimeError in a backward that is itself recorded: its derivative would lack what goes through codes."""
    if torch.is_grad_enabled():
        raise RuntimeError("MXFP8 products have no second derivative: use create_graph=False, or recipe 'none'")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            y = _multiply(_operand(x, 1, group), _operand(weight, 1, group, second=True).t())
        return as_dtype(y if bias is None else y + bias, out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        group = ctx.group
        dx = dw = db = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _multiply(_operand(dy, 1, group), _operand(weight, 0, group, second=True)).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = _multiply(_operand(dy, 0, group).t(), _operand(x, 0, group, second=True)).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group: int) -> Tensor:
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""
    return _Linear.apply(x, weight, bias, out_dtype, group)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.group = group
        with torch.autocast(x.device.type, enabled=False):
            y = _grouped_mm(_operand(x, 1, group), _operand(weight, 2, group, second=True), offsets)
            return as_dtype(y, out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_second_derivatives()
        x, weight, offsets = ctx.saved_tensors
        group = ctx.group
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                matrices = _operand(weight, 1, group, second=True).transpose(1, 2)
                dx = _grouped_mm(_operand(dy, 1, group), matrices, offsets).to(x.dtype)
            if ctx.needs_input_grad[1]:
                # Blocks run along the rows here and must not straddle two experts.
                target, capacity, ends = aligned_groups(offsets, x.shape[0], group)
                dy_operand, x_operand = (
                    _operand(scattered(rows, target, capacity), 0, group, second)
                    for rows, second in ((dy, False), (x, True))
                )
                dw = _grouped_wgrad(dy_operand, x_operand, ends, group).to(weight.dtype)
        return dx, dw, None, None, None


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    facts = {"in_features": weight.shape[2], "out_features": weight.shape[1]}
    return dispatch.choose("grouped_mm", None, x, **facts)(x, weight, offsets)


def _grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor, multiple: int) -> Tensor:
    facts = {"in_features": x.shape[1], "out_features": dy.shape[1]}
    return dispatch.choose("grouped_wgrad", None, x, **facts, multiple=multiple)(dy, x, offsets)


def aligned_groups(offsets: Tensor, num_rows: int, multiple: int = BLOCK) -> tuple[Tensor, int, Tensor]:
    """(target, capacity, ends) of the same groups with every size rounded up to a multiple of `multiple`.

    Row i moves to row target[i] of a buffer of `capacity` rows, or to `capacity` itself when it belongs to no group.
    The capacity is the worst case for any division of num_rows into groups, so that the host need not know the sizes.
    """
    num_groups = offsets.shape[0]
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    sizes = -(-(offsets - starts) // multiple) * multiple
    ends = sizes.cumsum(0, dtype=offsets.dtype)
    capacity = -(-(num_rows + num_groups * (multiple - 1)) // multiple) * multiple
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    group = torch.searchsorted(offsets, rows, right=True)
    shift = torch.cat([ends - sizes - starts, offsets.new_zeros(1)])[group]
    return torch.where(group < num_groups, rows + shift, capacity), capacity, ends


def scattered(rows: Tensor, target: Tensor, capacity: int) -> Tensor:
    """[capacity, ...]: rows at the places of `aligned_groups`, zeros elsewhere."""
    return rows.new_zeros(capacity + 1, rows.shape[1]).index_copy_(0, target.long(), rows)[:capacity]


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
    """x [M, K], weight [E, N, K], offsets [E] cumulative ends -> [M, N]; zeros after the last end."""
    return _GroupedMM.apply(x, weight, offsets, out_dtype, group)
