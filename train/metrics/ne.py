"""Log loss and normalised entropy (NE), from logits in float64.

NE is the mean log loss divided by the entropy of a constant predictor (He et al., "Practical Lessons from Predicting
Clicks on Ads at Facebook", 2014). The constant is the positive rate of the training data, so two models, splits or
runs that are compared share one denominator whatever the rate of the split that they are evaluated on.
"""

from __future__ import annotations

import math

from torch import Tensor, nn


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
