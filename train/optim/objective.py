"""What a training step minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modules.batch import FeatureSpec, RequestBatch
from modules.loss import TaskLosses, shares_of_tasks
from modules.models.ranking import Architecture, LowerLogits
from modules.models.retrieval import NextItems
from train.parallel.layout import part_of

TeacherLoss = Callable[[Tensor, RequestBatch, Tensor | None], Tensor]
"""Of logits, their batch and the shares of tasks: what a teacher adds to this rank's share of the loss."""


class Objective:
    """The losses of all tasks, those of lower logits and of a teacher, and the model's own."""

    def __init__(
        self,
        losses: TaskLosses,
        spec: FeatureSpec,
        weights: Mapping[str, float],
        teacher: TeacherLoss | None,
        device: torch.device,
    ) -> None:
        """`weights`: of tasks that do not weigh 1."""
        self.losses, self.spec, self.teacher = losses, spec, teacher
        self.task_shares = shares_of_tasks(weights, spec.tasks)
        self._shares = torch.tensor(list(self.task_shares.values()), device=device) if weights else None

    def __call__(
        self, arch: Architecture, outputs: Tensor | NextItems, batch: RequestBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(what to differentiate, the losses of labels alone, logits [C, outputs], the tasks' global weight).

        Losses are this rank's shares, whose mean over ranks is meant; but for the first, all are detached.
        """
        loss, weight = self.losses(outputs, batch, self.spec, self._shares)
        logits = outputs if isinstance(outputs, Tensor) else batch.labels.new_empty(batch.num_candidates, 0)
        if isinstance(arch, LowerLogits):
            for share, lower in arch.take_lower():
                loss = loss + share * self.losses(lower, batch, self.spec, self._shares)[0]
        taught = 0 if self.teacher is None else self.teacher(logits, batch, self._shares)
        # Models without such a loss take its zero from a parameter, which may be sharded.
        return loss + taught + part_of(arch.aux_loss()), loss.detach(), logits.detach(), weight
