"""Rows of jagged tensors in plain PyTorch: what the specifications of all families are written with.

A jagged tensor is (values [N, ...], offsets [B + 1]): row b is values[offsets[b]:offsets[b + 1]].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.core.operator import intercepted


class Rows(NamedTuple):
    """Where rows lie, [B + 1] int32 or int64, and a configured number of values that none exceeds."""

    offsets: Tensor
    max_length: int


def padded_length(offsets: Tensor, max_length: int) -> int:
    """What rows are padded to: on a CPU the longest one that is there, else, and in a trace, the bound `max_length`.

    A bound of thousands is for rare rows, and most batches would consist of padding.
    """
    if offsets.device.type != "cpu" or offsets.shape[0] < 2 or intercepted((offsets,)):
        return max_length
    return min(max(int(offsets.diff().max()), 1), max_length)


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


def scatter_rows(values: Tensor, kept: Tensor, index: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[size, ...] filled with `fill`, row index[i] replaced by values[i] where kept[i].

    Kept indices are unique. Rows that are not kept go to one extra row that is cut off: unlike a boolean mask, this has
    a shape that the host knows.
    """
    out = values.new_full((size + 1, *values.shape[1:]), fill)
    return out.index_copy_(0, torch.where(kept, index, size), values)[:size]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[N, Hkv, d] -> [N, num_heads, d]: each key or value head serves num_heads / Hkv consecutive query heads."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def jagged_to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float, keep: str) -> Tensor:
    row, position = place_in_row(offsets, values.shape[0])
    if keep == "last":
        position = position - (offsets.diff().long() - max_length).clamp(min=0)[row]
    kept = (position >= 0) & (position < max_length)
    num_rows = offsets.shape[0] - 1
    padded = scatter_rows(values, kept, row * max_length + position, num_rows * max_length, fill)
    return padded.view(num_rows, max_length, *values.shape[1:])


def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    max_length = padded.shape[1]
    row, position = place_in_row(offsets, total)
    inside = position < max_length
    values = padded.flatten(0, 1).index_select(0, torch.where(inside, row * max_length + position, 0))
    # Not torch.where with a zero, which would turn ids into floats.
    return values.masked_fill(~inside.view(-1, *[1] * (values.dim() - 1)), 0)
