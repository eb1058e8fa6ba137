"""Sum, mean and maximum of each row, and their gradients; Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, next_power_of_2, steps_of
from kernels.jagged.triton.parts import LOAD_BYTES, PART, join, larger_of, num_parts, part_of, reduction_blocks, slots

LOADS = 4  # of a thread at once
GRADIENT_PART = 128  # places of a program of the maximum's gradient
SPREAD_PART = 64  # and of that of the others, which read nothing for each place


@triton.jit(do_not_specialize=["num_rows"])
def _segment_reduce_kernel(
    x,
    offsets,
    out,
    ties,
    parts,
    counts,
    num_rows,
    width,
    x_stride,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SUMS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """For the maximum, `ties` gets the number of places that have it."""
    row, begin, end, first, last, slot = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    if (tl.program_id(0) >= num_rows) & (first >= last):
        return
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    other: tl.constexpr = float("-inf") if KIND == "max" else 0.0
    partial = tl.full([SUMS, BLOCK_W], other, tl.float32)
    count = tl.zeros([SUMS, BLOCK_W], tl.int32)
    # 64-bit arithmetic for the corner of a part, 32-bit within it.
    tall = (last - first).to(tl.int32)
    corner = x + first * x_stride + column[None, :]
    for start in range(0, tall, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        real = (place < tall)[:, None]
        # After the last place it loads that one again: loads without conditions are issued together.
        at = corner + tl.minimum(place, tall - 1)[:, None] * x_stride
        if EVEN:
            values = tl.load(at)
        else:
            values = tl.load(at, mask=(column < width)[None, :], other=0)
        if KIND != "max":
            values = tl.where(real, values, 0)
        values = tl.reshape(values.to(tl.float32), [BLOCK_L // SUMS, SUMS, BLOCK_W])
        if KIND == "max":
            larger = larger_of(partial, tl.reduce(values, 0, larger_of))
            real = tl.reshape(tl.broadcast_to(real, [BLOCK_L, BLOCK_W]), [BLOCK_L // SUMS, SUMS, BLOCK_W])
            equal = tl.sum((real & (values == larger[None, :, :])).to(tl.int32), 0)
            count = tl.where(partial == larger, count, 0) + equal
            partial = larger
        else:
            partial += tl.sum(values, 0)
    inside = column < width
    whole = end - begin <= PART
    if KIND == "max":
        result = tl.reduce(partial, 0, larger_of)
        count = tl.sum(tl.where(partial == result[None, :], count, 0), 0)
        tl.store(counts + slot * width + column, count, mask=inside & ~whole)
        tl.store(ties + row * width + column, count, mask=inside & whole)
    else:
        result = tl.sum(partial, 0)
    tl.store(parts + slot * width + column, result, mask=inside & ~whole)
    if KIND == "max":
        result = tl.where(begin < end, result, 0.0)
    elif KIND == "mean":
        result /= tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside & whole)


@triton.jit(do_not_specialize=["total", "num_rows"])
def _segment_spread_kernel(
    grad,
    offsets,
    out,
    total,
    num_rows,
    width,
    grad_stride,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The gradient of the sum or the mean: a program writes one line to all places of a part of a row."""
    row, begin, end, first, last, _ = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    # Places after the last row, if there are values after it, get its line.
    last = tl.where(row == num_rows - 1, tl.minimum(first + PART, total), last)
    if first >= last:
        return
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    values = tl.load(grad + row * grad_stride + column, mask=inside, other=0)
    if KIND == "mean":
        values = (values.to(tl.float32) / (end - begin).to(tl.float32)).to(out.dtype.element_ty)
    tall = (last - first).to(tl.int32)
    out += first * width + column[None, :]
    for start in range(0, tall, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)[:, None]
        mask = (place < tall) & inside[None, :]
        tl.store(out + place * width, tl.broadcast_to(values[None, :], [BLOCK_L, BLOCK_W]), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _segment_max_gradient_kernel(
    grad,
    x,
    largest,
    ties,
    offsets,
    out,
    num_rows,
    width,
    grad_stride,
    x_stride,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Ties share the gradient evenly."""
    row, _, _, first, last, _ = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    if first >= last:
        return
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    top = tl.load(largest + row * width + column, mask=inside, other=0)
    count = tl.load(ties + row * width + column, mask=inside, other=1)
    g = tl.load(grad + row * grad_stride + column, mask=inside, other=0).to(tl.float32)
    share = (g / count.to(tl.float32)).to(out.dtype.element_ty)
    # 64-bit arithmetic for the corner of a part, 32-bit within it.
    tall = (last - first).to(tl.int32)
    corner = x + first * x_stride + column[None, :]
    out += first * width + column[None, :]
    for start in range(0, tall, BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)
        at = corner + tl.minimum(place, tall - 1)[:, None] * x_stride  # as in `_segment_reduce_kernel`
        if EVEN:
            values = tl.load(at)
        else:
            values = tl.load(at, mask=inside[None, :], other=0)
        share_of = tl.where(values == top[None, :], share[None, :], 0.0).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * width, share_of, mask=(place < tall)[:, None] & inside[None, :])


def _launch_reduce(values: Tensor, offsets: Tensor, kind: str, out: Tensor, ties: Tensor | None) -> None:
    if out.numel() == 0:
        return
    values, offsets = flat(values), offsets.contiguous()
    total, width = values.shape
    num_rows = offsets.shape[0] - 1
    programs, itemsize, warps = num_parts(total, num_rows, PART), values.element_size(), 2
    # Columns are so many that rows of the mean length fill the loads: of shorter ones the last place is loaded again.
    places = max(1, total // num_rows)
    widest = min(256, max(64, next_power_of_2(32 * warps * LOAD_BYTES * LOADS // (itemsize * places))))
    blocks = reduction_blocks(width, programs, itemsize, LOADS, warps=warps, widest=widest)
    parts = slots(values, total, PART, width)
    counts = None if ties is None else slots(values, total, PART, width, torch.int32)
    block_l, block_w, sums, warps = blocks.values()
    numbers = (width, values.stride(0), kind, PART, steps_of(num_rows), block_l, block_w, sums, width % block_w == 0)
    _launch_reduction(
        (programs, cdiv(width, block_w), 1),
        (out.device, values.dtype, out.dtype, offsets.dtype, *aligned(values, offsets), *numbers, warps),
        values, offsets, out, out if ties is None else ties, parts, parts if counts is None else counts, num_rows,
        *numbers, num_warps=warps,
    )  # fmt: skip
    join(parts, offsets, out, total, PART, kind, counts, ties)


_launch_reduction = Launcher(_segment_reduce_kernel)
_launch_spread = Launcher(_segment_spread_kernel)


@custom_op("gemsmith::segment_reduce")
def reduce(values: Tensor, offsets: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """[N, ...] -> [B, ...] of `dtype`; kind is 'sum' or 'mean'."""
    out = values.new_empty(offsets.shape[0] - 1, *values.shape[1:], dtype=dtype)
    _launch_reduce(values, offsets, kind, out, None)
    return out


@reduce.register_fake
def _(values, offsets, kind, dtype):
    return values.new_empty(offsets.shape[0] - 1, *values.shape[1:], dtype=dtype)


@custom_op("gemsmith::segment_spread")
def spread(grad: Tensor, offsets: Tensor, total: int, kind: str) -> Tensor:
    """The adjoint of `reduce`: [B, ...] -> [total, ...]."""
    out = grad.new_empty(total, *grad.shape[1:])
    if out.numel() == 0:
        return out
    grad = flat(grad)
    num_rows, width = grad.shape
    block_w = min(next_power_of_2(max(width, 1)), 256 // grad.element_size())
    block_l = min(2048 // block_w, SPREAD_PART)
    offsets = offsets.contiguous()
    numbers = (width, grad.stride(0), kind, SPREAD_PART, steps_of(num_rows), block_l, block_w)
    _launch_spread(
        (num_parts(total, num_rows, SPREAD_PART), cdiv(width, block_w), 1),
        (out.device, grad.dtype, offsets.dtype, *aligned(grad, offsets), total >> 31, *numbers),
        grad, offsets, out, total, num_rows, *numbers,
    )  # fmt: skip
    return out


@spread.register_fake
def _(grad, offsets, total, kind):
    return grad.new_empty(total, *grad.shape[1:])


@custom_op("gemsmith::segment_max")
def largest(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum of each row, how many places of the row have it, int32): [N, ...] -> [B, ...] each."""
    out = values.new_empty(offsets.shape[0] - 1, *values.shape[1:])
    ties = torch.empty_like(out, dtype=torch.int32)
    _launch_reduce(values, offsets, "max", out, ties)
    return out, ties


@largest.register_fake
def _(values, offsets):
    out = values.new_empty(offsets.shape[0] - 1, *values.shape[1:])
    return out, torch.empty_like(out, dtype=torch.int32)


@custom_op("gemsmith::segment_max_gradient", like="values")
def max_gradient(grad: Tensor, values: Tensor, top: Tensor, ties: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of `largest`, whose results are `top` and `ties`: [B, ...] -> [N, ...]."""
    out = values.new_empty(*values.shape)
    if out.numel() == 0:
        return out
    grad, values = flat(grad), flat(values)
    total, width = values.shape
    num_rows = offsets.shape[0] - 1
    programs = num_parts(total, num_rows, GRADIENT_PART)
    blocks = reduction_blocks(width, programs, values.element_size(), LOADS)
    _segment_max_gradient_kernel[(programs, cdiv(width, blocks["BLOCK_W"]))](
        grad,
        values,
        top.contiguous(),
        ties.contiguous(),
        offsets.contiguous(),
        out,
        num_rows,
        width,
        grad.stride(0),
        values.stride(0),
        PART=GRADIENT_PART,
        STEPS=steps_of(num_rows),
        BLOCK_L=blocks["BLOCK_L"],
        BLOCK_W=blocks["BLOCK_W"],
        num_warps=blocks["num_warps"],
        EVEN=width % blocks["BLOCK_W"] == 0,
    )
    return out


def _save_reduce(ctx, inputs, output):
    values, offsets, ctx.kind, _ = inputs
    ctx.total, ctx.dtype = values.shape[0], values.dtype
    ctx.save_for_backward(offsets)


def _reduce_gradient(ctx, grad):
    return spread(grad, *ctx.saved_tensors, ctx.total, ctx.kind).to(ctx.dtype), None, None, None


def _save_largest(ctx, inputs, output):
    values, offsets = inputs
    top, ties = output
    ctx.mark_non_differentiable(ties)
    ctx.set_materialize_grads(False)  # they have no gradient: zeros would be made for nothing
    ctx.save_for_backward(values, top, ties, offsets)


def _largest_gradient(ctx, grad, _):
    if grad is None:  # none arrives
        return None, None
    return max_gradient(grad, *ctx.saved_tensors), None


reduce.register_autograd(_reduce_gradient, setup_context=_save_reduce)
largest.register_autograd(_largest_gradient, setup_context=_save_largest)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    return reduce(values, offsets, "sum", values.dtype)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    return reduce(values, offsets, "mean", values.dtype)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    return largest(values, offsets)[0]
