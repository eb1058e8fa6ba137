"""Areas under curves: ROC, exact by ranks (over all rows or within segments) and streaming, precision-recall, XAUC.

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
    wins, totals = _segment_wins(scores, labels, weights, segment)
    value = wins / totals.prod(dim=1)
    return torch.where(_has_nan(scores, labels), torch.nan, value), totals.sum(dim=1)


def xauc(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """AUC of real labels, 0-d float64: the share of pairs of different labels that `scores` order alike, ties one half.

    A pair weighs the product of its weights; scores, labels (NaN = not observed) and weights >= 0 are [N]. NaN when no
    two labels differ, and when an observed row's score is NaN. (Zhan et al., "Deconfounding Duration Bias in Watch-time
    Prediction", 2022.) As many AUCs as the number of distinct labels has bits. Syncs with the host.
    """
    observed = ~labels.isnan()
    scores, labels, weights = scores[observed], labels[observed], weights[observed]
    distinct, place = labels.unique(return_inverse=True)
    wins = pairs = torch.zeros((), dtype=torch.float64, device=scores.device)
    # Two labels differ first in one bit of their places: there, and there only, they are a positive and a negative.
    for bit in range(max(distinct.numel() - 1, 0).bit_length()):
        won, totals = _segment_wins(scores, (place >> bit & 1).float(), weights, place >> (bit + 1))
        wins, pairs = wins + won.sum(), pairs + totals.prod(dim=1).sum()
    return torch.where(scores.isnan().any(), torch.nan, wins / pairs)


def auprc(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Area under the precision-recall curve as the weighted average precision, 0-d float64; arguments as in `auc`.

    Sum over distinct scores of precision x rise in recall, not interpolated: scikit-learn's `average_precision_score`.
    NaN without positives, and when an observed row's score is NaN. Syncs with the host.
    """
    by_class = class_weights(labels, weights)
    seen = by_class.sum(dim=1) > 0
    order = scores[seen].argsort(descending=True, stable=True)
    ranked, by_class = scores[seen][order], by_class[seen][order]
    starts_tie = differs_from_previous(ranked)
    ties = _sum_by(by_class, starts_tie.cumsum(0) - 1, int(starts_tie.sum()))
    so_far = _prefix_sum(ties) + ties
    value = (ties[:, 0] * so_far[:, 0] / so_far.sum(dim=1)).sum() / ties[:, 0].sum()
    return torch.where(_has_nan(scores, labels), torch.nan, value)


def _has_nan(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether a row with a label has a NaN score."""
    return (scores.isnan() & ~labels.isnan()).any()


def _segment_wins(scores: Tensor, labels: Tensor, weights: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """By segment, ascending: weight of pairs that are ordered rightly [S], and of positives and negatives [S, 2]."""
    by_class = class_weights(labels, weights)
    scores = torch.where(labels.isnan(), 0.0, scores)
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
    return wins, totals


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
