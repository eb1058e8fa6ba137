"""The newest events of jagged rows, min(length, count) of each, in tensors whose sizes the host knows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def newest(offsets: Tensor, total: int, count: int, *, newest_first: bool = False) -> tuple[Tensor, Tensor]:
    """(index [n] int64, offsets [2 B + 1]): which of `total` values are the last `count` of each of the B rows of
    `offsets` [B + 1], or the first ones where the newest come first.

    How many there are stands on the device only. n is an upper bound, min(total, B count), and what is left of it is
    shared out among B spare rows, of `count` at most, behind the others: copies of value 0 that nobody has to read.
    Offsets that are used beside these need as many rows: `with_spare_rows`.
    """
    num_rows, lengths = offsets.shape[0] - 1, offsets.diff()
    size = torch.sym_min(total, num_rows * count)
    kept = lengths.clamp(max=count)
    first = offsets[:-1] if newest_first else offsets[1:] - kept
    begins = torch.arange(num_rows, device=offsets.device) * count
    spare = (size - kept.sum() - begins).clamp(0, count)
    cuts = F.pad(torch.cat([kept, spare.to(kept.dtype)]).cumsum(0, dtype=offsets.dtype), (1, 0))
    place = torch.arange(size, device=offsets.device)
    row = torch.searchsorted(cuts, place, right=True) - 1
    own = torch.cat([first, torch.zeros_like(first)])
    within = torch.where(row < num_rows, place - cuts[row], 0)
    return own[row] + within, cuts


def with_spare_rows(offsets: Tensor) -> Tensor:
    """offsets [B + 1] with B rows more, which are empty."""
    return torch.cat([offsets, offsets[-1:].expand(offsets.shape[0] - 1)])
