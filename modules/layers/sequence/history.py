"""From the histories of several event types to one sequence of tokens a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kernels.tokens import place_rows
from modules.batch import FeatureSpec
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.sequence.masknet import MaskNet


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

    def forward(self, tokens: Tokens, front: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(values [sum T, dim], offsets [R + 1]), oldest first; no event at all when the data has no histories.

        Tokens `front` [R, n, dim] come before the events of each row.
        """
        sequences = []
        for event, mask in zip(self.events, self.masks, strict=True):
            sequence = tokens.histories[event.name]
            sequences.append(JaggedSequence(mask(sequence.values), sequence.offsets, sequence.times))
        if not sequences:
            num_requests, _, dim = tokens.request.shape
            offsets = torch.zeros(num_requests + 1, dtype=torch.int64, device=tokens.request.device)
            none = JaggedSequence(tokens.request.new_empty(0, dim), offsets, offsets[:0])
            sequences = [none]
        if front is None:
            merged = merge_by_time(sequences)
            return merged.values, merged.offsets
        return _behind(front, sequences)


def merge_by_time(sequences: list[JaggedSequence]) -> JaggedSequence:
    """All events of each request in one row, oldest first; at equal times earlier arguments come first."""
    if len(sequences) == 1:
        return sequences[0]
    places, _ = _places(sequences)
    values = place_rows([sequence.values for sequence in sequences], places)
    times = torch.cat([sequence.times for sequence in sequences])
    return JaggedSequence(values, _offsets(sequences), torch.empty_like(times).scatter(0, places, times))


def _behind(front: Tensor, sequences: list[JaggedSequence]) -> tuple[Tensor, Tensor]:
    """(values, offsets) of the merged events, each row behind its tokens `front` [R, n, dim]; a token is moved once."""
    num_rows, num_front, _ = front.shape
    places, rows = _places(sequences)
    offsets = _offsets(sequences)
    index = torch.arange(num_rows + 1, device=offsets.device)
    offsets = offsets + num_front * index
    of_front = offsets[:-1, None] + torch.arange(num_front, device=offsets.device)
    behind = torch.cat([of_front.flatten(), places + num_front * (rows + 1)])
    events = [sequence.values.to(front.dtype) for sequence in sequences]
    return place_rows([front.flatten(0, 1), *events], behind), offsets


def _places(sequences: list[JaggedSequence]) -> tuple[Tensor, Tensor]:
    """([N], [N] int64): where each event of all sequences comes when they are merged by time, and its row.

    Two stable sorts, by time and then by row, rather than one by a combined key that could overflow.
    """
    rows = torch.cat([_row_of(sequence) for sequence in sequences])
    index = torch.arange(rows.shape[0], device=rows.device)
    if len(sequences) == 1:
        return index, rows
    order = torch.cat([sequence.times for sequence in sequences]).argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    return torch.empty_like(order).scatter(0, order, index), rows


def _offsets(sequences: list[JaggedSequence]) -> Tensor:
    return torch.stack([sequence.offsets for sequence in sequences]).sum(0)


def _row_of(sequence: JaggedSequence) -> Tensor:
    counts = sequence.offsets.diff()
    rows = torch.arange(counts.shape[0], device=counts.device)
    return torch.repeat_interleave(rows, counts, output_size=sequence.times.shape[0])
