"""Two towers: a vector of the user and one of the item, without a history."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import option
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.mlp import MLP
from modules.models.retrieval import NextItems, RetrievalConfig, RetrievalModel, positive_weights


class TwoTower(RetrievalModel):
    """score = query(request) . item(candidate).

    A tower is an MLP over the side's tokens. Without `hidden` there is none: the query is the mean of the request's
    tokens plus a vector that all share, and an item its embedding. With a user id alone this is matrix factorisation,
    which the loss makes that of BPR (arXiv 1205.2618) or of sampled softmax (arXiv 2201.02327). Histories are read by
    evaluations only, which leave out what is in them.
    """

    several_targets = True

    @dataclass(kw_only=True)
    class Config(RetrievalConfig):
        name: str = "two_tower"
        hidden: list[int] = option([], least=1)  # of each tower's MLP; none: embeddings alone

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__(spec, config)
        dim, hidden, dropout = config.dim, config.hidden, config.dropout
        self.user_tower = MLP(spec.num_request_tokens * dim, hidden, dim, dropout) if hidden else None
        self.item_tower = MLP(dim, hidden, dim, dropout) if hidden else None
        self.shared = nn.Parameter(torch.zeros(dim))
        self.dropout = nn.Dropout(dropout)

    def queries(self, tokens: Tokens) -> Tensor:
        request = self.dropout(tokens.request)
        own = request.mean(1) if self.user_tower is None else self.user_tower(request.flatten(1))
        return self.query(own + self.shared)

    def item(self, embedded: Tensor) -> Tensor:
        embedded = self.dropout(embedded)
        return super().item(embedded if self.item_tower is None else self.item_tower(embedded))

    def next_items(self, tokens: Tokens, batch: RequestBatch) -> NextItems:
        """A place is a candidate: what its request leads to."""
        items, ids = self.item(tokens.candidate[:, 0]), batch.candidate_sparse.values()
        places = ids.shape[0] - self.num_negatives
        return NextItems(
            query=CandidateRows.of(batch).expand(self.queries(tokens))[:places],
            target=items[:places],
            target_ids=ids[:places],
            weights=torch.where(ids > 0, positive_weights(batch), 0)[:places],
            candidates=items,
            candidate_ids=ids,
        )
