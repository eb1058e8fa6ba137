"""From the histories of several event types to one sequence of tokens a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kernels.tokens import permute
from modules.batch import FeatureSpec
from modules.embedding import JaggedSequence, Tokens
from modules.masknet import MaskNet


class HistoryEncoder(nn.Module):
    """A MaskNet for each event type, then all types merged along time into one jagged sequence.

    Different event types are different events, so their positions mean nothing to each other and they must not be put
    side by side along the width. Each type's own output bias is its event-type embedding.
    """

    def __init__(self, spec: FeatureSpec, dim: int) -> None:
        super().__init__()
        self.events = spec.histories
        masks = nn.ModuleList(MaskNet(len(event.fields), dim) for event in spec.histories)
        self.masks = cast("Sequence[MaskNet]", masks)

    def forward(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """(values [sum T, dim], offsets [R + 1]), oldest first; no event at all when the data has no histories."""
        sequences = []
        for event, mask in zip(self.events, self.masks, strict=True):
            sequence = tokens.histories[event.name]
            sequences.append(JaggedSequence(mask(sequence.values), sequence.offsets, sequence.times))
        if not sequences:
            num_requests, _, dim = tokens.request.shape
            offsets = torch.zeros(num_requests + 1, dtype=torch.int64, device=tokens.request.device)
            return tokens.request.new_empty(0, dim), offsets
        merged = merge_by_time(sequences)
        return merged.values, merged.offsets


def merge_by_time(sequences: list[JaggedSequence]) -> JaggedSequence:
    """All events of each request in one row, oldest first; at equal times earlier arguments come first.

    Two stable sorts, by time and then by row, rather than one by a combined key that could overflow.
    """
    if len(sequences) == 1:
        return sequences[0]
    times = torch.cat([sequence.times for sequence in sequences])
    rows = torch.cat([_row_of(sequence) for sequence in sequences])
    order = times.argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    values = torch.cat([sequence.values for sequence in sequences])
    offsets = torch.stack([sequence.offsets for sequence in sequences]).sum(0)
    return JaggedSequence(permute(values, order), offsets, times[order])


def _row_of(sequence: JaggedSequence) -> Tensor:
    counts = sequence.offsets.diff()
    rows = torch.arange(counts.shape[0], device=counts.device)
    return torch.repeat_interleave(rows, counts, output_size=sequence.times.shape[0])
