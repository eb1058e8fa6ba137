"""How long a run is, and how it learns, where its configuration leaves it open (null): by the size of its data.

A run on few rows needs small batches and several epochs to take enough steps, stops when validations get no better, and
memorises less with dropout; on a million requests one epoch is about enough (docs/recipe.md has the measurements).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from train.config.schema import Config
from train.process.distributed import World

log = logging.getLogger(__name__)

KEYS = (
    "data.batch_size", "runtime.epochs", "runtime.evals_per_epoch", "runtime.early_stop", "optimizer.warmup_steps",
    "optimizer.lr", "optimizer.sparse_lr", "model.dropout", "model.plain_head",
)  # fmt: skip
FIXED = dict(zip(KEYS, (256, 1, 1, 0, 20, 1e-3, 0.02, 0.0, False), strict=True))
"""For data that comes with this repository, whose measurements are of these."""
STEPS = 256  # of an epoch at least, if batches of SMALLEST allow it
SMALLEST, LARGEST = 32, 256  # requests of a rank's batch
ONCE = 1_000_000  # requests that need one epoch
EPOCHS = 2, 10  # of fewer, at least and at most; more than 2 only for `STEPS` in all: later ones memorise ids
PATIENCE = 2  # epochs without a better validation
PER_EPOCH = 2  # validations of several epochs
IN_ONE = 4  # validations of a single one
PART = "model.plain_head"  # which weights have or lack
FEW = 100_000  # requests; models that leave keys of their own open memorise fewer of them less with these settings
OF_FEW = {"optimizer.lr": 2e-3, "optimizer.sparse_lr": 5e-3, "model.dropout": 0.2, "model.plain_head": True}
WARMUP = 20  # dense steps, in a run of 10 times as many


def settle(config: Config, requests: int, validated: bool, ranks: int = 1, uncounted: bool = False) -> str:
    """Replace each of `KEYS` that is None; what it is, as a sentence.

    `requests`: of the training split; `validated`: whether the validation split has any; `uncounted`: whether ids have
    to say what statistics would, beside numbers that the plain head keeps them from drowning.
    """
    opened = [key for key in KEYS if _get(config, key, False) is None]
    if not config.data.sizes_run:
        for key in opened:
            _set(config, key, FIXED[key])
        return ""
    # Whoever says how long a run is, or when it validates, gets that and nothing else.
    validating = "runtime.epochs" in opened and validated and not (config.runtime.steps or config.runtime.eval_every)
    few = requests < FEW and not {"model.dropout", PART}.isdisjoint(opened)
    fixed = ""
    if config.runtime.cuda_graphs:
        fixed = PART
    elif uncounted and _get(config, PART, False) is not False:
        fixed = "optimizer.sparse_lr"
    for key in opened:  # later ones depend on those before
        if key in OF_FEW:
            _set(config, key, (OF_FEW if few and key != fixed else FIXED)[key])
        else:
            _set(config, key, _choose(config, key, max(requests, 1), validating, ranks))
    chosen = ""
    if opened:
        settings = " ".join(f"{key}={_get(config, key)}" for key in opened)
        chosen = f"by the size of the data, {requests:,} training requests: {settings}"
    if config.runtime.cuda_graphs and (refusal := config.model.graphs_refusal()):  # of what was restored
        raise ValueError(f"runtime.cuda_graphs=true with {refusal}")
    return chosen


def restore(config: Config, world: World, run_dir: Path) -> None:
    """Replace each of `KEYS` that is None by what an earlier start of the run had: it may resume on other ranks.

    A run that begins with weights (`checkpoint.load`) has the parts that these have.
    """
    earlier = world.by_first(lambda: _earlier(run_dir))
    for key in KEYS:
        if _get(config, key) is None and earlier.get(key) is not None:
            _set(config, key, earlier[key])
    if _get(config, PART, False) is None:
        loaded = Path(config.checkpoint.load or "")
        theirs = earlier or (world.by_first(lambda: _earlier(loaded)) if config.checkpoint.load else {})
        if theirs:
            _set(config, PART, theirs[PART] or False)


def check(config: Config, steps: int, validated: bool, log_it: bool) -> None:
    """ValueError for settings that have no effect in a run of so many steps, a warning for those that have less.

    `validated`: whether the validation split has any request; `log_it`: whether this rank logs.
    """
    runtime, optimizer = config.runtime, config.optimizer
    if optimizer.accumulate > steps:
        raise ValueError(
            f"optimizer.accumulate={optimizer.accumulate} is more than the {steps} steps of this run, so that all "
            f"but the tables would never be trained; use at most optimizer.accumulate={steps}, or smaller batches"
        )
    if runtime.early_stop and not validated:
        raise ValueError(
            f"runtime.early_stop={runtime.early_stop} needs validations and the validation split is empty; use "
            "runtime.early_stop=0, or e.g. data.split=[0.8,0.1,0.1]"
        )
    if log_it and optimizer.warmup_steps > steps // optimizer.accumulate and not config.data.is_open:
        log.warning(
            "the run ends at dense step %s, before the learning rate has reached its peak; to reach it, lower "
            "optimizer.warmup_steps=%s",
            steps // optimizer.accumulate,
            optimizer.warmup_steps,
        )


def _choose(config: Config, key: str, requests: int, validating: bool, ranks: int) -> int:
    runtime = config.runtime
    if key == "data.batch_size":
        wanted = requests // (STEPS * ranks)
        size = min(LARGEST, max(SMALLEST, 1 << max(wanted.bit_length() - 1, 0)))
        balance = config.parallel.balance or 1
        return max(1, size // balance) * balance
    if key == "runtime.epochs":
        if runtime.steps or requests >= ONCE:
            return 1
        return min(max(EPOCHS[0], round(STEPS / -(-requests // (config.data.batch_size * ranks)))), EPOCHS[1])
    if key == "runtime.evals_per_epoch":
        return 1 if not validating else IN_ONE if runtime.epochs == 1 else PER_EPOCH
    if key == "runtime.early_stop":
        return PATIENCE * runtime.evals_per_epoch if validating and runtime.epochs > PATIENCE else 0
    steps = runtime.steps or runtime.epochs * -(-requests // (config.data.batch_size * ranks))
    return min(WARMUP, max(1, steps // config.optimizer.accumulate // 10))


def _earlier(run_dir: Path) -> dict[str, Any]:
    """Of a run or a checkpoint; empty where there is none."""
    file = next((file for name in ("config.json", "meta.json") if (file := run_dir / name).exists()), None)
    if file is None:
        return {}
    saved = json.loads(file.read_text())["config"]
    return {key: saved.get(key.split(".")[0], {}).get(key.split(".")[1]) for key in KEYS}


def _get(config: Config, key: str, default: Any = None) -> Any:
    """`default`: of a key that the chosen model does not have."""
    group, name = key.split(".")
    return getattr(getattr(config, group), name, default)


def _set(config: Config, key: str, value: float) -> None:
    group, name = key.split(".")
    setattr(getattr(config, group), name, value)
