"""What the loss of a task is; `modules.loss.tasks` has their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Requests:
    """Which request each of C candidates belongs to."""

    offsets: Tensor  # [R + 1] int64
    owner: Tensor  # [C] int64
    most: int  # a constant that no request's number of candidates exceeds

    def padded(self, values: Tensor, fill: float) -> Tensor:
        """[C] -> [R, most], `fill` behind each request's candidates."""
        num_requests = self.offsets.shape[0] - 1
        place = torch.arange(values.shape[0], device=values.device) - self.offsets[self.owner]
        out = values.new_full((num_requests * self.most,), fill)
        return out.index_copy(0, self.owner * self.most + place, values).view(num_requests, self.most)


class TaskLoss(ABC):
    """The loss of one task; the fields of a subclass, a dataclass, are its arguments in the configuration.

    `metrics` is the kind that fits it, one of `train.metrics.tasks`. Labels are numbers from `least` to `most`, whole
    ones if `whole`.
    """

    metrics: ClassVar[str]
    least: float = 0.0
    most: float = 1.0
    whole: ClassVar[bool] = False

    @property
    def outputs(self) -> int:
        """Logits of a candidate that the model has for the task."""
        return 1

    @abstractmethod
    def terms(self, logits: Tensor, labels: Tensor, weights: Tensor, requests: Requests) -> tuple[Tensor, Tensor]:
        """(values [n], their weights [n]) whose weighted mean over all ranks is the loss, for any number n of terms.

        logits [C, outputs] float32, labels and weights [C]. A label that was not observed is 0 and weighs 0.
        """

    @abstractmethod
    def predict(self, logits: Tensor) -> Tensor:
        """What logits [C, outputs] predict, in the labels' own units: [C], of several classes their shares [C, n]."""
