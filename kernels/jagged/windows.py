"""Public functions and the specification of slices and flips of jagged rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.core import dispatch
from kernels.core.checks import check_not_negative, check_offsets, check_rows
from kernels.jagged import reference


def jagged_flip(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Each row backwards: [N, ...] -> [N, ...]."""
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_flip", backend, values)(values, offsets)


def jagged_slice(
    values: Tensor,
    offsets: Tensor,
    start: Tensor,
    length: Tensor,
    total: int | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(values [total, ...], offsets [B + 1]) of row b's places start[b] to start[b] + length[b], cut to the row.

    start and length are [B], int32 or int64, not negative. `total` is the sum of the lengths that result; without it
    this waits for the device.
    """
    check_offsets(values.shape[0], offsets)
    for name, numbers in (("start", start), ("length", length)):
        check_rows(numbers, offsets, name)
        check_not_negative(numbers, name)
    return dispatch.choose("jagged_slice", backend, values)(values, offsets, start, length, total)


@dispatch.register("jagged_flip", "reference")
def _flip(values: Tensor, offsets: Tensor) -> Tensor:
    row, position = reference.place_in_row(offsets, values.shape[0])
    return values.index_select(0, offsets.long()[row + 1] - 1 - position)


@dispatch.register("jagged_slice", "reference")
def _slice(values: Tensor, offsets: Tensor, start: Tensor, length: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
    counts = offsets.diff()
    start = torch.minimum(start, counts)
    sliced_offsets = pad(torch.minimum(length, counts - start).cumsum(0, dtype=offsets.dtype), (1, 0))
    if total is None:
        total = int(sliced_offsets[-1])
    check_offsets(total, sliced_offsets)
    row, position = reference.place_in_row(sliced_offsets, total)
    begin = offsets[:-1].long() + start
    return values.index_select(0, begin[row] + position), sliced_offsets
