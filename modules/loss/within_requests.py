"""Losses of the order of a request's candidates. Every request with an order counts once, however long it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.loss.base import Requests, TaskLoss


class _OfRequests(TaskLoss):
    metrics: ClassVar[str] = "order"

    def predict(self, logits: Tensor) -> Tensor:
        return logits[:, 0]


@dataclass(frozen=True)
class Pairwise(_OfRequests):
    """ln(1 + exp(s_j - s_i)), mean over the pairs of a request with y_i > y_j (RankNet, BPR)."""

    least, most = -math.inf, math.inf

    def terms(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
        seen, weight = _seen(weights, requests)
        score, label = requests.padded(logits[:, 0], 0.0), requests.padded(labels, 0.0)
        ordered = (label[:, :, None] > label[:, None, :]) & seen[:, :, None] & seen[:, None, :]  # [R, i, j]
        losses = F.softplus(score[:, None, :] - score[:, :, None]) * ordered
        pairs = ordered.sum((1, 2))
        return losses.sum((1, 2)) / pairs.clamp(min=1), torch.where(pairs > 0, weight, 0)


@dataclass(frozen=True)
class Listwise(_OfRequests):
    """Cross-entropy of softmax(s / temperature) over a request's candidates with labels as shares of their sum
    (ListNet's, of labels of at least 0). Requests whose labels are all equal have no order."""

    temperature: float = 1.0
    least, most = 0.0, math.inf

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0, e.g. temperature=1")

    def terms(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
        seen, weight = _seen(weights, requests)
        label = requests.padded(labels, 0.0) * seen
        total = label.sum(1)
        # The smallest number in place of -inf: a row without candidates would have a gradient of NaN.
        score = requests.padded(logits[:, 0] / self.temperature, 0.0).masked_fill(~seen, torch.finfo(torch.float32).min)
        shares = label / torch.where(total > 0, total, 1)[:, None]
        losses = -(shares * torch.where(seen, score.log_softmax(1), 0)).sum(1)
        least = label.masked_fill(~seen, math.inf).amin(1)
        return losses, torch.where(label.amax(1) > least, weight, 0)


def _seen(weights: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
    """Which places [R, most] hold a candidate that counts, and their mean weight [R]."""
    weight = requests.padded(weights, 0.0)
    seen = weight > 0
    return seen, weight.sum(1) / seen.sum(1).clamp(min=1)
