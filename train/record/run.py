"""What a run has open on each rank from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from train.config.schema import Config
from train.data import following
from train.metrics import ScoreHistogram
from train.process import length, lock, precision
from train.process.distributed import World
from train.process.files import write_json
from train.process.logs import setup_logging
from train.process.preemption import Preemption
from train.process.stall import StallWatch
from train.record.tracing import StepTracer
from train.record.tracking import METRICS_FILE, Record, Tracker, read_metrics


class Run:
    """Its directory, locked, with logs and records, and what watches its steps."""

    def __init__(self, config: Config, world: World) -> None:
        """Settles in `config` what an earlier start in the same directory chose. ValueError for one that is in use."""
        runtime = config.runtime
        self.world = world
        self.dir = lock.claim(config, world)
        setup_logging(self.dir, world.rank)
        precision.settle(config.precision, world, self.dir)
        length.restore(config, world, self.dir)
        following.pin(config, world, self.dir)
        self.tracker = Tracker(self.dir, config.tracking, enabled=world.is_first)
        self.preemption = Preemption(world, runtime.collective_timeout)
        self.stall = StallWatch(self.dir, world.rank, runtime.collective_timeout)
        self.tracer = StepTracer(runtime.profile_step if world.is_first else 0, self.dir / "profile", world.device)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context for all steps: traced, told when to stop, and looked after when one hangs."""
        with self.tracer.run(), self.preemption, self.stall:
            yield

    def passed(self, step: int) -> None:
        """To be called at the end of every step."""
        self.stall.passed(step)
        self.tracer.step()
        self.tracker.advance()

    def records(self) -> list[Record]:
        """What rank 0 has recorded, on every rank."""
        return self.world.by_first(lambda: read_metrics(self.dir / METRICS_FILE))

    def keep(
        self, results: Mapping[str, Any], histograms: Mapping[str, ScoreHistogram], best_step: int, *, early: bool
    ) -> None:
        """Write `results.json` and the plots."""

        def write() -> None:
            from train.record.plots import plot_run  # imports matplotlib, which takes half a second

            records = read_metrics(self.dir / METRICS_FILE)
            plot_run(records, histograms, self.dir / "plots", best_step, early=early)
            write_json(self.dir / "results.json", results)

        self.world.by_first(write)

    def close(self, results: Mapping[str, Any] | None) -> None:
        """`results`: None of a run that failed."""
        shown = {split: results[split] for split in ("valid", "test") if results and split in results}
        self.tracker.finish(shown, status=0 if results else 1)
        lock.release(self.dir)
