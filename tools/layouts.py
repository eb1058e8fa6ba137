"""Losses, speed and memory of a model under several layouts of the ranks, one after the other in the same processes:

    torchrun --nproc-per-node 1 -m tools.layouts FILE.json single=data.batch_size=1024 -- +experiment=NAME ...
    torchrun --nproc-per-node 2 -m tools.layouts FILE.json ddp= "fsdp=parallel.dense=fsdp" -- +experiment=NAME ...

A layout is NAME=OVERRIDES, separated by semicolons; what follows the dashes holds for all of them. FILE gets an entry
after each layout. Global batches, and with them losses, are the same wherever ranks x data.batch_size is.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.process import distributed
from train.process.distributed import World
from train.record.tracking import METRICS_FILE, read_metrics
from train.trainer import Trainer

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class _Measured(Trainer):
    """Trains only; `run` returns rates and memory."""

    def _validate(self) -> None:
        """Not measured."""

    def _save(self) -> None:
        """Not measured."""

    def _results(self, seconds: float) -> dict[str, Any]:
        return {"peak_memory_bytes": self.meters.peak_memory(), **self.meters.whole_run()}


def measure(config: Config, world: World) -> dict[str, Any]:
    trainer = _Measured(config, world)
    results = trainer.run()
    records = [record.values for record in read_metrics(trainer.run_dir / METRICS_FILE)] if world.is_first else []
    shown = ("loss", "load_violation", "imbalance", "imbalance_in_order")
    return {**results, **{name: [each[name] for each in records if name in each] for name in shown}}


def main(arguments: list[str]) -> None:
    file, layouts, common = (
        Path(arguments[0]),
        arguments[1 : arguments.index("--")],
        arguments[arguments.index("--") + 1 :],
    )
    done = json.loads(file.read_text()) if file.exists() else []
    world = None
    for layout in layouts:
        name, _, overrides = layout.partition("=")
        chosen = [*common, *filter(None, overrides.split(";"))]
        config = to_config(composed(chosen))
        world = world or distributed.start(config.runtime)
        config.runtime.run_dir = world.broadcast(tempfile.mkdtemp())
        started = time.monotonic()
        try:
            row = measure(config, world)
        except (RuntimeError, ValueError) as error:  # the next layouts may work
            row = {"error": str(error)[:500]}
        done.append(
            {"layout": name, "ranks": world.size, "overrides": chosen, **row, "all": time.monotonic() - started}
        )
        if world.is_first:
            file.write_text(json.dumps(done, indent=1))
            print(json.dumps(done[-1]), flush=True)
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
