"""Trainings in processes of their own: which are left, starting them a few at a time, watching and stopping them.

`train.commands.compare --jobs`, `launch.sweep`, `launch.search` and `launch.scaling` run theirs here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from train.process.signals import SIGNALS, STATUS

POLL = 0.1  # seconds between looks at the processes


class Launch(NamedTuple):
    """How a job is started."""

    command: list[str]
    console: Path  # the file that its output is appended to
    variables: Mapping[str, str] = {}  # of its environment, beside those of this process


@dataclass
class Job:
    """A training whose folder holds a file `result` when it has finished."""

    folder: Path
    status: str = "waiting"
    seconds: float | None = None  # wall time, if this process ran it

    result = "results.json"

    def collect(self) -> bool:
        """Take what a finished run left; false when there is nothing."""
        file = self.folder / self.result
        if not file.exists():
            return False
        self.status = "ok"
        self.take(json.loads(file.read_text()))
        return True

    def take(self, results: dict[str, Any]) -> None:
        """Keep what is of interest of the results."""


J = TypeVar("J", bound=Job)


def unfinished(jobs: Iterable[J]) -> list[J]:
    """Collect the jobs that an earlier start has finished; the others."""
    return [job for job in jobs if not job.collect()]


def run(
    jobs: Sequence[J],
    launch: Callable[[J], Launch],
    slots: Sequence[Mapping[str, str]],
    ended: Callable[[J], None] = lambda job: None,
) -> None:
    """Run the jobs in their order, one a slot at a time, and call `ended` with each whose status is known.

    `slots`: variables of the environment of what runs there, such as its GPUs. A job that fails stops no other, unless
    `ended` raises. Then, and when this process is told to stop, the processes are told to stop, and waited for, so that
    they can save their checkpoints; in the latter case this process exits as they do. Needs the main thread.
    """
    told: list[int] = []  # by a flag and not by an exception, which could lose a process that has just been started
    before = {number: signal.signal(number, lambda number, _: told.append(number)) for number in SIGNALS}
    free, waiting = list(range(len(slots))), list(jobs)
    running: dict[subprocess.Popen[bytes], tuple[J, int, Path, float]] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, slot = waiting.pop(0), free.pop(0)
                start = launch(job)
                running[_process(start, slots[slot])] = job, slot, start.console, time.monotonic()
            time.sleep(POLL)
            if told:
                sys.exit(STATUS)
            for process in [process for process in running if process.poll() is not None]:
                job, slot, console, started = running.pop(process)
                free.append(slot)
                job.seconds = round(time.monotonic() - started, 1)
                if process.returncode:
                    job.status = f"failed, exit code {process.returncode}: see {console}"
                elif not job.collect():
                    job.status = f"failed, no {job.result}: see {console}"
                ended(job)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _process(start: Launch, slot: Mapping[str, str]) -> subprocess.Popen[bytes]:
    start.console.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **slot, **start.variables}
    with start.console.open("ab") as output:
        return subprocess.Popen(start.command, stdout=output, stderr=subprocess.STDOUT, env=variables)
