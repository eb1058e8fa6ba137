"""Metrics of the places of targets among the items of a whole catalogue."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def catalogue_names(top_k: Sequence[int], *, several: bool = False) -> list[str]:
    """The metrics that `catalogue_sums` sums; `several`: where a request may have several targets."""
    recall = [f"recall@{k}" for k in top_k] if several else []
    return ["mrr", *(f"{name}@{k}" for name in ("mrr", "hr", "ndcg") for k in top_k), *recall]


def catalogue_sums(
    greater: Tensor,
    tied: Tensor,
    known: Tensor,
    weights: Tensor,
    top_k: Sequence[int],
    of_request: Tensor | None = None,
) -> Tensor:
    """Sums over targets, float64: their number, their weight, and weight x value for each of `catalogue_names(top_k)`.

    greater, tied [n] int64: how many other items score higher than the target, and how many the same. Those of equal
    score have no order, so that each value is its expectation over all orders. A target that is not `known` [n] is no
    item of the catalogue and is never found: all its values are 0.

    With `of_request` [n] int64, how many targets the request of each has, there are sums for `several`: ndcg and recall
    are then means over requests (of DCG by that of the best order, and of the share of its targets that is found), mrr
    and hr remain means over targets. Another sum is in front, of the weight that requests have: the mean of their
    targets'.
    """
    greater, last = greater.double(), (greater + tied + 1).double()
    same = tied.double() + 1
    counted, ones = torch.where(known, weights.double(), 0), torch.ones_like(same)
    share = ones if of_request is None else 1 / of_request
    # Sums of 1 / rank over the ranks greater + 1 .. last, the latter at most k.
    values = [
        counted * (torch.digamma(last.clamp(max=k) + 1) - torch.digamma(greater.clamp(max=k) + 1)) / same
        for k in (math.inf, *top_k)
    ]
    hits = [counted * ((k - greater) / same).clamp(0, 1) for k in top_k]
    values += hits
    for k in top_k:
        gains = 1 / torch.arange(2, k + 2, device=greater.device, dtype=torch.float64).log2()
        upto = torch.cat([gains.new_zeros(1), gains.cumsum(0)])
        gain = counted * (upto[last.clamp(max=k).long()] - upto[greater.clamp(max=k).long()]) / same
        values.append(gain if of_request is None else gain / upto[of_request.clamp(max=k)])
    if of_request is not None:
        values += [hit * share for hit in hits]
    totals = [(weights > 0).double(), weights.double(), *values]
    return torch.stack([*([] if of_request is None else [weights.double() * share]), *totals]).sum(1)


def catalogue_means(sums: Sequence[float], top_k: Sequence[int], *, several: bool = False) -> dict[str, float]:
    """Values of `catalogue_names` and the number of targets, `examples`, from `catalogue_sums`; NaN without weight."""
    requests, number, weight, *totals = sums if several else [0.0, *sums]
    values = {}
    for name, total in zip(catalogue_names(top_k, several=several), totals, strict=True):
        of_requests = several and name.startswith(("ndcg", "recall"))
        base = requests if of_requests else weight
        values[name] = total / base if base else math.nan
    return values | {"examples": number}
