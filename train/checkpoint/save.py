"""Checkpoints of the whole training state, written with DCP into a temporary folder that is renamed when it is whole.

A checkpoint folder `step_00000100` holds the sharded tensors (dense and table weights, both optimisers, random states),
`meta.json` (step, data position, configuration, plan, versions, tracker state) and `manifest.json` (checksums). Old
checkpoints are deleted after a new one is whole.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel

from train.checkpoint import manifest
from train.checkpoint.find import best_checkpoint, checkpoints
from train.checkpoint.progress import META, Progress
from train.checkpoint.state import host_copy, model_state, optimizer_state, rng_state
from train.optim.dense import Optimizer
from train.process.distributed import World
from train.process.files import room, write_json


class Checkpointer:
    """Saves to and loads from `folder`; one save is in flight at a time."""

    def __init__(self, folder: Path, keep: int, asynchronous: bool, world: World) -> None:
        self.folder, self.keep, self.asynchronous, self.world = folder, keep, asynchronous, world
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(
        self, model: DistributedModelParallel, optimizer: Optimizer, progress: Progress, about: dict[str, Any]
    ) -> Path:
        """Save the whole state; asynchronously, the tensors are copied now and written while training goes on."""
        self.wait()
        path = self.folder / f"step_{progress.step:08d}"
        aside = path.with_suffix(".partial")
        self.world.by_first(lambda: self._begin(aside, {"progress": vars(progress), **about}))
        state = {**model_state(model), **optimizer_state(model, optimizer.state_dict()), **rng_state(self.world)}
        # DCP's own asynchronous save cannot stage ShardedTensors, so the copy is made here.
        state = host_copy(state, self.world)
        self._pending = self._thread.submit(self._write, state, path, aside)
        if not self.asynchronous:
            self.wait()
        return path

    def _begin(self, aside: Path, about: dict[str, Any]) -> None:
        for left in self.folder.glob("step_*.partial"):  # left by a process that was killed or ran out of space
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        write_json(aside / META, about)

    def _write(self, state: dict[str, Any], path: Path, aside: Path) -> None:
        try:
            _write_files(aside, state, self.world)
        except CheckpointException as error:  # a BaseException: torchrun's error file would not have it
            reasons = "; ".join(f"rank {rank}: {reason!r}" for rank, (reason, _) in error.failures.items())
            raise RuntimeError(
                f"{path.name} could not be written ({reasons}); {room(self.folder)}. Started again "
                f"with the same runtime.run_dir, the run goes on from its newest whole checkpoint"
            ) from error
        # Rank 0 returns once all ranks have written, metadata and manifest too, so the folder is whole.
        if self.world.is_first:
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
            self._prune()

    def check(self) -> None:
        """Raise the error that ended the save in flight, if there is one."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Until the save in flight, if any, is whole under its final name."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self.world.barrier()

    def _prune(self) -> None:
        best = best_checkpoint(self.folder)
        for old in checkpoints(self.folder)[: -self.keep]:
            if old != best:
                shutil.rmtree(old)


def save_weights(path: Path, model: DistributedModelParallel, world: World, about: dict[str, Any]) -> None:
    """Write a checkpoint of only the weights, for runs that start from the same ones (`checkpoint.load`)."""

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / META, {"progress": vars(Progress()), **about})

    world.by_first(begin)
    _write_files(path, model_state(model), world)
    world.barrier()


def _write_files(path: Path, state: dict[str, Any], world: World) -> None:
    """Write the tensors and, last, the manifest of a folder that has its `meta.json`."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = files = manifest.SummedFiles()
    dcp.save(state, storage_writer=writer, process_group=world.checkpoint_group)
    manifest.write(path, files, (META,), world)
