"""How fast a configuration trains: `torchrun -m train.commands.speed +experiment=NAME [key=value]`, on any ranks.

Takes `runtime.steps` training steps and counts all but the first ten, without evaluation, checkpoint or test. Then it
traces five more and writes `speed.json` into the run directory, beside the traces of all ranks. `launch.scaling` runs
it on several numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from train.process.imports import lasting

with lasting():
    import torch.distributed as dist

    from modules.batch import RequestBatch
    from train.config.compose import to_config
    from train.config.files import parse
    from train.config.schema import Config
    from train.process import distributed, errors
    from train.process.distributed import World
    from train.process.files import write_json
    from train.process.memory import peak_memory_bytes
    from train.record.meters import WARMUP_STEPS
    from train.record.tracing import TRACED_STEPS, StepTracer
    from train.trainer import Trainer

SPEED_FILE = "speed.json"


class SpeedRun(Trainer):
    """A trainer whose `run` returns the content of `speed.json`: its rates, and each rank's memory and times."""

    least_records = 1  # each waits for the device

    def __init__(self, config: Config, world: World) -> None:
        self.measured = config.runtime.steps
        first = self.measured + 2  # the profiler starts at the end of the step before
        config.runtime.steps = first + TRACED_STEPS
        super().__init__(config, world)
        self.opened.tracer = StepTracer(first, self.run_dir / "profile" / f"rank_{world.rank}", world.device)
        self.speed: dict[str, float] = {}

    def _step(self, batches: Iterator[RequestBatch]) -> None:
        super()._step(batches)
        if self.progress.step == self.measured:
            self.speed = self.meters.whole_run()

    def _validate(self) -> None:
        """Not measured."""

    def _save(self) -> None:
        """Not measured."""

    def _results(self, seconds: float) -> dict[str, Any]:
        mine = {"peak_memory_bytes": peak_memory_bytes(self.world.device), "breakdown": self.opened.tracer.breakdown}
        each: list[dict[str, Any]] = [{}] * self.world.size
        dist.all_gather_object(each, mine, group=self.world.host_group)
        results = {"ranks": self.world.size, **self.speed, "plan": self.job.plan, "each_rank": each}
        if self.world.is_first:
            write_json(self.run_dir / SPEED_FILE, results)
        return results


def check_steps(config: Config) -> None:
    """ValueError for a run that is too short to be measured."""
    if config.runtime.steps < 2 * WARMUP_STEPS:
        raise ValueError(
            f"runtime.steps={config.runtime.steps}, of which {WARMUP_STEPS} do not count: a speed needs at least "
            f"{2 * WARMUP_STEPS}, e.g. runtime.steps=100"
        )


def main(arguments: list[str]) -> None:
    config = to_config(parse(arguments, "train.commands.speed", __doc__))
    check_steps(config)  # before ranks wait for each other and data is prepared
    world = distributed.start(config.runtime)
    try:
        SpeedRun(config, world).run()
    finally:
        distributed.stop()


if __name__ == "__main__":
    errors.run(main)
