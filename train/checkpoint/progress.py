"""How far a run is, as a checkpoint's `meta.json` has it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.checkpoint.manifest import META, DamagedError


@dataclass
class Progress:
    """How far a run is. `consumed` counts requests of this epoch over all ranks, so another world size can resume."""

    step: int = 0  # micro-batches
    epoch: int = 0
    consumed: int = 0
    best_ne: float | None = None  # of the validations so far
    best_step: int = 0
    best_values: dict[str, float] = field(default_factory=dict)
    stale_validations: int = 0
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and NE of each
    skipped_steps: int = 0  # because a loss or gradient was not finite
    tokens_per_expert: list[int] = field(default_factory=list)  # of all routers and ranks since the last dense step
    adapter: list[float] = field(default_factory=list)  # of a teacher, see train.evaluate.distill
    parts: list[dict[str, Any]] = field(default_factory=list)  # of files, see train.data.following
    tracker: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, saved: dict[str, Any]) -> Progress:
        """What the `meta.json` of the checkpoint `path` says. Raises `DamagedError` for what no run has written."""
        begun = vars(cls())
        for name, value in saved.items():
            if name not in begun:
                raise DamagedError(path, f"{META} has the unknown progress.{name}={value!r}")
            like = begun[name]  # all but best_ne have a value of their kind
            if like is not None and (type(value) is not type(like) or (isinstance(value, int) and value < 0)):
                raise DamagedError(path, f"{META} has progress.{name}={value!r}, expected one like {like!r}")
        progress = cls(**saved)
        values = progress.best_values.items()
        progress.best_values = {name: math.nan if value is None else value for name, value in values}
        return progress

    def forget_best(self, kept: Collection[int]) -> None:
        """Make best what is best of the validations after these steps, none without one; its values are not known."""
        left = [(ne, step) for step, ne in self.validations if step in kept]
        self.best_ne, self.best_step = min(left, default=(None, 0))
        self.best_values = {}
        self.stale_validations = sum(step > self.best_step for step, _ in self.validations)

    def steps_left(self, num_requests: int, global_batch: int, epochs: int) -> int:
        """Micro-batches from here to the end of the last epoch."""
        if self.epoch >= epochs:
            return 0
        whole = -(-num_requests // global_batch)
        return -(-(num_requests - self.consumed) // global_batch) + (epochs - self.epoch - 1) * whole

    def judge(
        self,
        values: dict[str, float],
        label_rates: dict[str, float],
        shares: dict[str, float],
        others: Mapping[str, tuple[str, bool]] | None = None,
    ) -> None:
        """Note a validation: best is the smallest NE, mean by `shares` over the tasks that can have one.

        `label_rates` are those of binary tasks; `others` says of the rest which metric stands for NE, and whether a
        larger one is better, which counts as 1 minus the metric.
        A task has no NE without observed labels in the validation split, or with labels of only one class in the
        training split; one with labels of only one class in the validation split, as of a few that came early, decides
        only if all are so. If no task has one, no checkpoint is best and none counts as worse. The NE of weights that
        are not finite is NaN, which is never best.
        """
        counted = {
            task: shares[task]
            for task, rate in label_rates.items()
            if 0 < rate < 1 and shares[task] and not math.isnan(values[f"{task}/label_rate"])
        }
        both = {task: share for task, share in counted.items() if 0 < values[f"{task}/label_rate"] < 1}
        counted = both or ({} if others else counted)
        losses = {task: values[f"{task}/ne"] for task in counted}
        for task, (name, larger) in (others or {}).items():
            value = values[f"{task}/{name}"]
            if shares[task] and not math.isnan(value):  # labels without an order or a spread have no such metric
                counted[task], losses[task] = shares[task], 1 - value if larger else value
        if not counted:
            return
        ne = sum(share * losses[task] for task, share in counted.items()) / sum(counted.values())
        if math.isfinite(ne):
            self.validations.append((self.step, ne))
        if math.isfinite(ne) and (self.best_ne is None or ne < self.best_ne):
            self.best_ne, self.best_step, self.stale_validations = ne, self.step, 0
            self.best_values = values
        else:
            self.stale_validations += 1
