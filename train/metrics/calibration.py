"""Calibration: do predictions of 10 % come true 10 % of the time?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.metrics.histogram import ScoreHistogram


@dataclass(frozen=True)
class CalibrationCurve:
    """Mean prediction, observed positive rate and weight of each score range: [points] float64, ascending scores."""

    predicted: Tensor
    observed: Tensor
    weight: Tensor


def calibration_curve(histogram: ScoreHistogram, points: int = 20) -> CalibrationCurve:
    """Merge the bins of a histogram into at most `points` score ranges of about equal weight.

    A bin is never split, so fewer points come back when few bins are filled, and none when the histogram is empty.
    """
    weight = histogram.positive + histogram.negative
    filled = weight > 0
    weight, positive = weight[filled], histogram.positive[filled]
    predicted = histogram.probability[filled] * weight
    middle = weight.cumsum(0) - 0.5 * weight
    rank = (middle / weight.sum() * points).long()
    ranges, index = rank.unique(return_inverse=True)
    sums = torch.zeros(ranges.numel(), 3, dtype=torch.float64, device=weight.device)
    sums.index_add_(0, index, torch.stack([predicted, positive, weight], dim=1))
    return CalibrationCurve(sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2], sums[:, 2])
