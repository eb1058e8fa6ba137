"""Heads of several domains on one trunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.layers.feed_forward.mlp import TaskHeads

MOST_DOMAINS = 64


class DomainHeads(nn.Module):
    """logits = shared(x) + own_d(x): heads that all domains share, plus those of the request's domain.

    x is [C, num_in]. The domain is the value of the request's categorical feature `feature`; "" is one domain, which
    has the shared heads alone, and so has a value that was not seen in training. Every own head computes the logits of
    all candidates, of which each takes its own, so that no size depends on the data.
    """

    def __init__(self, spec: FeatureSpec, num_in: int, hidden: Sequence[int], dropout: float, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.num_outputs = spec.num_outputs
        self.shared = TaskHeads(num_in, hidden, self.num_outputs, dropout)
        self.own: TaskHeads | None = None
        if feature:
            num_domains = _num_domains(spec, feature)
            self.own = TaskHeads(num_in, hidden, num_domains * self.num_outputs, dropout)

    def forward(self, x: Tensor, rows: CandidateRows, batch: RequestBatch) -> Tensor:
        logits = self.shared(x)
        if self.own is None:
            return logits
        if not hasattr(batch, "request_sparse"):
            raise ValueError(
                f"model.domain_feature={self.feature} reads the ids of requests, which traced programs are not given"
            )
        domain = batch.request_sparse[self.feature].values()[rows.owner]  # 0 is unknown
        own = self.own(x).unflatten(1, (-1, self.num_outputs))
        index = (domain - 1).clamp(min=0)[:, None, None].expand(-1, 1, self.num_outputs)
        return logits + torch.where(domain[:, None] > 0, own.gather(1, index)[:, 0], 0)


def _num_domains(spec: FeatureSpec, feature: str) -> int:
    """Values of the feature, without the unknown one."""
    tables = {each.name: each.table for each in spec.request if not each.is_list}
    if feature not in tables:
        names = ", ".join(tables) or "none"
        raise ValueError(f"model.domain_feature={feature!r} is no categorical feature of requests; there are {names}")
    num_domains = spec.tables[tables[feature]] - 1
    if not 1 <= num_domains <= MOST_DOMAINS:
        raise ValueError(
            f"model.domain_feature={feature!r} has {num_domains} values, and each has heads of its own: choose a "
            f"feature with 1 to {MOST_DOMAINS}"
        )
    return num_domains
