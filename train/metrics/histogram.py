"""Scores counted into fixed bins: the state of streaming AUC, calibration curves and score plots, merged by addition.

Bins are uniform in the logit, not in the probability: click rates are often below 1 %, where bins of equal probability
would put nearly all scores into a few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 8192
LOGIT_LIMIT = 16.0
"""Logits beyond it share the outermost bins: probabilities below 1.2e-7 or above 1 - 1.2e-7."""


@dataclass(frozen=True)
class ScoreHistogram:
    """Weights of one task's rows by score bin, ascending: `positive` and `negative` are [bins] float64."""

    positive: Tensor
    negative: Tensor

    @property
    def logit_edges(self) -> Tensor:
        """[bins + 1] float64."""
        num_edges = self.positive.numel() + 1
        return torch.linspace(-LOGIT_LIMIT, LOGIT_LIMIT, num_edges, dtype=torch.float64, device=self.positive.device)

    @property
    def probability(self) -> Tensor:
        """[bins] float64: the prediction at the centre of each bin."""
        edges = self.logit_edges
        return torch.sigmoid((edges[1:] + edges[:-1]) / 2)


def bin_index(logits: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """int64 bin of each logit. NaN gets the middle bin, so that every index is in the table; the loss shows it."""
    position = (logits.double().nan_to_num(nan=0.0) + LOGIT_LIMIT) * (num_bins / (2 * LOGIT_LIMIT))
    return position.floor().clamp(0, num_bins - 1).long()


def score_histogram(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, num_bins: int = NUM_BINS
) -> ScoreHistogram:
    """Histogram of one task: logits, labels in {0, 1, NaN = not observed} and weights (default 1) are all [N]."""
    weights = torch.ones_like(labels) if weights is None else weights
    by_class = class_weights(labels, weights)
    table = torch.zeros(num_bins, 2, dtype=torch.float64, device=logits.device)
    table.index_add_(0, bin_index(logits, num_bins), by_class)
    return ScoreHistogram(table[:, 0], table[:, 1])


def class_weights(labels: Tensor, weights: Tensor) -> Tensor:
    """[..., 2] float64: each row's weight as a positive and as a negative, both 0 where the label is NaN."""
    positive = torch.where(labels == 1, weights, 0.0)
    negative = torch.where(labels == 0, weights, 0.0)
    return torch.stack([positive, negative], dim=-1).double()
