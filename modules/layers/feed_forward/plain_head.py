"""Task heads of what needs no interaction with a history: numbers, and ids of which there are few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor, nn

from modules.batch import FeatureSpec, SparseFeature
from modules.broadcast import CandidateRows
from modules.config import RankingConfig, SettledFlag
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.mlp import TaskHeads

FEW = 300
"""Rows of the largest table that it reads. Each has many examples, so that none is memorised."""


@dataclass(kw_only=True)
class PlainHeadConfig(RankingConfig):
    """After `FeedForwardConfig` among the bases of a model's `Config`."""

    plain_head: SettledFlag = False  # further heads of numbers and small tables; null: by the size of the data

    shared: ClassVar[frozenset[str]] = frozenset({"plain_head"})

    def graphs_refusal(self) -> str | None:
        if self.plain_head:
            return (
                "model.plain_head=true: a graph returns the logits of the other heads alone; use "
                "runtime.cuda_graphs=false or model.plain_head=false"
            )
        return super().graphs_refusal()

    def make_plain_heads(self, spec: FeatureSpec) -> PlainHead | None:
        return PlainHead.of(spec, self.dim, self.head_hidden, self.dropout) if self.plain_head else None


class PlainHead(nn.Module):
    """Logits [C, tasks] from tokens as they were looked up: of numbers, vectors and tables of at most `FEW` rows.

    On few rows, models of ids and histories know training requests by heart before they have learned what counts and
    rates of earlier rows say; this is the network that gradient-boosted trees would be compared with.
    """

    def __init__(
        self, spec: FeatureSpec, dim: int, hidden: Sequence[int], dropout: float, of_request: list[int], own: list[int]
    ) -> None:
        """`of_request`, `own`: which tokens of requests and of candidates it reads."""
        super().__init__()
        self.of_request, self.own = of_request, own
        self.heads = TaskHeads(len(own) * dim, hidden, spec.num_outputs, dropout, len(of_request) * dim)

    @classmethod
    def of(cls, spec: FeatureSpec, dim: int, hidden: Sequence[int], dropout: float) -> Self | None:
        """None where candidates have no such feature."""
        own = _places(spec, spec.candidate, spec.num_candidate_tokens)
        of_request = _places(spec, spec.request, spec.num_request_tokens)
        return cls(spec, dim, hidden, dropout, of_request, own) if own else None

    def forward(self, tokens: Tokens, rows: CandidateRows) -> Tensor:
        own = tokens.candidate[:, self.own].flatten(1)
        return self.heads(own, tokens.request[:, self.of_request].flatten(1) if self.of_request else None, rows)


def _places(spec: FeatureSpec, features: Sequence[SparseFeature], tokens: int) -> list[int]:
    """Of a side's tokens: those of small tables, and all behind those of ids."""
    small = [place for place, feature in enumerate(features) if spec.tables[feature.table] <= FEW]
    return [*small, *range(len(features), tokens)]
