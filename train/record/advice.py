"""What the validations of a finished run say about its length and its rates, with the keys to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from train.config.schema import Config

STILL_FALLING = 0.005
"""A fall of NE, as a share of it, between the last two validations, after which more steps mostly help further."""
OVERFITTED = 0.01
"""A rise of NE from the best validation to the last one, as a share of it, that is worth a sentence."""
FEW_STEPS = 200
"""Of a run of so few steps one validation cannot say whether it was long enough; on small data it mostly was not."""


def ending(step: int, total: int, best_step: int, stale: int, *, early: bool) -> str:
    """Why a run of `total` steps ended at `step`, and of which step the metrics are; `stale` validations were no better
    than that of `best_step`, 0 if there is none."""
    said = f"took all {total:,} steps"
    if early:
        than = f"better than that of step {best_step:,}" if best_step else "finite"
        which = f"none of the last {stale} validations was" if stale > 1 else "the last validation was not"
        said = f"stopped early at step {step:,} of {total:,}: {which} {than}"
    return f"{said}; the metrics are those of the checkpoint of step {best_step or step:,}"


def advice(
    config: Config, validations: Sequence[tuple[int, float]], steps: int, measure: str = "NE", *, early: bool = False
) -> list[str]:
    """Sentences about a run of `steps` steps with these (step, `measure`) of its validations, in their order; `early`:
    it stopped because they became no better."""
    runtime, optimizer = config.runtime, config.optimizer
    longer = f"runtime.steps={2 * steps}" if runtime.steps else f"runtime.epochs={2 * runtime.epochs}"
    lower = f"try a lower optimizer.sparse_lr={optimizer.sparse_lr} and optimizer.lr={optimizer.lr}"
    if not config.model.dropout:
        lower += ", and model.dropout=0.2"
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
            f"the best validation has {measure} {best:.4g}, no better than a constant prediction (1): train longer, "
            f"e.g. {longer}, or change optimizer.lr={optimizer.lr} and optimizer.sparse_lr={optimizer.sparse_lr}"
        )
    elif len(validations) > 1 and best_step == validations[0][0]:
        said.append(
            f"the first of {len(validations)} validations (step {best_step}) was the best: what came after it has only "
            f"fitted the training rows; {lower}, or train less, with more validations "
            f"(runtime.eval_every={max(1, best_step // 4)})"
        )
    elif (last := validations[-1][1]) > (1 + OVERFITTED) * best:
        epochs = math.ceil(runtime.epochs * best_step / steps)
        shorter = f"runtime.steps={best_step}" if runtime.steps else f"runtime.epochs={epochs}"
        said.append(
            f"overfitted by {100 * (last / best - 1):.2g} % of {measure} since step {best_step:,}: {lower}"
            + ("" if early else f", or stop earlier: runtime.early_stop=2, {shorter}")
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
                f"{measure} was still falling at the end, by {100 * (1 - best / before):.2g} % since the validation "
                f"before: a longer run may be better, e.g. {longer}"
            )
    return said
