"""The training command, of which the second rank is killed once in each place, the last time with its launcher: what
`test_kills.py` starts."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import torch.distributed as dist

    from train import trainer
    from train.checkpoint import save

PLACES = {"forward": 3, "backward": 5, "write": 6}
"""The step in which each kill comes; the third while the checkpoint of that step is written."""


def once(run_dir: Path, place: str, step: int) -> None:
    """Kill this process in the step of a place, unless that happened at an earlier start."""
    marker = run_dir.parent / f"killed_in_{place}"
    if dist.get_rank() == 1 and step == PLACES[place] and not marker.exists():
        marker.touch()
        if place == "write":  # as if the node had lost its power
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Killed(trainer.Trainer):
    def _forward(self, batch: Any) -> Any:
        step = self.progress.step + 1
        once(self.run_dir, "forward", step)
        loss, rest = super()._forward(batch)
        loss.register_hook(lambda gradient: once(self.run_dir, "backward", step))
        return loss, rest


write = save._write_files


def _write_files(path: Path, state: Any, world: Any) -> None:
    if world.rank == 1:
        (path / "__1_0.distcp").write_bytes(b"half of it")
        once(path.parent.parent, "write", int(path.name.removeprefix("step_").removesuffix(".partial")))
    write(path, state, world)


if __name__ == "__main__":
    trainer.Trainer, save._write_files = Killed, _write_files
    runpy.run_module("train.main", run_name="__main__")
