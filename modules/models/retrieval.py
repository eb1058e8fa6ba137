"""What models that retrieve items have in common: a score is the product of a request's vector and the item's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import ModelConfig, option
from modules.layers.embedding.tokens import Tokens


class NextItems(NamedTuple):
    """P places with the item that comes after each, and C candidates to be told from it.

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


@dataclass(kw_only=True)
class RetrievalConfig(ModelConfig):
    """What these models share."""

    score: str = option("dot", choices=["dot", "cosine"])  # of the request's vector and the item's
    temperature: float = 1.0  # scores are divided by it

    def check(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"model.temperature={self.temperature} must be above 0, e.g. model.temperature=0.05")


class RetrievalModel(nn.Module, ABC):
    """Scores candidates by `queries` of requests and `item` of candidates.

    `trains_on_places` lets a training step return `NextItems` instead of logits; the losses of next items want them.
    The last `num_negatives` candidates of such a step are negatives that the loader has drawn.
    """

    several_targets: ClassVar[bool] = False  # whether a training request may have more than one candidate

    def __init__(self, spec: FeatureSpec, config: RetrievalConfig) -> None:
        super().__init__()
        check_items(spec)
        self.dim = config.dim
        self.event = spec.histories[0]
        self.score, self.temperature = config.score, config.temperature
        self.trains_on_places = self.gives_vectors = False
        self.num_negatives = 0

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor | NextItems | Vectors:
        """Logits [C, 1]; in training with `trains_on_places`, what the losses of next items need; in evaluations with
        `gives_vectors`, what a whole catalogue is scored with."""
        if self.training and self.trains_on_places:
            return self.next_items(tokens, batch)
        queries, items = self.queries(tokens), self.item(tokens.candidate[:, 0])
        if self.gives_vectors and not self.training:
            return Vectors(queries, items)
        return CandidateRows.of(batch).multiply(items, queries).sum(1, keepdim=True)

    @abstractmethod
    def next_items(self, tokens: Tokens, batch: RequestBatch) -> NextItems:
        """What a training step learns from."""

    @abstractmethod
    def queries(self, tokens: Tokens) -> Tensor:
        """[R, dim] float32: what the items of a whole catalogue are multiplied with, for each request."""

    def query(self, states: Tensor) -> Tensor:
        """Vectors [..., dim] float32 whose product with `item` is the score."""
        return self._scored(states) / self.temperature

    def item(self, embedded: Tensor) -> Tensor:
        """Vectors [..., dim] float32 of looked-up items."""
        return self._scored(embedded)

    def aux_loss(self) -> Tensor:
        return next(self.parameters()).new_zeros(())

    def _scored(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float()
        return nn.functional.normalize(vectors, dim=-1, eps=1e-6) if self.score == "cosine" else vectors


def positive_weights(batch: RequestBatch) -> Tensor:
    """[C]: the weight of each candidate that is one of its request's items, 0 of others."""
    return torch.where(batch.labels[:, 0] == 1, batch.weights[:, 0], 0)


def check_items(spec: FeatureSpec) -> None:
    """ValueError unless candidates are items that one history has as its first field."""
    ids = [feature for feature in spec.candidate if not feature.is_list]
    if len(spec.candidate) != 1 or not ids or spec.candidate_columns or spec.num_vendor_tokens:
        raise ValueError(
            "a next-item model scores items by their id alone: candidates must have one feature, e.g. "
            "data.candidate_categorical=[item_id], with no lists, no numbers and no vendors"
        )
    if len(spec.histories) != 1 or spec.histories[0].fields[0].table != ids[0].table:
        raise ValueError(
            f"a next-item model reads one event type whose first field has the candidates' table {ids[0].table!r}, "
            f"e.g. data.histories={{events: {{fields: [{ids[0].name}]}}}}"
        )
