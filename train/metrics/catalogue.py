"""Metrics of one target's place among the items of a whole catalogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def catalogue_names(top_k: Sequence[int]) -> list[str]:
    """The metrics that `catalogue_sums` sums."""
    return ["mrr", *(f"hr@{k}" for k in top_k), *(f"ndcg@{k}" for k in top_k)]


def catalogue_sums(greater: Tensor, tied: Tensor, known: Tensor, weights: Tensor, top_k: Sequence[int]) -> Tensor:
    """Sums over targets, float64: their number, their weight, and weight x value for each of `catalogue_names(top_k)`.

    greater, tied [n] int64: how many other items score higher than the target, and how many the same. Those of equal
    score have no order, so that each value is its expectation over all orders. A target that is not `known` [n] is no
    item of the catalogue and is never found: all its values are 0.
    """
    greater, last = greater.double(), (greater + tied + 1).double()
    same = tied.double() + 1
    # Sums of 1 / rank over the ranks greater + 1 .. last.
    values = [(torch.digamma(last + 1) - torch.digamma(greater + 1)) / same]
    values += [((k - greater) / same).clamp(0, 1) for k in top_k]
    for k in top_k:
        gains = 1 / torch.arange(2, k + 2, device=greater.device, dtype=torch.float64).log2()
        upto = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        values.append((upto[last.clamp(max=k).long()] - upto[greater.clamp(max=k).long()]) / same)
    counted = torch.where(known, weights.double(), 0)
    return torch.stack([(weights > 0).double(), weights.double(), *(counted * value for value in values)]).sum(1)
