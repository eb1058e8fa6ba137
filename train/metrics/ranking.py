"""How well the candidates of each request are ordered: NDCG and recall at k, and the mean reciprocal rank (MRR).

With binary labels, over the observed candidates of a request, ranked from 1 on by falling score:

- NDCG@k is the sum of 1 / log2(1 + rank) over the positives among the first k, over the largest such sum;
- recall@k is the share of the positives that are among the first k;
- the reciprocal rank is 1 / the rank of the first positive; `mrr_all` is the mean of 1 / rank over all positives.

Candidates of equal score have no order: each value is its expectation over all orders of them, so no order of rows
changes it. Each is averaged over the requests that have positives and negatives; in others every order is as good. No
request is divided between ranks or batches, so sums over them are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.metrics.auc import differs_from_previous


def ranking_names(top_k: Sequence[int]) -> list[str]:
    """The metrics that `ranking_sums` sums."""
    return ["mrr", "mrr_all", *(f"ndcg@{k}" for k in top_k), *(f"recall@{k}" for k in top_k)]


def ranking_sums(
    scores: Tensor, labels: Tensor, weights: Tensor, candidate_offsets: Tensor, top_k: Sequence[int]
) -> Tensor:
    """Sums over requests, float64: their number, their weight, and weight x value for each of `ranking_names(top_k)`.

    scores, labels in {0, 1, NaN = not observed} and weights >= 0 [C] of R requests, which `candidate_offsets` [R + 1]
    divides. The weight of a request is the mean of its observed candidates'; those of weight 0 count as not observed.
    A NaN score on an observed candidate makes the values NaN. Does not sync with the host.
    """
    num_requests, num_rows, device = candidate_offsets.shape[0] - 1, scores.shape[0], scores.device
    observed = ~labels.isnan() & (weights > 0)
    invalid = (scores.isnan() & observed).any()
    owner = torch.repeat_interleave(
        torch.arange(num_requests, device=device), candidate_offsets.diff(), output_size=num_rows
    )
    # Unobserved candidates form a second request beside each, whose sums are not used.
    segment = 2 * owner + ~observed
    scores = torch.where(observed, scores, 0)
    order = scores.argsort(descending=True, stable=True)
    order = order[segment[order].argsort(stable=True)]
    scores, segment, positive = scores[order], segment[order], (labels == 1)[order].long()

    def by_segment(values: Tensor) -> Tensor:
        return values.new_zeros(2 * num_requests).index_add_(0, segment, values)

    size, positives = by_segment(torch.ones_like(segment)), by_segment(positive)
    rank = torch.arange(num_rows, device=device) - (size.cumsum(0) - size)[segment]  # from 0 on
    # For the tie that a row is in: its rows, its positives, and the rows before it.
    starts_tie = differs_from_previous(segment) | differs_from_previous(scores)
    tie = starts_tie.cumsum(0) - 1

    def of_tie(values: Tensor) -> Tensor:
        return values.new_zeros(num_rows).index_add_(0, tie, values)[tie]

    tied, tied_positives, first = of_tie(torch.ones_like(tie)), of_tie(positive), of_tie(rank * starts_tie)
    earlier = positive.cumsum(0) - positive - (positives.cumsum(0) - positives)[segment]
    no_earlier = of_tie(earlier * starts_tie) == 0

    expected, discount = tied_positives.double() / tied, 1 / (rank + 2).double().log2()
    ideal = torch.where(rank < positives[segment], discount, 0)
    chance = torch.where(no_earlier, _first_positive(rank - first, tied, tied_positives), 0)

    def at(k: int, values: Tensor) -> Tensor:
        return by_segment(torch.where(rank < k, values, 0))

    values = [by_segment(chance / (rank + 1)), by_segment(expected / (rank + 1)) / positives]
    values += [at(k, expected * discount) / at(k, ideal) for k in top_k]
    values += [at(k, expected) / positives for k in top_k]

    ranked = (positives > 0) & (positives < size)
    ranked &= torch.arange(2 * num_requests, device=device) % 2 == 0
    weight = torch.where(ranked, by_segment(weights[order].double()) / size, 0)
    sums = [ranked.double(), weight, *(torch.where(ranked, value, 0) * weight for value in values)]
    result = torch.stack(sums).sum(1)
    result[2:] += torch.where(invalid, torch.nan, 0.0)
    return result


def _first_positive(place: Tensor, tied: Tensor, positives: Tensor) -> Tensor:
    """Chance that the first of `positives` among `tied` rows in random order is at `place` (from 0 on), float64.

    Binomial(tied - 1 - place, positives - 1) / binomial(tied, positives).
    """
    place, tied, positives = place.double(), tied.double(), positives.double()
    behind, negatives = tied - place, tied - positives
    # lgamma is infinite if more positives are left than places after this one: chance 0.
    logs = behind.lgamma() + (negatives + 1).lgamma() - (behind - positives + 1).lgamma() - (tied + 1).lgamma()
    return positives * logs.exp()
