"""The specification of the jagged operators, in plain PyTorch.

A jagged tensor is (values [N, ...], offsets [B + 1]): row b is values[offsets[b]:offsets[b + 1]], offsets[0] is 0 and
offsets[B] is N. Every function runs on the CPU and on a GPU, in any floating dtype, is differentiable, and never waits
for the device: sizes come from shapes and from constants of the caller, on a CPU from the longest row. The price is
padded scratch memory in `jagged_dense_bmm`, which other backends avoid.

Shapes: B rows, N = sum of lengths, L a maximum length, H heads, d and v widths of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from kernels.core.checks import check_lengths, check_offsets
from kernels.core.rows import (
    jagged_to_padded,
    padded_length,
    padded_to_jagged,
    place_in_row,
    row_of,
    scatter_rows,
    widened,
)

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
COMBINE = {"add": torch.add, "mul": torch.mul}


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    # Half-precision sums over a thousand events lose whole digits.
    return torch.segment_reduce(widened(values), "sum", offsets=offsets, axis=0, initial=0, unsafe=True).to(
        values.dtype
    )


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


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    return _SegmentMax.apply(values, offsets)


def jagged_concat(a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    num_a, num_b = a_values.shape[0], b_values.shape[0]
    a_target = torch.arange(num_a, device=a_offsets.device) + b_offsets.long()[row_of(a_offsets, num_a)]
    b_target = torch.arange(num_b, device=b_offsets.device) + a_offsets.long()[row_of(b_offsets, num_b) + 1]
    # index_copy needs unique targets: both together are a permutation of the output's rows.
    values = torch.cat([a_values, b_values])
    return torch.empty_like(values).index_copy_(0, torch.cat([a_target, b_target]), values), a_offsets + b_offsets


def jagged_index_select(values: Tensor, offsets: Tensor, rows: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    lengths = offsets.diff()[rows]
    selected = pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))
    if total is None:
        total = int(selected[-1])
    row, position = place_in_row(selected, total)
    return values.index_select(0, offsets.long()[rows][row] + position), selected


def jagged_last(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    row, position = place_in_row(offsets, values.shape[0])
    slot = position - offsets.diff().long()[row] + count
    num_rows = offsets.shape[0] - 1
    last = scatter_rows(values, slot >= 0, row * count + slot, num_rows * count)
    return last.view(num_rows, count, *values.shape[1:])


def jagged_dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, max_length: int) -> Tensor:
    padded = _pad(x, offsets, max_length)
    return padded_to_jagged(torch.bmm(padded, y), offsets, x.shape[0])


def jagged_low_rank(x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, max_length: int) -> Tensor:
    return F.linear(jagged_dense_bmm(x, offsets, left.mT, max_length), weight)


def _pad(values: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    check_lengths(offsets, max_length, "max_length")
    max_length = padded_length(offsets, max_length)
    return jagged_to_padded(values, offsets, max_length, 0.0, "first")


def _square_places(offsets: Tensor, squares: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(place in the values of the matrix row, its column), each [total] int64, of each place of the square layout."""
    matrix, position = place_in_row(squares, total)
    length = offsets.diff().long()[matrix]
    return offsets.long()[matrix] + position // length, position % length


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int) -> Tensor:
    return _pad(x, offsets, max_length).mT @ _pad(y, offsets, max_length)


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int
) -> Tensor:
    check_lengths(offsets, max_length, "max_length")
    max_length = padded_length(offsets, max_length)
    scores = padded_to_jagged(_pad(x, offsets, max_length) @ _pad(y, offsets, max_length).mT, offsets, x.shape[0])
    place, column = _square_places(offsets, squares, total)
    return scores.flatten().index_select(0, place * max_length + column)


def _to_matrix_rows(a: Tensor, offsets: Tensor, squares: Tensor, num_values: int, max_length: int) -> Tensor:
    """[sum of L_b^2] -> [N, max_length], zeros behind the end of each row."""
    place, column = _square_places(offsets, squares, a.shape[0])
    rows = a.new_zeros(num_values * max_length).index_copy(0, place * max_length + column, a)
    return rows.view(num_values, max_length)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool
) -> Tensor:
    check_lengths(offsets, max_length, "max_length")
    max_length = padded_length(offsets, max_length)
    matrices = _pad(_to_matrix_rows(a, offsets, squares, y.shape[0], max_length), offsets, max_length)
    out = (matrices.mT if transpose else matrices) @ _pad(y, offsets, max_length)
    return padded_to_jagged(out, offsets, y.shape[0])


def _softmax_of(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Softmax over the rows of any jagged tensor [total, ...]."""
    wide = widened(values)
    row = row_of(offsets, total)
    largest = torch.segment_reduce(wide.detach(), "max", offsets=offsets, axis=0, unsafe=True)
    exponential = (wide - largest.index_select(0, row)).exp()
    return (exponential / segment_sum(exponential, offsets).index_select(0, row)).to(values.dtype)


def jagged_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    return _softmax_of(values, offsets, values.shape[0])


def jagged2_softmax(a: Tensor, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    # The rows of all matrices are the rows of a jagged tensor of their own.
    row = row_of(offsets, num_values)
    row_offsets = pad(offsets.diff().long()[row].cumsum(0), (1, 0))
    return _softmax_of(a, row_offsets, a.shape[0])


def jagged_elementwise(x: Tensor, y: Tensor, offsets: Tensor | None, op: str, activation: str) -> Tensor:
    y = widened(y)
    if offsets is not None:
        y = y.index_select(0, row_of(offsets, x.shape[0]))
    return ACTIVATIONS[activation](COMBINE[op](widened(x), y)).to(x.dtype)


def jagged_linear(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, row_bias: Tensor | None, activation: str
) -> Tensor:
    z = F.linear(x, weight, bias)
    if row_bias is not None:
        z = z + row_bias.index_select(0, row_of(offsets, x.shape[0]))
    return ACTIVATIONS[activation](z)


def jagged_flip(values: Tensor, offsets: Tensor) -> Tensor:
    row, position = place_in_row(offsets, values.shape[0])
    return values.index_select(0, offsets.long()[row + 1] - 1 - position)


def jagged_slice(
    values: Tensor, offsets: Tensor, start: Tensor, length: Tensor, total: int | None
) -> tuple[Tensor, Tensor]:
    counts = offsets.diff()
    start = torch.minimum(start, counts)
    sliced_offsets = pad(torch.minimum(length, counts - start).cumsum(0, dtype=offsets.dtype), (1, 0))
    if total is None:
        total = int(sliced_offsets[-1])
    check_offsets(total, sliced_offsets)
    row, position = place_in_row(sliced_offsets, total)
    begin = offsets[:-1].long() + start
    return values.index_select(0, begin[row] + position), sliced_offsets
