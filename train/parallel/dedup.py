"""Each id once on the way between ranks: FBGEMM's operator that TorchRec calls for it has a kernel for GPUs only."""

from __future__ import annotations

import torch
from torch import Tensor

OPERATOR = "fbgemm::jagged_unique_indices"
_library = torch.library.Library("fbgemm", "IMPL")


def serve_cpu() -> None:
    """Give FBGEMM's operator `unique_ids` on the CPU, unless it has a kernel there."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "CPU"):
        _library.impl("jagged_unique_indices", unique_ids, "CPU")


def unique_ids(starts: Tensor, features: Tensor, offsets: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ids of B examples and F features, each once for a table, as FBGEMM's CUDA kernel returns them.

    Args:
        starts: [F + 1] int64, ascending: where the rows of a feature's table start among those of all tables.
        features: [F + 1] int64, ascending: features[f] to features[f + 1] are those of a table that begins with f;
            for its other features the two are equal.
        offsets: [F * B + 1] int64; ids: [N] int64, feature by feature.
    Returns:
        lengths [F * B] and offsets [F * B + 1], which spread the ids of a table evenly over its features' examples;
        ids [U], ascending in each table; and where each of the N ids is among them, [N]. All int64.
    """
    count = starts.numel() - 1
    batch = (offsets.numel() - 1) // count
    counts = offsets.diff().view(count, batch).sum(1)
    linear, places = (ids + starts[:-1].repeat_interleave(counts)).unique(return_inverse=True)
    unique = torch.empty_like(linear).scatter_(0, places, ids)
    ends = torch.searchsorted(linear, starts)
    lengths = torch.zeros(count, batch, dtype=torch.int64)
    for first, last in zip(features.tolist(), features[1:].tolist(), strict=False):
        if first < last:
            share, rest = divmod(int(ends[last] - ends[first]), (last - first) * batch)
            lengths[first:last] = share
            lengths[first:last].view(-1)[:rest] += 1
    return lengths.view(-1), torch.nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0)), unique, places
