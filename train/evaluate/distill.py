"""Learning from a teacher: its scores of the training candidates are soft labels beside the observed ones.

    loss = loss(labels) + distill.weight * loss(teacher's probabilities)

Both losses are `ranking_loss`, so a teacher also speaks where a label was not observed. The teacher is either a run's
predictions of the training split, or a checkpoint that scores every batch. With `distill.adapter` a small head learns
from the same labels to correct the teacher, and the student sees what it makes of the teacher's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from modules.batch import RequestBatch
from modules.loss import ranking_loss, task_loss
from modules.models.ranking import RankingModel
from train.build import Job, load_model
from train.checkpoint import load as checkpoint
from train.config.compose import from_dict
from train.config.schema import DistillConfig
from train.metrics.predictions import read_predictions

ADAPTER_LR = 0.1
EPSILON = 1e-6  # probabilities nearer to 0 or 1 count as this near


class Teacher(Protocol):
    def __call__(self, batch: RequestBatch) -> Tensor:
        """Probabilities [C, tasks] float32; NaN where the teacher has none."""
        ...


class StoredTeacher:
    """Predictions that `train.evaluate split=train` has written to `folder`, found by the candidates' rows.

    ValueError when a task or every row is missing. They are kept on `device`, 4 bytes for each task and row.
    """

    def __init__(self, folder: Path, tasks: tuple[str, ...], device: torch.device) -> None:
        try:
            columns = read_predictions(folder)
        except OSError as error:
            raise ValueError(
                f"distill.predictions={folder} cannot be read ({error}); write it with python -m train.evaluate "
                "run_dir=TEACHER split=train out=DIR, which makes DIR/predictions"
            ) from error
        if lacking := [task for task in tasks if f"{task}_probability" not in columns]:
            raise ValueError(
                f"distill.predictions={folder} has no predictions of task {lacking[0]!r}; its columns are "
                f"{', '.join(columns)}"
            )
        rows = columns["row"]
        if not len(rows):
            raise ValueError(f"distill.predictions={folder} holds no rows; evaluate the teacher with split=train")
        table = np.full((int(rows.max()) + 2, len(tasks)), np.nan, np.float32)  # the last row is for unknown ones
        for index, task in enumerate(tasks):
            table[rows, index] = columns[f"{task}_probability"]
        self._table = torch.from_numpy(table).to(device)

    def __call__(self, batch: RequestBatch) -> Tensor:
        return self._table[batch.row.clamp(max=len(self._table) - 1)]


class ModelTeacher:
    """A model, whole on every rank, that scores each batch without gradients."""

    def __init__(self, model: RankingModel, autocast: AbstractContextManager[object]) -> None:
        self._model = model.requires_grad_(False)
        self._autocast = autocast

    @torch.no_grad()
    def __call__(self, batch: RequestBatch) -> Tensor:
        with self._autocast:
            return self._model(batch).float().sigmoid()


class StudentAdapter:
    """Corrected logits W t + b of a teacher's logits t [C, tasks], learned from fresh labels: GEM's student adapter.

    It starts as the teacher, W = 1 and b = 0, and takes a step of gradient descent on the labels' loss for each batch.
    With a few numbers to learn, it follows a shift of the labels at once, which a teacher that has been trained before
    cannot know. Its gradients are those of all ranks together, and its state is a list of numbers.
    """

    def __init__(self, num_tasks: int, lr: float, device: torch.device) -> None:
        self.weight = torch.eye(num_tasks, device=device)
        self.bias = torch.zeros(num_tasks, device=device)
        self.lr = lr

    def __call__(self, probabilities: Tensor, batch: RequestBatch) -> Tensor:
        """Corrected probabilities [C, tasks], before the step that this batch's labels lead to; NaN stays NaN."""
        known = ~probabilities.isnan().any(1, keepdim=True)
        teacher = torch.where(known, probabilities, 0.5).float().logit(EPSILON)
        parameters = [self.weight.requires_grad_(), self.bias.requires_grad_()]
        with torch.enable_grad():
            logits = teacher @ self.weight.T + self.bias
            labels = torch.where(known, batch.labels, torch.nan)
            loss, _ = ranking_loss(logits, labels, batch.weights)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(False)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            parameter -= self.lr * gradient.nan_to_num(0.0, 0.0, 0.0)
        return torch.where(known, logits.detach().sigmoid(), torch.nan)

    def state(self) -> list[float]:
        """Reads them from the device, which waits for it."""
        return torch.cat([self.weight.flatten(), self.bias]).tolist()

    def restore(self, state: list[float]) -> None:
        if state:
            numbers = torch.tensor(state, device=self.bias.device)
            self.weight, self.bias = numbers[: -len(self.bias)].view_as(self.weight), numbers[-len(self.bias) :]


class Distillation:
    """The loss on a teacher's soft labels, `distill.weight` included."""

    def __init__(self, teacher: Teacher, config: DistillConfig, num_tasks: int, device: torch.device) -> None:
        self.teacher = teacher
        self.weight = config.weight
        self.adapter = StudentAdapter(num_tasks, ADAPTER_LR, device) if config.adapter else None

    def loss(self, logits: Tensor, batch: RequestBatch, task_shares: Tensor | None) -> Tensor:
        """Of the student's logits [C, tasks]; as `ranking_loss`, this rank's share."""
        soft = self.teacher(batch)
        if self.adapter is not None:
            soft = self.adapter(soft, batch)
        return self.weight * ranking_loss(logits, soft, batch.weights, task_shares)[0]


def build_distillation(job: Job) -> Distillation | None:
    """What the configuration names; None without a teacher. ValueError as in `build_teacher`."""
    teacher = build_teacher(job)
    if teacher is None:
        if job.config.distill.adapter:
            raise ValueError(
                "distill.adapter=true corrects a teacher, and there is none: name distill.predictions or "
                "distill.checkpoint"
            )
        return None
    return Distillation(teacher, job.config.distill, len(job.source.spec.tasks), job.world.device)


def build_teacher(job: Job) -> Teacher | None:
    """The teacher that the configuration names; None without one.

    ValueError for both kinds at once, and for a teacher of other data or other tasks.
    """
    distill, spec, device = job.config.distill, job.source.spec, job.world.device
    if distill.predictions and distill.checkpoint:
        raise ValueError("distill.predictions and distill.checkpoint name two teachers; leave one of them empty")
    if distill.predictions or distill.checkpoint:
        _check_losses(job.config.tasks, "this run's")
    if distill.predictions:
        return StoredTeacher(Path(distill.predictions), spec.tasks, device)
    if not distill.checkpoint:
        return None
    path = Path(distill.checkpoint)
    if (path / "checkpoints").is_dir():
        path = checkpoint.resolve(str(path), "")
    config = from_dict(checkpoint.read_meta(path)["config"], [])
    _check_losses(config.tasks, "the teacher's")
    model = load_model(path, config, job.source, spec.max_candidates, device)
    enabled = config.precision.name != "fp32"
    return ModelTeacher(model, torch.autocast(device.type, torch.bfloat16, enabled=enabled))


def _check_losses(tasks: Mapping[str, Any], whose: str) -> None:
    """ValueError for a task whose logits are no probabilities."""
    for task, chosen in tasks.items():
        if task_loss(task, chosen).metrics != "binary":
            raise ValueError(
                f"distillation: {whose} tasks.{task}.loss={chosen['loss']} gives no probabilities, which soft labels "
                "are; use the loss binary or focal, or no distill.predictions and distill.checkpoint"
            )
