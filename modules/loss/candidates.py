"""Losses of each candidate by itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from modules.loss.base import Requests, TaskLoss


class _OfCandidates(TaskLoss):
    def terms(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
        return self.values(logits, labels), weights

    @abstractmethod
    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[C] losses."""


class _Probability(_OfCandidates):
    """Of a logit whose sigmoid is a probability; labels are 0 or 1, or probabilities."""

    metrics: ClassVar[str] = "binary"

    def predict(self, logits: Tensor) -> Tensor:
        return logits[:, 0].sigmoid()


@dataclass(frozen=True)
class BinaryCrossEntropy(_Probability):
    """-[y ln p + (1 - y) ln(1 - p)]."""

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="none")


@dataclass(frozen=True)
class Focal(_Probability):
    """|y - p|^gamma times cross-entropy, positives times alpha and negatives times 1 - alpha, unless alpha is None
    (arXiv 1708.02002; for soft labels as in 2006.04388). Its probabilities are not calibrated."""

    gamma: float = 2.0
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.gamma < 0 or (self.alpha is not None and not 0 <= self.alpha <= 1):
            raise ValueError(f"gamma={self.gamma} must be at least 0 and alpha={self.alpha} in 0..1, e.g. gamma=2")

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits[:, 0]
        entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        # Away from 0, where powers below 1 have no derivative.
        factor = (labels - logits.sigmoid()).abs().clamp(min=1e-12) ** self.gamma
        if self.alpha is not None:
            factor = factor * (labels * self.alpha + (1 - labels) * (1 - self.alpha))
        return factor * entropy


class _Real(_OfCandidates):
    metrics: ClassVar[str] = "real"
    least, most = -math.inf, math.inf

    def predict(self, logits: Tensor) -> Tensor:
        return logits[:, 0]


@dataclass(frozen=True)
class Squared(_Real):
    """(prediction - y)^2 / 2."""

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (logits[:, 0] - labels) ** 2


@dataclass(frozen=True)
class Huber(_Real):
    """(prediction - y)^2 / 2 up to an error of `delta`, then delta (|error| - delta / 2)."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta={self.delta} must be above 0, e.g. delta=1")

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.huber_loss(logits[:, 0], labels, reduction="none", delta=self.delta)


@dataclass(frozen=True)
class Log(_Real):
    """(logit - ln(1 + y))^2 / 2 of labels of at least 0, such as seconds of watching; the prediction is e^logit - 1."""

    least = 0.0

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * (logits[:, 0] - labels.log1p()) ** 2

    def predict(self, logits: Tensor) -> Tensor:
        return logits[:, 0].expm1()


@dataclass(frozen=True)
class Classes(_OfCandidates):
    """Cross-entropy of one of `number` classes; labels are 0 .. number - 1."""

    number: int
    metrics: ClassVar[str] = "classes"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.number < 2:
            raise ValueError(f"number={self.number} of classes must be at least 2, e.g. number=5")

    @property
    def most(self) -> float:  # type: ignore[override]
        return self.number - 1

    @property
    def outputs(self) -> int:
        return self.number

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels.long(), reduction="none")

    def predict(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)


@dataclass(frozen=True)
class _Own(_OfCandidates):
    """A function of your own: (logits [C], labels [C]) -> losses [C]."""

    function: Callable[[Tensor, Tensor], Tensor]
    name: str

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        values = self.function(logits[:, 0], labels)
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"the loss {self.name} must give a loss for each candidate, {list(labels.shape)}: {given}")
        return values


@dataclass(frozen=True)
class OwnReal(_Own, _Real):
    """Of real numbers: its logit is its prediction."""


@dataclass(frozen=True)
class OwnBinary(_Own, _Probability):
    """Of labels of 0 and 1: its logit's sigmoid is a probability."""


OWN: dict[str, type[_Own]] = {"real": OwnReal, "binary": OwnBinary}
"""By what `of` says."""
