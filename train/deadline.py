"""A time limit for runs that train side by side and must end at the same step: `train.compare --train-seconds`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from train.files import write_json
from train.tracking import METRICS_FILE, read_metrics

log = logging.getLogger(__name__)

DECIDE_AT = 0.4
"""Share of the time after which runs are fast enough known, and none is yet where the slowest one will end."""


class Deadline:
    """Looks at what `runs` have logged and, when they would not be through in time, says in `file` where to stop.

    All runs stop at the step that the slowest of them reaches in `seconds`; each reads `file`, its
    `runtime.stop_file`, at its log lines. `steps` is what they stop at without it.
    """

    def __init__(self, seconds: float, runs: Sequence[Path], steps: int, file: Path) -> None:
        self._start, self._seconds = time.time(), seconds
        self._runs, self._steps, self._file = runs, steps, file
        self._decided = file.exists()  # by a comparison that was cut off

    def check(self) -> None:
        """Decide, if it is time. What was decided stays."""
        if self._decided or time.time() < self._start + DECIDE_AT * self._seconds:
            return
        reached, now = [], []
        for run in self._runs:
            file = run / METRICS_FILE
            logged = [record for record in read_metrics(file) if record.split == "train"] if file.exists() else []
            if len(logged) < 2:
                return
            before, last = logged[-2:]
            interval = last.step - before.step
            rate = interval / (last.time - before.time)
            reached.append(last.step + rate * (self._start + self._seconds - last.time))
            now.append(last.step)
        # The fastest may log once more before it reads this.
        stop = max(int(min(reached)) // interval * interval, max(now) + 2 * interval)
        self._decided = True
        if stop < self._steps:
            log.warning("%s seconds are too few for %s steps: all runs stop after %s", self._seconds, self._steps, stop)
            write_json(self._file, stop)
