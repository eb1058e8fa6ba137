"""Losses by name, and all tasks' losses of a step together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from modules.batch import FeatureSpec, RequestBatch
from modules.core.import_object import import_object
from modules.loss.base import Requests, TaskLoss
from modules.loss.candidates import OWN, BinaryCrossEntropy, Classes, Focal, Huber, Log, Squared
from modules.loss.means import global_mean, ranking_loss
from modules.loss.next_item import BPR, GBCE, ItemShares, NextItemLoss, SampledSoftmax
from modules.loss.within_requests import Listwise, Pairwise
from modules.models.retrieval import NextItems

LOSSES: dict[str, type[TaskLoss]] = {
    "binary": BinaryCrossEntropy,
    "focal": Focal,
    "squared": Squared,
    "huber": Huber,
    "log": Log,
    "classes": Classes,
    "pairwise": Pairwise,
    "listwise": Listwise,
}
NEXT_ITEM: dict[str, type[NextItemLoss]] = {"softmax": SampledSoftmax, "gbce": GBCE, "bpr": BPR}
Loss = TaskLoss | NextItemLoss


def task_loss(task: str, chosen: Any) -> Loss:
    """The loss of `chosen`, {loss: name, argument: value, ...}; the name is one of those below, or that of a function
    of your own, `module.function`, whose labels `of` tells. ValueError with the names that there are, of losses and of
    their arguments."""
    key = f"tasks.{task}"
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("loss"), str):
        raise ValueError(f"{key}={chosen} must name a loss, e.g. +{key}.loss=squared")
    name, arguments = chosen["loss"], {argument: value for argument, value in chosen.items() if argument != "loss"}
    if "." in name:
        of = arguments.pop("of", "real")
        if arguments or of not in OWN:
            wrong = f"{next(iter(arguments))}" if arguments else f"of={of}"
            raise ValueError(f"{key}.{wrong}: a loss of your own, {name}, takes `of` alone: {' or '.join(OWN)}")
        return OWN[of](import_object(name, f"{key}.loss"), name)
    known = {**LOSSES, **NEXT_ITEM}
    if name not in known:
        raise ValueError(
            f"{key}.loss={name} is not known; choose one of {', '.join(known)}, or a function of your own, such as "
            "my_losses.poisson"
        )
    fields = {field.name: field for field in dataclasses.fields(known[name])}  # type: ignore[arg-type]
    if unknown := sorted(set(arguments) - set(fields)):
        takes = f"there are {', '.join(fields)}" if fields else "it takes none"
        raise ValueError(f"{key}.{unknown[0]} is no argument of the loss {name}; {takes}")
    if missing := [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in arguments]:
        raise ValueError(f"{key}: the loss {name} needs +{key}.{missing[0]}=..., e.g. 5")
    try:
        return cast("type[Loss]", known[name])(**arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error


def binary_only(config: Mapping[str, Any], command: str) -> None:
    """ValueError if a task has a loss whose metrics are not those of probabilities, which `command` compares."""
    for task, chosen in config.items():
        if (loss := task_loss(task, chosen)).metrics != "binary":
            raise ValueError(
                f"{command} compares NE and AUC, which tasks.{task}.loss={chosen['loss']} has none of (its metrics are "
                f"{loss.metrics}); metrics.jsonl and results.json of both runs have those that fit it"
            )


class TaskLosses:
    """The losses of all tasks of the data, in their order; tasks without an entry in `config` have "binary"."""

    def __init__(self, config: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """`config`: task -> what `task_loss` takes. ValueError for tasks that the data lacks."""
        if unknown := sorted(set(config) - set(tasks)):
            raise ValueError(f"tasks.{unknown[0]} is no task of the data, which has {', '.join(tasks)}")
        losses = {task: task_loss(task, config.get(task, {"loss": "binary"})) for task in tasks}
        self.by_task: dict[str, Loss] = losses
        next_items = [loss for loss in losses.values() if isinstance(loss, NextItemLoss)]
        if next_items and len(losses) > 1:
            raise ValueError(f"a loss of next items is that of the only task; the data has {', '.join(tasks)}")
        self.next_item = next_items[0] if next_items else None
        self.known = ItemShares(1)
        self._plain = all(type(loss) is BinaryCrossEntropy for loss in losses.values())

    @property
    def outputs(self) -> tuple[int, ...]:
        """Logits that the model has for each task."""
        return tuple(loss.outputs if isinstance(loss, TaskLoss) else 1 for loss in self.by_task.values())

    @property
    def negatives(self) -> int:
        """Items that the loader puts behind each training batch."""
        return self.next_item.uniform if self.next_item else 0

    def check_labels(self, bounds: Mapping[str, tuple[float, float, bool]]) -> None:
        """ValueError unless each loss takes its task's labels: (least, most, whether all are whole) by task, of tasks
        whose labels are real numbers; others have labels of 0 and 1."""
        for task, loss in self.by_task.items():
            if isinstance(loss, NextItemLoss):
                continue
            least, most, whole = bounds.get(task, (0.0, 1.0, True))
            if least < loss.least or most > loss.most or (loss.whole and not whole):
                kind = "whole numbers" if loss.whole else "numbers"
                raise ValueError(
                    f"task {task} has labels of {least:g} to {most:g}, and its loss takes {kind} from {loss.least:g} "
                    f"to {loss.most:g}; use another, e.g. +tasks.{task}.loss=squared"
                )

    def predict(self, logits: Tensor) -> Tensor:
        """What logits [C, outputs] predict, in the labels' own units: [C, outputs]."""
        if self._plain:
            return logits.sigmoid()
        parts = zip(self.by_task.values(), logits.split(self.outputs, dim=1), strict=True)
        return torch.cat([loss.predict(part).view(part.shape) for loss, part in parts], dim=1)

    def __call__(
        self, outputs: Tensor | NextItems, batch: RequestBatch, spec: FeatureSpec, shares: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(this rank's share of the loss, the global weight), as `ranking_loss`, of a model's outputs on `batch`."""
        if self._plain:
            return ranking_loss(_logits(outputs), batch.labels, batch.weights, shares)
        if self.next_item:
            if not isinstance(outputs, NextItems):
                raise ValueError(
                    "a loss of next items needs a model of items: model=sasrec, model=hstu or model=two_tower"
                )
            values, weights = self.next_item.terms(outputs, self.known)
            return global_mean((values * weights).sum()[None], weights.sum()[None])
        outputs = _logits(outputs)
        if outputs.shape != (batch.num_candidates, sum(self.outputs)):
            raise ValueError(
                f"the model gives logits {list(outputs.shape)} where its losses want [C, outputs] = "
                f"{[batch.num_candidates, sum(self.outputs)]}"
            )
        observed = ~batch.labels.isnan()
        labels, weight = torch.where(observed, batch.labels, 0), torch.where(observed, batch.weights, 0)
        requests = Requests(batch.candidate_offsets, batch.owner, spec.max_candidates)
        sums, totals = [], []
        columns = outputs.float().split(self.outputs, dim=1)
        for task, (loss, logits) in enumerate(zip(self.by_task.values(), columns, strict=True)):
            assert isinstance(loss, TaskLoss)
            values, weights = loss.terms(logits, labels[:, task], weight[:, task], requests)
            sums.append((values * weights).sum())
            totals.append(weights.sum())
        return global_mean(torch.stack(sums), torch.stack(totals), shares)


def _logits(outputs: object) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model gives a {type(outputs).__name__} where its losses want a tensor [C, outputs]")
    return outputs
