"""The specification of the jagged operators, in plain PyTorch.

A jagged tensor is (values [N, ...], offsets [B + 1]): row b is values[offsets[b]:offsets[b + 1]], offsets[0] is 0 and
offsets[B] is N. Every function runs on the CPU and on a GPU, in any floating dtype, is differentiable, and never waits
for the device: sizes come from shapes and from constants of the caller. The price is padded scratch memory in
`jagged_dense_bmm`, which other backends avoid.

Shapes: B rows, N = sum of lengths, L a maximum length, H heads, d and v widths of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.core import dispatch
from kernels.core.checks import check_lengths


def row_of(offsets: Tensor, total: int) -> Tensor:
    """Row index [total] int64 of each of the first `total` values."""
    positions = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), positions, right=True)


def place_in_row(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(row, position within the row), each [total] int64, of each of the first `total` values."""
    row = row_of(offsets, total)
    return row, torch.arange(total, device=offsets.device) - offsets.long()[row]


def widened(x: Tensor) -> Tensor:
    """x in float32, in which half-precision sums and functions are computed, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scatter_rows(values: Tensor, kept: Tensor, index: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[size, ...] filled with `fill`, row index[i] replaced by values[i] where kept[i].

    Kept indices are unique. Rows that are not kept go to one extra row that is cut off: unlike a boolean mask, this has
    a shape that the host knows.
    """
    out = values.new_full((size + 1, *values.shape[1:]), fill)
    return out.index_copy_(0, torch.where(kept, index, size), values)[:size]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[N, Hkv, d] -> [N, num_heads, d]: each key or value head serves num_heads / Hkv consecutive query heads."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


@dispatch.register("segment_sum", "reference")
def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    # Half-precision sums over a thousand events lose whole digits.
    return torch.segment_reduce(widened(values), "sum", offsets=offsets, axis=0, initial=0, unsafe=True).to(
        values.dtype
    )


@dispatch.register("segment_mean", "reference")
def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    counts = offsets.diff().clamp(min=1).view(-1, *[1] * (values.dim() - 1))
    return (segment_sum(widened(values), offsets) / counts).to(values.dtype)


class _SegmentMax(torch.autograd.Function):
    """PyTorch's own backward shares a gradient among ties only if that gradient is positive."""

    @staticmethod
    def forward(ctx, values: Tensor, offsets: Tensor) -> Tensor:
        largest = torch.segment_reduce(values, "max", offsets=offsets, axis=0, unsafe=True)
        empty = (offsets.diff() == 0).view(-1, *[1] * (values.dim() - 1))
        largest = largest.masked_fill(empty, 0.0)
        ctx.save_for_backward(values, offsets, largest)
        return largest

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        values, offsets, largest = ctx.saved_tensors
        row = row_of(offsets, values.shape[0])
        ties = values == largest[row]
        share = grad / segment_sum(ties.to(grad.dtype), offsets).clamp(min=1)
        return torch.where(ties, share[row], 0.0), None


@dispatch.register("segment_max", "reference")
def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    return _SegmentMax.apply(values, offsets)


@dispatch.register("jagged_to_padded", "reference")
def jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float, keep: str) -> Tensor:
    row, position = place_in_row(offsets, values.shape[0])
    if keep == "last":
        position = position - (offsets.diff().long() - max_length).clamp(min=0)[row]
    kept = (position >= 0) & (position < max_length)
    num_rows = offsets.shape[0] - 1
    padded = _scatter_rows(values, kept, row * max_length + position, num_rows * max_length, fill)
    return padded.view(num_rows, max_length, *values.shape[1:])


@dispatch.register("padded_to_jagged", "reference")
def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    max_length = padded.shape[1]
    row, position = place_in_row(offsets, total)
    inside = position < max_length
    values = padded.flatten(0, 1).index_select(0, torch.where(inside, row * max_length + position, 0))
    # Not torch.where with a zero, which would turn ids into floats.
    return values.masked_fill(~inside.view(-1, *[1] * (values.dim() - 1)), 0)


@dispatch.register("jagged_concat", "reference")
def jagged_concat(a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    num_a, num_b = a_values.shape[0], b_values.shape[0]
    a_target = torch.arange(num_a, device=a_offsets.device) + b_offsets.long()[row_of(a_offsets, num_a)]
    b_target = torch.arange(num_b, device=b_offsets.device) + a_offsets.long()[row_of(b_offsets, num_b) + 1]
    # index_copy needs unique targets: both together are a permutation of the output's rows.
    values = torch.cat([a_values, b_values])
    return torch.empty_like(values).index_copy_(0, torch.cat([a_target, b_target]), values), a_offsets + b_offsets


@dispatch.register("jagged_index_select", "reference")
def jagged_index_select(values: Tensor, offsets: Tensor, rows: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    lengths = offsets.diff()[rows]
    selected = pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))
    if total is None:
        total = int(selected[-1])
    row, position = place_in_row(selected, total)
    return values.index_select(0, offsets.long()[rows][row] + position), selected


@dispatch.register("jagged_last", "reference")
def jagged_last(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    row, position = place_in_row(offsets, values.shape[0])
    slot = position - offsets.diff().long()[row] + count
    num_rows = offsets.shape[0] - 1
    last = _scatter_rows(values, slot >= 0, row * count + slot, num_rows * count)
    return last.view(num_rows, count, *values.shape[1:])


@dispatch.register("jagged_dense_bmm", "reference")
def jagged_dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, max_length: int) -> Tensor:
    check_lengths(offsets, max_length, "max_length")
    padded = jagged_to_padded(x, offsets, max_length, 0.0, "first")
    return padded_to_jagged(torch.bmm(padded, y), offsets, x.shape[0])
