"""What next-item models have in common: one causal sequence a request, items scored by their own embeddings.

A request's sequence is its token (of the user and the context, a learned one without such features), then its events,
oldest first. The state of each place predicts the event after it, the last one the candidate. Items have one vector
each, which serves as input of an event and as what a candidate is scored with.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kernels.tokens import place_rows
from modules.batch import UNKNOWN_ID, FeatureSpec, RequestBatch
from modules.config import HeadsConfig, StackConfig, option
from modules.layers.embedding.tokens import Tokens
from modules.models.retrieval import NextItems, RetrievalConfig, RetrievalModel, positive_weights


class Sequences(NamedTuple):
    """Tokens of requests one after another; the place of request r's token is `offsets[r]`, its events follow."""

    values: Tensor  # [R + N, dim]
    offsets: Tensor  # [R + 1] int64
    places: Tensor  # [R + N] int64, from 0 at each request's token
    times: Tensor  # [R + N] int64 seconds, 0 at the request; a request's token has that of its first event
    next_times: Tensor  # [R + N] int64 seconds: when what a place predicts happens, the next event or the request
    rows: Tensor  # [R + N] int64: where each token lies among R request tokens and then N events


@dataclass(kw_only=True)
class SequentialConfig(HeadsConfig, StackConfig, RetrievalConfig):
    """What models of sequences share."""

    dropout: float = option(0.2, below=1, example=0.1)
    num_heads: int = option(1, least=1)

    shared: ClassVar[frozenset[str]] = frozenset({"score", "temperature"})

    def check_layer(self) -> None:
        super().check_layer()
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"model.dim={self.dim} must be a multiple of 2 * model.num_heads={2 * self.num_heads}, e.g. model.dim="
                f"{16 * self.num_heads}"
            )


class SequentialModel(RetrievalModel):
    """A request's vector is its state after the last event; training learns from the states at all places."""

    def __init__(self, spec: FeatureSpec, config: SequentialConfig) -> None:
        super().__init__(spec, config)
        self.max_length = self.event.max_length + 1
        self.positions = nn.Parameter(torch.randn(self.max_length, self.dim) / math.sqrt(self.dim))
        self.dropout = nn.Dropout(config.dropout)

    @abstractmethod
    def encode(self, values: Tensor, sequences: Sequences) -> Tensor:
        """States [R + N, dim] of tokens [R + N, dim]; each sees its request's tokens up to itself."""

    def queries(self, tokens: Tokens) -> Tensor:
        sequences = self.sequences(tokens)
        return self.query(self.states(sequences)[sequences.offsets[1:] - 1])

    def states(self, sequences: Sequences) -> Tensor:
        # Rows of tables start at length 1; inputs have elements of size 1, as SASRec scales them.
        values = sequences.values * math.sqrt(self.dim) + self.positions[sequences.places]
        return self.encode(self.dropout(values), sequences)

    def sequences(self, tokens: Tokens) -> Sequences:
        history = tokens.histories[self.event.name]
        start, events = tokens.request.mean(1), history.values.unflatten(1, (-1, self.dim)).sum(1)
        num_requests, num_events = start.shape[0], events.shape[0]
        requests = torch.arange(num_requests, device=events.device)
        owner = torch.repeat_interleave(requests, history.offsets.diff(), output_size=num_events)
        event_places = torch.arange(1, num_events + 1, device=events.device) + owner
        offsets = history.offsets + torch.arange(num_requests + 1, device=events.device)
        rows = torch.empty(num_requests + num_events, dtype=torch.int64, device=events.device)
        rows[offsets[:-1]] = requests
        rows[event_places] = torch.arange(num_requests, num_requests + num_events, device=events.device)
        places = torch.arange(num_requests + num_events, device=events.device)
        starts = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=num_requests + num_events)
        # The first event of a request without one is some other request's: nothing but its own token reads that time.
        first = torch.cat([history.times, history.times.new_zeros(1)])[history.offsets[:-1]]
        times = torch.cat([first, history.times])[rows]
        next_times = times.roll(-1)
        next_times[offsets[1:] - 1] = 0
        return Sequences(
            place_rows([start, events.to(start.dtype)], torch.cat([offsets[:-1], event_places])),
            offsets,
            places - starts,
            times,
            next_times,
            rows,
        )

    def next_items(self, tokens: Tokens, batch: RequestBatch) -> NextItems:
        """The item after place p of a request is its event p; after the last one, its first candidate."""
        sequences = self.sequences(tokens)
        states = self.states(sequences)
        events = tokens.histories[self.event.name].values[:, : self.dim]
        ids = batch.histories.values()[: events.shape[0]]  # of the first field
        candidates, candidate_ids = tokens.candidate[:, 0], batch.candidate_sparse.values()
        # A row behind all others is that of requests without a candidate.
        some = batch.candidate_offsets.diff() > 0
        place = torch.where(some, batch.candidate_offsets[:-1], candidates.shape[0])
        positive = positive_weights(batch)
        of_last = torch.cat([candidates, candidates.new_zeros(1, self.dim)])[place]
        last_ids = torch.cat([candidate_ids, candidate_ids.new_full((1,), UNKNOWN_ID)])[place]
        last_weights = torch.cat([positive, positive.new_zeros(1)])[place]
        rows = sequences.rows
        # The item after a token: the rows of tokens moved up by one place, each request's first to its end.
        last = sequences.offsets[1:] - 1
        after = torch.empty_like(rows)
        after[:-1] = rows[1:]
        after[last] = rows[sequences.offsets[:-1]]
        places = torch.empty_like(after).scatter(0, after, torch.arange(after.shape[0], device=after.device))
        target_ids = torch.cat([last_ids, ids])[after]
        weights = torch.cat([last_weights, last_weights.new_ones(ids.shape[0])])[after]
        return NextItems(
            query=self.query(states),
            target=self.item(place_rows([of_last, events.to(of_last.dtype)], places)),
            target_ids=target_ids,
            weights=torch.where(target_ids == UNKNOWN_ID, 0, weights),
            candidates=self.item(candidates),
            candidate_ids=candidate_ids,
        )
