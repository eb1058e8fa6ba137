"""The training command, failing once in each place, the last time with its launcher: what `test_kills.py` starts."""

from __future__ import annotations

import os
import runpy
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from train import trainer
    from train.checkpoint import save
    from train.data.loading import loader

PLACES = {"forward": 3, "worker": 3, "backward": 5, "hang": 6, "write": 6}
"""Where each start of the run fails, in turn, and in which step; the last while that step's checkpoint is written."""
TIMEOUT = timedelta(seconds=3)
"""Of collectives in the start that hangs, once it trains: starts may lie further apart."""


def marker(run_dir: Path, place: str) -> Path:
    return run_dir.parent / f"failed_in_{place}"


def place_of(run_dir: Path) -> str | None:
    """Where this start of the run fails."""
    return next((place for place in PLACES if not marker(run_dir, place).exists()), None)


def kill(run_dir: Path, place: str) -> None:
    marker(run_dir, place).touch()
    if place == "write":  # as if the node had lost its power
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(trainer.Trainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.place = place_of(self.run_dir)  # on all ranks the same: none trains before all are here

    def _fails(self, place: str, step: int) -> bool:
        return self.world.rank == 1 and self.place == place and PLACES[place] == step

    def _train_epoch(self) -> None:
        if self.place == "hang":
            for group in (None, self.world.guard_group, self.world.host_group):
                distributed_c10d._set_pg_timeout(TIMEOUT, group)
        if self._fails("worker", self.progress.step + 1):
            marker(self.run_dir, "worker").touch()
            self.config.data.num_workers = 1
        super()._train_epoch()

    def _forward(self, batch: Any) -> Any:
        step = self.progress.step + 1
        if self._fails("hang", step):
            marker(self.run_dir, "hang").touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the launcher would wait half a minute for its end
            while True:
                time.sleep(1)
        if self._fails("forward", step):
            kill(self.run_dir, "forward")
        loss, rest = super()._forward(batch)
        if self._fails("backward", step):
            loss.register_hook(lambda gradient: kill(self.run_dir, "backward"))
        return loss, rest


class Batches(loader._Batches):
    """Their worker, which only the start has that is to lose it, is killed before its second batch."""

    made = 0

    def __getitem__(self, requests: Any) -> Any:
        if not dist.is_initialized() and self.made:
            os.kill(os.getpid(), signal.SIGKILL)
        self.made += 1
        return super().__getitem__(requests)


write = save._write_files


def _write_files(path: Path, state: Any, world: Any) -> None:
    if world.rank == 1:
        run_dir, step = path.parent.parent, int(path.name.removeprefix("step_").removesuffix(".partial"))
        (path / "__1_0.distcp").write_bytes(b"half of it")
        if place_of(run_dir) == "write" and step == PLACES["write"]:
            kill(run_dir, "write")
    write(path, state, world)


if __name__ == "__main__":
    trainer.Trainer, save._write_files, loader._Batches = Failing, _write_files, Batches
    runpy.run_module("train.main", run_name="__main__")
