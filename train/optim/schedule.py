"""How learning rates go: a warm-up, then constant, cosine, or a scheduler of torch by its dotted name."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from modules.core.import_object import import_object
from train.config.schema import OptimizerConfig

STEPS = "steps"  # in arguments: the dense steps that the run has after its warm-up


def factor(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """The learning rate of a dense step as a fraction of its peak: a warm-up, then `optimizer.schedule`."""
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    left = max(1, total_steps - warmup)
    if "." in config.schedule:
        return _curve(config.schedule, json.dumps(config.schedule_arguments), left)[min(step - warmup, left - 1)]
    progress = min(1.0, (step - warmup) / left)
    if config.schedule == "constant":
        return 1.0
    return 1 - (1 - config.min_lr) * 0.5 * (1 - math.cos(math.pi * progress))


def check(config: OptimizerConfig) -> None:
    """ValueError, before anything is built, for a scheduler that cannot be followed."""
    if "." in config.schedule:
        curve = _Curve(config.schedule, config.schedule_arguments, 10)
        curve[9]
    elif config.schedule_arguments:
        raise ValueError(
            f"optimizer.schedule_arguments={config.schedule_arguments} goes with the dotted name of a scheduler, e.g. "
            f"optimizer.schedule=torch.optim.lr_scheduler.PolynomialLR; {config.schedule} has keys of its own"
        )


class _Curve:
    """What a scheduler makes of a rate of 1, step by step; it sees no weights, so that a resumed run has the same."""

    def __init__(self, name: str, arguments: dict[str, Any], steps: int) -> None:
        made = import_object(name, "optimizer.schedule")
        if not (isinstance(made, type) and issubclass(made, LRScheduler)):
            raise ValueError(
                f"optimizer.schedule={name} is no scheduler of torch; name a subclass of LRScheduler, e.g. "
                "torch.optim.lr_scheduler.PolynomialLR"
            )
        self.name = name
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
        self._others = self._options()
        known = [each for each in inspect.signature(made).parameters if each not in ("optimizer", "last_epoch")]
        given = {key: steps if value == STEPS else value for key, value in arguments.items()}
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"optimizer.schedule_arguments.{unknown[0]} is no argument of {name}; there are {', '.join(known)}"
            )
        try:
            self.scheduler = made(self.optimizer, **given)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"optimizer.schedule={name}: {error}; see optimizer.schedule_arguments, where the word {STEPS} stands "
                "for those of the run"
            ) from error
        self.factors: list[float] = []
        self._ended = False  # the rate stays

    def __getitem__(self, step: int) -> float:
        while len(self.factors) <= step:
            rate = float(self.optimizer.param_groups[0]["lr"])
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"optimizer.schedule={self.name} gives a rate of {rate} at step {len(self.factors)}")
            self.factors.append(rate)
            if not self._ended:
                self._advance()
        return self.factors[step]

    def _advance(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # of a step of the optimiser, which here has nothing to do
            try:
                self.scheduler.step()
            except TypeError as error:
                raise ValueError(
                    f"optimizer.schedule={self.name} does not follow from the step alone ({error}); use another, e.g. "
                    "torch.optim.lr_scheduler.PolynomialLR"
                ) from error
            except ValueError:  # past its last step
                self._ended = True
        if self._options() != self._others:
            raise ValueError(
                f"optimizer.schedule={self.name} changes more than the rate, which is all that can be scheduled; e.g. "
                "optimizer.schedule_arguments.cycle_momentum=false"
            )

    def _options(self) -> dict[str, Any]:
        rates = ("params", "lr", "initial_lr", "max_lr", "min_lr")
        return {key: value for key, value in self.optimizer.param_groups[0].items() if key not in rates}


@lru_cache(maxsize=4)
def _curve(name: str, arguments: str, steps: int) -> _Curve:
    return _Curve(name, json.loads(arguments), steps)
