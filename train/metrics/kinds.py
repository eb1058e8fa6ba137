"""Metrics of tasks that are not binary: real numbers, classes, the order within requests. One object a task.

Each keeps a vector of sums, float64 and on the device, that ranks add up; `values` makes metrics of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from modules.loss.base import Requests, TaskLoss
from train.metrics.auc import xauc
from train.metrics.collection import gather_rows
from train.metrics.ranking import ranking_names, ranking_sums


class TaskSums(ABC):
    """`best` is the metric that decides which checkpoint is best, and whether a larger one is better.

    It is NaN where labels decide nothing (none, or all equal), and infinite if predictions are not finite.
    """

    best: tuple[str, bool]

    def __init__(self, loss: TaskLoss, num_sums: int, device: torch.device) -> None:
        self.loss = loss
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)

    def reset(self) -> None:
        self.sums.zero_()

    @abstractmethod
    def update(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests | None) -> None:
        """Add C rows: logits [C, outputs], labels [C] with NaN for not observed, weights [C]."""

    @abstractmethod
    def values(self, sums: Tensor) -> dict[str, float]:
        """Metrics of the sums of all ranks, on the CPU; NaN without rows."""

    def of_rows(self) -> dict[str, float]:
        """Metrics that need the rows of all ranks together, if they were kept: a collective."""
        return {}


class RealSums(TaskSums):
    """rmse, mae, nmse (mean squared error over the labels' variance: 1 is a constant, their mean), calibration; with
    `exact`, which keeps 12 bytes a row, xauc."""

    best = ("nmse", False)

    def __init__(self, loss: TaskLoss, device: torch.device, exact: bool) -> None:
        super().__init__(loss, 7, device)
        self.exact = exact
        self._rows: list[Tensor] = []  # [C, 3] float32: predictions, labels, weights

    def reset(self) -> None:
        super().reset()
        self._rows.clear()

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests | None) -> None:
        observed = ~labels.isnan()
        weight = torch.where(observed, weights, 0.0).double()
        label = torch.where(observed, labels, 0.0).double()
        prediction = torch.where(observed, self.loss.predict(logits.float()), 0.0).double()
        error = prediction - label
        parts = [weight, weight * label, weight * label**2, weight * prediction, weight * error.abs()]
        self.sums += torch.stack([observed.double(), *parts, weight * error**2]).sum(1)
        if self.exact:
            self._rows.append(torch.stack([prediction, labels, weight], dim=1).float())

    def of_rows(self) -> dict[str, float]:
        if not self.exact:
            return {}
        rows = torch.cat([torch.empty(0, 3, device=self.sums.device), *self._rows])
        return {"xauc": float(xauc(*(gather_rows(rows) if dist.is_initialized() else rows).unbind(dim=1)))}

    def values(self, sums: Tensor) -> dict[str, float]:
        examples, weight, label, squared, prediction, absolute, error = sums
        variance = squared / weight - (label / weight) ** 2
        # Equal labels have a variance of rounding errors.
        spread = torch.where(variance > 1e-12 * squared / weight, variance, torch.nan)
        means = {
            "rmse": (error / weight).sqrt(),
            "mae": absolute / weight,
            "nmse": _or_infinite(error, error / weight / spread),
        }
        means |= {"calibration": prediction / label, "label_mean": label / weight, "examples": examples}
        return {name: float(value) for name, value in means.items()}


class ClassSums(TaskSums):
    """log_loss (nats), accuracy, ne (log loss over the entropy of the classes' shares in the same rows)."""

    best = ("ne", False)

    def __init__(self, loss: TaskLoss, device: torch.device) -> None:
        super().__init__(loss, 3 + loss.outputs, device)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests | None) -> None:
        observed = ~labels.isnan()
        weight = torch.where(observed, weights, 0.0).double()
        label = torch.where(observed, labels, 0.0).long()
        loss = torch.where(observed, F.cross_entropy(logits.double(), label, reduction="none"), 0.0)
        right = (logits.argmax(1) == label).double()
        self.sums[:3] += torch.stack([observed.double(), weight * loss, weight * right]).sum(1)
        self.sums[3:].index_add_(0, label, weight)

    def values(self, sums: Tensor) -> dict[str, float]:
        (examples, loss, right), classes = sums[:3], sums[3:]
        weight = classes.sum()
        shares = classes / weight
        entropy = -torch.special.xlogy(shares, shares).sum()
        mean = loss / weight
        values = {
            "log_loss": mean,
            "accuracy": right / weight,
            "ne": _or_infinite(loss, mean / torch.where(entropy > 0, entropy, torch.nan)),
        }
        return {name: float(value) for name, value in (values | {"examples": examples}).items()}


class OrderSums(TaskSums):
    """pair_accuracy: the share of a request's pairs of different labels that are ordered rightly, ties one half, mean
    over requests with such pairs; with `top_k` and labels of 0 and 1 the metrics of `ranking_names`.

    Rows come with their requests; those without (in training) are left out.
    """

    best = ("pair_accuracy", True)

    def __init__(self, loss: TaskLoss, device: torch.device, top_k: Sequence[int]) -> None:
        self.top_k = list(top_k)
        self.names = ranking_names(self.top_k) if top_k else []
        super().__init__(loss, 3 + (2 + len(self.names) if top_k else 0), device)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests | None) -> None:
        if requests is None:
            return
        observed = ~labels.isnan() & (weights > 0)
        weight = requests.padded(torch.where(observed, weights, 0.0), 0.0)
        seen = weight > 0
        score, label = requests.padded(logits[:, 0], 0.0), requests.padded(torch.where(observed, labels, 0.0), 0.0)
        above = (label[:, :, None] > label[:, None, :]) & seen[:, :, None] & seen[:, None, :]
        difference = score[:, :, None] - score[:, None, :]
        right = ((difference > 0) + 0.5 * (difference == 0)) * above
        pairs = above.sum((1, 2))
        weight = torch.where(pairs > 0, weight.sum(1) / seen.sum(1).clamp(min=1), 0).double()
        share = right.sum((1, 2)).double() / pairs.clamp(min=1)
        self.sums[:3] += torch.stack([(pairs > 0).double(), weight, weight * share]).sum(1)
        if self.top_k:
            self.sums[3:] += ranking_sums(logits[:, 0], labels, weights, requests.offsets, self.top_k)

    def values(self, sums: Tensor) -> dict[str, float]:
        requests, weight, share = sums[:3]
        values = {"pair_accuracy": share / weight, "ranked_requests": requests}
        if self.top_k:
            _, total, *within = sums[3:]
            values |= {name: value / total for name, value in zip(self.names, within, strict=True)}
        return {name: float(value) for name, value in values.items()}


def _or_infinite(total: Tensor, value: Tensor) -> Tensor:
    return torch.where(total.isfinite(), value, torch.inf)
