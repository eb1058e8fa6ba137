"""Concatenation and selection of rows; Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, row_of, steps_of, tile_shape
from kernels.jagged.triton.moves import move, window
from kernels.jagged.triton.parts import num_parts, part_of

COPIES_PART = 64  # places of a program that adds up copies of a row
MAX_RANKED = 4096  # selected rows that are compared with each other instead of sorted


@triton.jit(do_not_specialize=["total", "num_rows"])
def _concat_kernel(
    a,
    a_offsets,
    b,
    b_offsets,
    both,
    total,
    num_rows,
    width,
    a_stride,
    b_stride,
    both_stride,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy a and b to `both`, or with SPLIT the other way: the same places meet."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    written = place < total
    row = row_of(a_offsets, num_rows, place, STEPS, b_offsets)
    # The place in `both` of a value of a is its index in a plus b's begin; of a value of b, its index plus a's end.
    a_end = tl.load(a_offsets + row + 1, mask=written, other=0).to(tl.int64)
    a_index = place - tl.load(b_offsets + row, mask=written, other=0).to(tl.int64)
    # One access for both: two accesses, each with the other's places masked, would run one after the other.
    part = tl.where(a_index < a_end, a + a_index * a_stride, b + (place - a_end) * b_stride)

    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = written[:, None] & (columns < width)[None, :]
    at_part = part[:, None] + columns[None, :]
    at_both = both + place[:, None] * both_stride + columns[None, :]
    if SPLIT:
        tl.store(at_part, tl.load(at_both, mask=mask), mask=mask)
    else:
        tl.store(at_both, tl.load(at_part, mask=mask), mask=mask)


def _launch_concat(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor, both: Tensor, split: bool) -> None:
    if both.numel() == 0:
        return
    tensors = a, a_offsets, b, b_offsets, both = (
        flat(a), a_offsets.contiguous(), flat(b), b_offsets.contiguous(), flat(both),
    )  # fmt: skip
    num_rows, (total, width) = a_offsets.shape[0] - 1, both.shape
    block_r, block_w = tile_shape(width, elements=8192 // both.element_size())
    numbers = (width, a.stride(0), b.stride(0), both.stride(0), split, steps_of(num_rows), block_r, block_w)
    _launch_copies(
        (cdiv(total, block_r), cdiv(width, block_w), 1),
        (both.device, *[tensor.dtype for tensor in tensors], *aligned(*tensors), total >> 31, *numbers),
        *tensors, total, num_rows, *numbers,
    )  # fmt: skip


_launch_copies = Launcher(_concat_kernel)


@custom_op("gemsmith::jagged_concat")
def concat(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> Tensor:
    """[Na, ...], [Nb, ...] -> [Na + Nb, ...]."""
    both = a.new_empty(a.shape[0] + b.shape[0], *a.shape[1:])
    _launch_concat(a, a_offsets, b, b_offsets, both, False)
    return both


@concat.register_fake
def _(a, a_offsets, b, b_offsets):
    return a.new_empty(a.shape[0] + b.shape[0], *a.shape[1:])


@custom_op("gemsmith::jagged_split")
def split(both: Tensor, a_offsets: Tensor, b_offsets: Tensor, num_a: int) -> tuple[Tensor, Tensor]:
    """The inverse of `concat`."""
    a = both.new_empty(num_a, *both.shape[1:])
    b = both.new_empty(both.shape[0] - num_a, *both.shape[1:])
    _launch_concat(a, a_offsets, b, b_offsets, both, True)
    return a, b


@split.register_fake
def _(both, a_offsets, b_offsets, num_a):
    return both.new_empty(num_a, *both.shape[1:]), both.new_empty(both.shape[0] - num_a, *both.shape[1:])


def _save_concat(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], inputs[3])
    ctx.num_a = inputs[0].shape[0]


def _split_gradient(ctx, grad):
    a_offsets, b_offsets = ctx.saved_tensors
    a, b = split(grad, a_offsets, b_offsets, ctx.num_a)
    return a, None, b, None


def _save_split(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], inputs[2])


def _concat_gradient(ctx, a, b):
    a_offsets, b_offsets = ctx.saved_tensors
    return concat(a, a_offsets, b, b_offsets), None, None, None


concat.register_autograd(_split_gradient, setup_context=_save_concat)
split.register_autograd(_concat_gradient, setup_context=_save_split)


@triton.jit(do_not_specialize=["count", "num_rows"])
def _rank_kernel(rows, selected_offsets, begins, first, count, num_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`_copies_of` for few rows: the place of each in a stable order is the number of those before it."""
    item = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_copy = item < count
    key = tl.where(is_copy, tl.load(rows + item, mask=is_copy, other=0).to(tl.int32), item - count)
    rank = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, count, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        row = tl.load(rows + other, mask=other < count, other=0).to(tl.int32)[None, :]
        tied = (row == key[:, None]) & is_copy[:, None] & (other[None, :] < item[:, None])
        before = (other < count)[None, :] & ((row < key[:, None]) | tied)
        rank += tl.sum(before.to(tl.int32), 1)
    begin = tl.load(selected_offsets + item, mask=is_copy, other=0).to(tl.int64)
    tl.store(begins + rank, begin, mask=is_copy)
    tl.store(first + key, rank.to(tl.int64), mask=(item >= count) & (key <= num_rows))


def _copies_of(rows: Tensor, selected_offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(begins [M], first [B + 1]), int64: copies of row r begin at begins[first[r]:first[r + 1]], in order."""
    count = rows.shape[0]
    if count > MAX_RANKED:
        ordered, order = rows.sort(stable=True)
        first = torch.searchsorted(ordered, torch.arange(num_rows + 1, device=rows.device, dtype=rows.dtype))
        return selected_offsets.index_select(0, order).long(), first
    begins = rows.new_empty(count, dtype=torch.int64)
    first = rows.new_empty(num_rows + 1, dtype=torch.int64)
    rows, selected_offsets = rows.contiguous(), selected_offsets.contiguous()
    key = (rows.device, rows.dtype, selected_offsets.dtype, *aligned(rows, selected_offsets))
    grid = (cdiv(count + num_rows + 1, 4), 1, 1)
    _launch_ranks(grid, key, rows, selected_offsets, begins, first, count, num_rows, 4, 1024)
    return begins, first


_launch_ranks = Launcher(_rank_kernel)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_selected_kernel(
    out,
    grad,
    offsets,
    begins,
    first_copy,
    num_rows,
    width,
    grad_stride,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Adds up the copies of a row in the order of `begins`: the same bits every time."""
    row, begin, _, first, last, _ = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    if first >= last:
        return
    one, end = tl.load(first_copy + row), tl.load(first_copy + row + 1)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    for start in range(first, last, BLOCK_R):
        place = start + tl.arange(0, BLOCK_R)
        mask = (place < last)[:, None] & (columns < width)[None, :]
        total = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
        for i in range(one, end):
            copy = tl.load(begins + i)
            at = grad + (copy + place - begin)[:, None] * grad_stride + columns[None, :]
            total += tl.load(at, mask=mask, other=0).to(tl.float32)
        tl.store(out + place[:, None] * width + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@custom_op("gemsmith::jagged_sum_selected")
def sum_selected(grad: Tensor, offsets: Tensor, rows: Tensor, selected_offsets: Tensor, total: int) -> Tensor:
    """The adjoint of `select`: [total, ...] whose row r is the sum of the rows m of `grad` with rows[m] = r."""
    out = grad.new_empty(total, *grad.shape[1:])
    if out.numel() == 0:
        return out
    num_rows = offsets.shape[0] - 1
    begins, first = _copies_of(rows, selected_offsets, num_rows)
    grad, offsets = flat(grad), offsets.contiguous()
    width = grad.shape[1]
    block_r, block_w = tile_shape(width, elements=16384 // grad.element_size())
    numbers = (width, grad.stride(0), COPIES_PART, steps_of(num_rows), block_r, block_w)
    _launch_sums(
        (num_parts(total, num_rows, COPIES_PART), cdiv(width, block_w), 1),
        (out.device, out.dtype, offsets.dtype, *aligned(grad, offsets), *numbers),
        out, grad, offsets, begins, first, num_rows, *numbers,
    )  # fmt: skip
    return out


_launch_sums = Launcher(_sum_selected_kernel)


@sum_selected.register_fake
def _(grad, offsets, rows, selected_offsets, total):
    return grad.new_empty(total, *grad.shape[1:])


@custom_op("gemsmith::jagged_select")
def select(values: Tensor, offsets: Tensor, rows: Tensor, selected_offsets: Tensor, total: int) -> Tensor:
    """[total, ...] whose row m is row rows[m]; selected_offsets are the offsets of the result."""
    out = values.new_empty(total, *values.shape[1:])
    return move(
        "select",
        values,
        out,
        selected_offsets.contiguous(),
        starts=rows.contiguous(),
        window_offsets=offsets.contiguous(),
    )


@select.register_fake
def _(values, offsets, rows, selected_offsets, total):
    return values.new_empty(total, *values.shape[1:])


def _save_select(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:4])
    ctx.total = inputs[0].shape[0]


select.register_autograd(
    lambda ctx, grad: (sum_selected(grad, *ctx.saved_tensors, ctx.total), None, None, None, None),
    setup_context=_save_select,
)
sum_selected.register_autograd(
    lambda ctx, grad: (select(grad, *ctx.saved_tensors, ctx.total), None, None, None, None),
    setup_context=_save_select,
)


@triton.jit(do_not_specialize=["count"])
def _select_offsets_kernel(offsets, rows, out, count, BLOCK: tl.constexpr):
    """Running sums of the selected lengths; a single program, because a batch has few rows."""
    total = tl.zeros([1], tl.int64)
    tl.store(out + tl.arange(0, 1), total.to(out.dtype.element_ty))
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = tl.load(rows + i, mask=i < count, other=0)
        length = tl.load(offsets + row + 1, mask=i < count, other=0).to(tl.int64)
        length -= tl.load(offsets + row, mask=i < count, other=0).to(tl.int64)
        tl.store(out + 1 + i, (total + tl.cumsum(length, 0)).to(out.dtype.element_ty), mask=i < count)
        total += tl.sum(length, 0)


@custom_op("gemsmith::jagged_select_offsets")
def select_offsets(offsets: Tensor, rows: Tensor) -> Tensor:
    """[M + 1]: offsets of the rows `rows`, one after another."""
    out = offsets.new_empty(rows.shape[0] + 1)
    offsets, rows = offsets.contiguous(), rows.contiguous()
    key = (offsets.device, offsets.dtype, rows.dtype, *aligned(offsets, rows))
    _launch_select_offsets((1, 1, 1), key, offsets, rows, out, rows.shape[0], 1024)
    return out


_launch_select_offsets = Launcher(_select_offsets_kernel, num_warps=16)


@select_offsets.register_fake
def _(offsets, rows):
    return offsets.new_empty(rows.shape[0] + 1)


@triton.jit(do_not_specialize=["count"])
def _slice_offsets_kernel(offsets, start, length, begin, out, count, BLOCK: tl.constexpr):
    """Where each slice begins and the running sums of their lengths; a single program, because a batch has few rows."""
    total = tl.zeros([1], tl.int64)
    tl.store(out + tl.arange(0, 1), total.to(out.dtype.element_ty))
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        real = i < count
        row_begin = tl.load(offsets + i, mask=real, other=0).to(tl.int64)
        row_length = tl.load(offsets + i + 1, mask=real, other=0).to(tl.int64) - row_begin
        skipped = tl.minimum(tl.load(start + i, mask=real, other=0).to(tl.int64), row_length)
        kept = tl.minimum(tl.load(length + i, mask=real, other=0).to(tl.int64), row_length - skipped)
        tl.store(begin + i, row_begin + skipped, mask=real)
        tl.store(out + 1 + i, (total + tl.cumsum(kept, 0)).to(out.dtype.element_ty), mask=real)
        total += tl.sum(kept, 0)


@custom_op("gemsmith::jagged_slice_offsets")
def slice_offsets(offsets: Tensor, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(begin [B] int64, offsets [B + 1]) of the slices of `jagged_slice`."""
    count = start.shape[0]
    begin, out = start.new_empty(count, dtype=torch.int64), offsets.new_empty(count + 1)
    tensors = (offsets.contiguous(), start.contiguous(), length.contiguous())
    key = (offsets.device, *[tensor.dtype for tensor in tensors], *aligned(*tensors))
    _launch_slice_offsets((1, 1, 1), key, *tensors, begin, out, count, 1024)
    return begin, out


_launch_slice_offsets = Launcher(_slice_offsets_kernel, num_warps=16)


@slice_offsets.register_fake
def _(offsets, start, length):
    return start.new_empty(start.shape[0], dtype=torch.int64), offsets.new_empty(start.shape[0] + 1)


def slices(values: Tensor, offsets: Tensor, start: Tensor, length: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    """`jagged_slice`; without `total` it waits for the device."""
    begin, sliced = slice_offsets(offsets, start, length)
    if total is None:
        total = int(sliced[-1])
    return window(values, offsets, begin, sliced, total), sliced


def index_select(values: Tensor, offsets: Tensor, rows: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    """`jagged_index_select`; without `total` it waits for the device."""
    selected = select_offsets(offsets, rows)
    if total is None:
        total = int(selected[-1])
    return select(values, offsets, rows, selected, total), selected


def jagged_concat(a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a_values.dtype, b_values.dtype)
    return concat(a_values.to(dtype), a_offsets, b_values.to(dtype), b_offsets), a_offsets + b_offsets
