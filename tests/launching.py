"""Training from tests: by the real commands (torchrun with gloo ranks, without network), or without their imports."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig

from tests.processes import run_ranks
from train.config.compose import to_config
from train.config.files import composed
from train.process import distributed
from train.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "+experiment=synthetic",
    "model.dim=16",
    "model.num_layers=2",
    "model.head_hidden=[16]",
    "model.interaction_hidden=[16]",
    "data.batch_size=16",
    "data.num_requests=512",
    "data.num_users=100",
    "data.num_items=200",
    "data.max_history=8",
    "data.mean_history=4",
    "data.num_workers=0",
    "runtime.eval_steps=2",
    "runtime.log_every=1",
    "runtime.threads=1",
    "tracking.wandb=disabled",
    "tracking.tensorboard=false",
)
"""Overrides that make a run of a few seconds."""
TINY_DLRM = (*(override for override in TINY if not override.startswith("model.")), "model=dlrm", "model.dim=16")
"""The same of a model of few operations, which are what reading a profile takes its time for."""
EVENTS_DLRM = (
    *(each for each in TINY[1:] if not each.startswith(("data.", "model.")) or "num_workers" in each),
    "model=dlrm",
    "model.dim=8",
    "precision=fp32",
    "data=events",
    "data.user=user",
    "data.time=time",
    "+data.labels={click: click}",
    "data.request_categorical=[user]",
    "data.candidate_categorical=[item]",
)
"""The same of files of rows with a user, a time, an item and a click; `data.files` names them."""


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RUN_DIR"))}
    return clean | {
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(command: list[str], cwd: Path, *, check: bool = True, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Run to the end; with `check`, a failure shows the command's output."""
    result = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout)
    if check and result.returncode:
        raise AssertionError(
            f"{' '.join(command)} exited {result.returncode}\n{result.stdout}\n{result.stderr[-8000:]}"
        )
    return result


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def torchrun(ranks: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return python(*launcher, *arguments)


def train(ranks: int, run_dir: Path, *overrides: str) -> list[str]:
    return torchrun(ranks, "-m", "train.main", *TINY, f"runtime.run_dir={run_dir}", *overrides)


def train_here(run_dir: Path, *overrides: str, base: Sequence[str] = TINY, trainer: type[Trainer] = Trainer) -> None:
    """The run of these overrides in this process, but for its plots. Raises what ends the command."""
    _train(_composed(*base, *overrides), run_dir, trainer)


def train_ranks(ranks: int, run_dir: Path, *overrides: str, base: Sequence[str] = TINY) -> None:
    """As train_here, on several ranks; an error of theirs is a ProcessRaisedException that holds its text."""
    run_ranks(_train, ranks, _composed(*base, *overrides), run_dir)


@cache
def _composed(*overrides: str) -> DictConfig:
    """Once for all ranks, and for all runs that differ in their folder alone: it takes a third of a short run."""
    return composed(["runtime.device=cpu", *overrides])


def _train(composed: DictConfig, run_dir: Path, trainer: type[Trainer] = Trainer) -> None:
    composed = copy.deepcopy(composed)
    composed.runtime.run_dir = str(run_dir)
    config = to_config(composed)
    world = distributed.start(config.runtime)
    try:
        # They take as long as a run of a few steps; the real commands draw them.
        with mock.patch("train.record.plots.plot_run"):
            trainer(config, world).run()
    finally:
        distributed.stop()
