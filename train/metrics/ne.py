"""Log loss and normalised entropy (NE), from logits in float64.

NE is the mean log loss divided by the entropy of a constant predictor (He et al., "Practical Lessons from Predicting
Clicks on Ads at Facebook", 2014). The constant is the positive rate of the training data, so two models, splits or
runs that are compared share one denominator whatever the rate of the split that they are evaluated on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SHIFT_STEPS = 40  # of a bisection; what is left of its range changes the loss by less than float64 rounds


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-[y ln p + (1 - y) ln(1 - p)] of each element in nats, float64, for labels in {0, 1}.

    Never forms p: an arbitrarily confident right answer costs 0 and a wrong one its |logit|, infinite logits included.
    """
    toward_label = (2 * labels.double() - 1) * logits.double()
    return -nn.functional.logsigmoid(toward_label)


def binary_entropy(rate: float) -> float:
    """-[r ln r + (1 - r) ln(1 - r)] in nats; 0 at r = 0 and r = 1."""
    return -sum(r * math.log(r) for r in (rate, 1 - rate) if r > 0)


def normalized_entropy(mean_log_loss: float, base_rate: float) -> float:
    """Mean log loss over the entropy of `base_rate`; below 1 beats the constant predictor.

    NaN when the base rate is 0 or 1: training data of one class has no entropy to normalise by.
    """
    entropy = binary_entropy(base_rate)
    return mean_log_loss / entropy if entropy > 0 else math.nan


def recalibrated_log_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean log loss, 0-d float64, after the constant added to [N] logits for which it is smallest.

    With that constant, predictions sum to the labels. It corrects negatives that were sampled at any rate w, since
    p / (p + (1 - p) / w) adds ln w to the logit (He et al. 2014). Labels in {0, 1, NaN = not observed}, weights >= 0.
    NaN when fewer than two classes carry weight, and when an observed row's logit is NaN. Does not sync with the host.
    """
    if logits.numel() == 0:
        return torch.full((), torch.nan, dtype=torch.float64, device=logits.device)
    seen = ~labels.isnan() & (weights > 0)
    weight, label = torch.where(seen, weights, 0).double(), torch.where(seen, labels, 0).double()
    logit = torch.where(labels.isnan(), 0, logits).double()
    rate = (weight * label).sum() / weight.sum()
    finite = logit.clamp(-1e3, 1e3)  # infinite ones stay where they are whatever is added
    low, high = rate.logit() - finite.max(), rate.logit() - finite.min()
    for _ in range(SHIFT_STEPS):
        middle = (low + high) / 2
        above = (weight * (torch.sigmoid(finite + middle) - label)).sum() > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    loss = torch.where(seen, log_loss(logit + (low + high) / 2, label), 0)
    value = (weight * loss).sum() / weight.sum()
    return torch.where((rate > 0) & (rate < 1), value, torch.nan)
