"""Sum, mean and maximum of each row, and their gradients; Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jagged.triton_common import flat, reduction_tile, row_of, steps_of, tile_shape


@triton.jit
def _reduce_kernel(x, offsets, out, width, x_stride, KIND: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    other: tl.constexpr = float("-inf") if KIND == "max" else 0.0
    # A tile of partial results, so that threads meet once a row and not once a step.
    partial = tl.full([BLOCK_L, BLOCK_W], other, tl.float32)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        values = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=other).to(tl.float32)
        if KIND == "max":
            partial = tl.maximum(partial, values)
        else:
            partial += values
    if KIND == "max":
        result = tl.where(begin < end, tl.max(partial, 0), 0.0)
    else:
        result = tl.sum(partial, 0)
        if KIND == "mean":
            result /= tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _spread_kernel(
    grad,
    offsets,
    out,
    total,
    num_rows,
    width,
    grad_stride,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The gradient of the sum or the mean."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_of(offsets, num_rows, place, STEPS)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (place < total)[:, None] & (column < width)[None, :]
    values = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0)
    if KIND == "mean":
        count = tl.load(offsets + row + 1, mask=place < total, other=1) - tl.load(
            offsets + row, mask=place < total, other=0
        )
        values = (values.to(tl.float32) / count.to(tl.float32)[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * width + column[None, :], values, mask=mask)


@triton.jit
def _max_gradient_kernel(
    grad, x, largest, offsets, out, width, grad_stride, x_stride, BLOCK_L: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Ties share the gradient evenly, so they are counted first."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    top = tl.load(largest + row * width + column, mask=column < width, other=0)
    partial = tl.zeros([BLOCK_L, BLOCK_W], tl.float32)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        values = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=0)
        partial += (mask & (values == top[None, :])).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask=column < width, other=0).to(tl.float32)
    share = (g / tl.maximum(tl.sum(partial, 0), 1.0)).to(out.dtype.element_ty)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        values = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=0)
        tl.store(
            out + place[:, None] * width + column[None, :],
            tl.where(values == top[None, :], share[None, :], 0.0).to(out.dtype.element_ty),
            mask=mask,
        )


@torch.library.custom_op("gemsmith::segment_reduce", mutates_args=())
def reduce(values: Tensor, offsets: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """[N, ...] -> [B, ...] of `dtype`; kind is 'sum', 'mean' or 'max'."""
    num_rows = offsets.shape[0] - 1
    out = values.new_empty(num_rows, *values.shape[1:], dtype=dtype)
    if out.numel() == 0:
        return out
    values = flat(values)
    width = values.shape[1]
    block_l, block_w = reduction_tile(width, num_rows)
    _reduce_kernel[(num_rows, triton.cdiv(width, block_w))](
        values, offsets.contiguous(), out, width, values.stride(0), KIND=kind, BLOCK_L=block_l, BLOCK_W=block_w
    )
    return out


@reduce.register_fake
def _(values, offsets, kind, dtype):
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:], dtype=dtype)


@torch.library.custom_op("gemsmith::segment_spread", mutates_args=())
def spread(grad: Tensor, offsets: Tensor, total: int, kind: str) -> Tensor:
    """The adjoint of 'sum' and 'mean': [B, ...] -> [total, ...]."""
    out = grad.new_empty(total, *grad.shape[1:])
    if out.numel() == 0:
        return out
    grad = flat(grad)
    num_rows, width = grad.shape
    block_r, block_w = tile_shape(width)
    _spread_kernel[(triton.cdiv(total, block_r), triton.cdiv(width, block_w))](
        grad,
        offsets.contiguous(),
        out,
        total,
        num_rows,
        width,
        grad.stride(0),
        KIND=kind,
        STEPS=steps_of(num_rows),
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return out


@spread.register_fake
def _(grad, offsets, total, kind):
    return grad.new_empty(total, *grad.shape[1:])


@torch.library.custom_op("gemsmith::segment_max_gradient", mutates_args=())
def max_gradient(grad: Tensor, values: Tensor, largest: Tensor, offsets: Tensor) -> Tensor:
    out = values.new_empty(values.shape)
    if out.numel() == 0:
        return out
    grad, values = flat(grad), flat(values)
    width = values.shape[1]
    block_l, block_w = reduction_tile(width, offsets.shape[0] - 1)
    _max_gradient_kernel[(offsets.shape[0] - 1, triton.cdiv(width, block_w))](
        grad,
        values,
        largest.contiguous(),
        offsets.contiguous(),
        out,
        width,
        grad.stride(0),
        values.stride(0),
        BLOCK_L=block_l,
        BLOCK_W=block_w,
    )
    return out


@max_gradient.register_fake
def _(grad, values, largest, offsets):
    return values.new_empty(values.shape)


def _save_reduce(ctx, inputs, output):
    values, offsets, ctx.kind, _ = inputs
    ctx.total, ctx.dtype = values.shape[0], values.dtype
    ctx.save_for_backward(offsets, *((values, output) if ctx.kind == "max" else ()))


def _reduce_gradient(ctx, grad):
    if ctx.kind == "max":
        offsets, values, largest = ctx.saved_tensors
        return max_gradient(grad, values, largest, offsets), None, None, None
    return spread(grad, *ctx.saved_tensors, ctx.total, ctx.kind).to(ctx.dtype), None, None, None


reduce.register_autograd(_reduce_gradient, setup_context=_save_reduce)
