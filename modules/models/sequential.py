"""What next-item models have in common: one causal sequence a request, items scored by their own embeddings.

A request's sequence is its token (of the user and the context, a learned one without such features), then its events,
oldest first. The state of each place predicts the event after it, the last one the candidate. Items have one vector
each, which serves as input of an event and as what a candidate is scored with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.tokens import permute
from modules.batch import UNKNOWN_ID, FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import ModelConfig, option
from modules.embedding import Tokens


class NextItems(NamedTuple):
    """P places of sequences with the item that comes after each, and C candidates to be told from it.

    A score is the product of a query and an item, as they are here. A place without a known next item weighs 0.
    """

    query: Tensor  # [P, dim]
    target: Tensor  # [P, dim]
    target_ids: Tensor  # [P] int64, rows of the item table
    weights: Tensor  # [P] float32
    candidates: Tensor  # [C, dim], in the batch's order
    candidate_ids: Tensor  # [C] int64


class Vectors(NamedTuple):
    """Scores are products of these."""

    queries: Tensor  # [R, dim] float32, of requests
    items: Tensor  # [C, dim] float32, of candidates


class Sequences(NamedTuple):
    """Tokens of requests one after another; the place of request r's token is `offsets[r]`, its events follow."""

    values: Tensor  # [R + N, dim]
    offsets: Tensor  # [R + 1] int64
    places: Tensor  # [R + N] int64, from 0 at each request's token
    times: Tensor  # [R + N] int64 seconds; a request's token has that of its first event
    rows: Tensor  # [R + N] int64: where each token lies among R request tokens and then N events


@dataclass(kw_only=True)
class SequentialConfig(ModelConfig):
    """What models of sequences share."""

    dropout: float = option(0.2, below=1, example=0.1)
    num_layers: int = option(2, least=1)
    num_heads: int = option(1, least=1)
    score: str = option("dot", choices=["dot", "cosine"])  # of the sequence's state and the item
    temperature: float = 1.0  # scores are divided by it

    def check(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"model.temperature={self.temperature} must be above 0, e.g. model.temperature=0.05")
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"model.dim={self.dim} must be a multiple of 2 * model.num_heads={2 * self.num_heads}, e.g. model.dim="
                f"{16 * self.num_heads}"
            )


class SequentialModel(nn.Module, ABC):
    """Scores candidates by the state after the last event: query(state) . item(candidate).

    `trains_on_places` lets a training step return `NextItems` of all places instead of logits; the losses of next items
    want them.
    """

    def __init__(self, spec: FeatureSpec, config: SequentialConfig) -> None:
        super().__init__()
        check_items(spec)
        dim = config.dim
        self.event = spec.histories[0]
        self.dim = dim
        self.max_length = self.event.max_length + 1
        self.score, self.temperature = config.score, config.temperature
        self.trains_on_places = self.gives_vectors = False
        self.positions = nn.Parameter(torch.randn(self.max_length, dim) / math.sqrt(dim))
        self.dropout = nn.Dropout(config.dropout)

    @abstractmethod
    def encode(self, values: Tensor, sequences: Sequences) -> Tensor:
        """States [R + N, dim] of tokens [R + N, dim]; each sees its request's tokens up to itself."""

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor | NextItems | Vectors:
        """Logits [C, 1]; in training with `trains_on_places`, what the losses of next items need; in evaluations with
        `gives_vectors`, what a whole catalogue is scored with."""
        if self.gives_vectors and not self.training:
            return Vectors(self.queries(tokens), self.item(tokens.candidate[:, 0]))
        sequences = self.sequences(tokens)
        states = self.states(sequences)
        if self.training and self.trains_on_places:
            return self._next_items(states, sequences, tokens, batch)
        last = states[sequences.offsets[1:] - 1]
        product = CandidateRows.of(batch).multiply(self.item(tokens.candidate[:, 0]), self.query(last))
        return product.sum(1, keepdim=True)

    def queries(self, tokens: Tokens) -> Tensor:
        """[R, dim] float32: what the items of a whole catalogue are multiplied with, for each request."""
        sequences = self.sequences(tokens)
        return self.query(self.states(sequences)[sequences.offsets[1:] - 1])

    def query(self, states: Tensor) -> Tensor:
        """Vectors [..., dim] float32 whose product with `item` is the score."""
        return self._scored(states) / self.temperature

    def item(self, embedded: Tensor) -> Tensor:
        """Vectors [..., dim] float32 of looked-up items."""
        return self._scored(embedded)

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
        return Sequences(
            permute(torch.cat([start, events.to(start.dtype)]), rows),
            offsets,
            places - starts,
            torch.cat([first, history.times])[rows],
            rows,
        )

    def aux_loss(self) -> Tensor:
        return self.positions.new_zeros(())

    def _scored(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        return nn.functional.normalize(vectors, dim=-1, eps=1e-6) if self.score == "cosine" else vectors

    def _next_items(self, states: Tensor, sequences: Sequences, tokens: Tokens, batch: RequestBatch) -> NextItems:
        """The item after place p of a request is its event p; after the last one, its first candidate."""
        events = tokens.histories[self.event.name].values[:, : self.dim]
        ids = batch.histories.values()[: events.shape[0]]  # of the first field
        candidates, candidate_ids = tokens.candidate[:, 0], batch.candidate_sparse.values()
        # A row behind all others is that of requests without a candidate.
        some = batch.candidate_offsets.diff() > 0
        place = torch.where(some, batch.candidate_offsets[:-1], candidates.shape[0])
        positive = torch.where(batch.labels[:, 0] == 1, batch.weights[:, 0], 0)
        of_last = torch.cat([candidates, candidates.new_zeros(1, self.dim)])[place]
        last_ids = torch.cat([candidate_ids, candidate_ids.new_full((1,), UNKNOWN_ID)])[place]
        last_weights = torch.cat([positive, positive.new_zeros(1)])[place]
        rows = sequences.rows
        # The item after a token: the rows of tokens moved up by one place, each request's first to its end.
        last = sequences.offsets[1:] - 1
        after = torch.empty_like(rows)
        after[:-1] = rows[1:]
        after[last] = rows[sequences.offsets[:-1]]
        target_ids = torch.cat([last_ids, ids])[after]
        weights = torch.cat([last_weights, last_weights.new_ones(ids.shape[0])])[after]
        return NextItems(
            query=self.query(states),
            target=self.item(permute(torch.cat([of_last, events.to(of_last.dtype)]), after)),
            target_ids=target_ids,
            weights=torch.where(target_ids == UNKNOWN_ID, 0, weights),
            candidates=self.item(candidates),
            candidate_ids=candidate_ids,
        )


def check_items(spec: FeatureSpec) -> None:
    """ValueError unless candidates are items that one history has as its first field."""
    ids = [feature for feature in spec.candidate if not feature.is_list]
    if len(spec.candidate) != 1 or not ids or spec.candidate_dense:
        raise ValueError(
            "a next-item model scores items by their id alone: candidates must have one feature, e.g. "
            "data.candidate_categorical=[item_id], with no lists and no numbers"
        )
    if len(spec.histories) != 1 or spec.histories[0].fields[0].table != ids[0].table:
        raise ValueError(
            f"a next-item model reads one event type whose first field has the candidates' table {ids[0].table!r}, "
            f"e.g. data.histories={{events: {{fields: [{ids[0].name}]}}}}"
        )
