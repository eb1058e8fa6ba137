"""Public functions of slices and flips of jagged rows."""

from __future__ import annotations

from torch import Tensor

from kernels.core import dispatch
from kernels.core.checks import check_not_negative, check_offsets, check_rows
from kernels.core.dispatch import Backend, triton_moves
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


dispatch.declare(
    "jagged_flip",
    Backend("triton", "kernels.jagged.triton.moves:flip", triton_moves),
    Backend("reference", reference.jagged_flip),
)
dispatch.declare(
    "jagged_slice",
    Backend("triton", "kernels.jagged.triton.gather:slices", triton_moves),
    Backend("reference", reference.jagged_slice),
)
