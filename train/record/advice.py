"""What the validations of a finished run say about its length and its rates, with the keys to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from train.config.schema import Config

STILL_FALLING = 0.005
"""A fall of NE, as a share of it, between the last two validations, after which more steps mostly help further."""
FEW_STEPS = 200
"""Of a run of so few steps one validation cannot say whether it was long enough; on small data it mostly was not."""


def advice(config: Config, validations: Sequence[tuple[int, float]], steps: int) -> list[str]:
    """Sentences about a run of `steps` steps with these (step, NE) of its validations, in their order."""
    runtime, optimizer = config.runtime, config.optimizer
    longer = f"runtime.steps={2 * steps}" if runtime.steps else f"runtime.epochs={2 * runtime.epochs}"
    said = []
    if optimizer.warmup_steps > steps // optimizer.accumulate:
        said.append(
            f"the run was too short for its learning rate, which never reached optimizer.lr={optimizer.lr}: train "
            f"longer, e.g. {longer}, or lower optimizer.warmup_steps={optimizer.warmup_steps}"
        )
    if not validations:
        return said
    best_step, best = min(validations, key=lambda validation: validation[1])
    if best >= 1:
        said.append(
            f"the best validation has NE {best:.4g}, no better than a constant prediction (1): train longer, e.g. "
            f"{longer}, or change optimizer.lr={optimizer.lr} and optimizer.sparse_lr={optimizer.sparse_lr}"
        )
    elif len(validations) > 1 and best_step == validations[0][0]:
        said.append(
            f"the first of {len(validations)} validations (step {best_step}) was the best: what came after it has only "
            f"fitted the training rows; lower optimizer.lr={optimizer.lr} and optimizer.sparse_lr="
            f"{optimizer.sparse_lr}, or train less, with more validations (runtime.eval_every={max(1, best_step // 4)})"
        )
    elif len(validations) == 1 and not said and steps < FEW_STEPS:
        several = f"{longer} runtime.eval_every={steps}"
        if not runtime.steps:
            epochs = min(10, math.ceil(FEW_STEPS / max(1, steps))) * runtime.epochs
            several = f"runtime.epochs={epochs} runtime.early_stop=2"
        said.append(
            f"the run took {steps} steps and had one validation, which cannot say whether that was enough; of so few "
            f"steps several times as many mostly help, e.g. {several}"
        )
    elif len(validations) > 1 and best_step == validations[-1][0]:
        before = validations[-2][1]
        if best < (1 - STILL_FALLING) * before:
            said.append(
                f"NE was still falling at the end, by {100 * (1 - best / before):.2g} % since the validation before: a "
                f"longer run may be better, e.g. {longer}"
            )
    return said
