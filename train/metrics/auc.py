"""Area under the ROC curve: exact by ranks, over all rows or within segments, and streaming from a histogram.

Exact AUC is the Mann-Whitney statistic: over all (positive, negative) pairs the weighted share in which the positive
scores higher, ties counting one half. One sort serves every segment at once, so GAUC has no loop over users.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.metrics.histogram import ScoreHistogram, class_weights


def auc(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Exact weighted AUC, 0-d float64, of [N] scores, labels in {0, 1, NaN = not observed} and weights >= 0.

    NaN when fewer than two classes carry weight, and when an observed row's score is NaN: it has no rank.
    """
    if scores.numel() == 0:
        return torch.full((), torch.nan, dtype=torch.float64, device=scores.device)
    return segment_auc(scores, labels, weights, torch.zeros_like(labels, dtype=torch.int64))[0].squeeze(0)


def segment_auc(scores: Tensor, labels: Tensor, weights: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """AUC within each distinct value of `segment` [N] int64, ascending: (AUC [S], total weight [S]), float64.

    AUC is NaN in a segment of one class. A NaN score on an observed row makes every segment's NaN. Syncs with the host.
    """
    by_class = class_weights(labels, weights)
    scores = torch.where(labels.isnan(), 0.0, scores)
    invalid = scores.isnan().any()
    order = scores.argsort(stable=True)
    order = order[segment[order].argsort(stable=True)]
    scores, segment, by_class = scores[order], segment[order], by_class[order]

    starts_segment = differs_from_previous(segment)
    starts_tie = starts_segment | differs_from_previous(scores)
    tie_of_row = starts_tie.cumsum(0) - 1
    segment_of_tie = (starts_segment.cumsum(0) - 1)[starts_tie]
    ties = _sum_by(by_class, tie_of_row, segment_of_tie.numel())
    totals = _sum_by(ties, segment_of_tie, int(starts_segment.sum()))

    negatives_below = _prefix_sum(ties[:, 1])
    negatives_below = negatives_below - negatives_below[starts_segment[starts_tie]][segment_of_tie]
    wins = _sum_by(ties[:, 0] * (negatives_below + 0.5 * ties[:, 1]), segment_of_tie, totals.shape[0])
    value = wins / totals.prod(dim=1)
    return torch.where(invalid, torch.nan, value), totals.sum(dim=1)


def streaming_auc(histogram: ScoreHistogram) -> Tensor:
    """AUC with the scores of one bin taken as tied, 0-d float64; NaN when fewer than two classes carry weight.

    Differs from the exact value by at most `streaming_auc_bound`.
    """
    positive, negative = histogram.positive, histogram.negative
    wins = positive * (_prefix_sum(negative) + 0.5 * negative)
    return wins.sum() / (positive.sum() * negative.sum())


def streaming_auc_bound(histogram: ScoreHistogram) -> Tensor:
    """Largest possible |streaming - exact| AUC: one half of the share of pairs that fall into the same bin."""
    positive, negative = histogram.positive, histogram.negative
    return 0.5 * (positive * negative).sum() / (positive.sum() * negative.sum())


def differs_from_previous(values: Tensor) -> Tensor:
    """[N] bool: where a run of equal values begins."""
    first = torch.ones_like(values[:1], dtype=torch.bool)
    return torch.cat([first, values[1:] != values[:-1]])


def _sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


def _prefix_sum(values: Tensor) -> Tensor:
    """Sum of the elements before each one."""
    # CUDA has no deterministic scan of floats and warns where the run asked for determinism: scan on the host then.
    scanned = values.cpu() if values.is_cuda and torch.are_deterministic_algorithms_enabled() else values
    return scanned.cumsum(0).to(values.device) - values
