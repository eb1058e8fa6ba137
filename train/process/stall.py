"""What every rank is doing when one of them hangs: stacks of all threads, written shortly before the others give up."""

from __future__ import annotations

import faulthandler
import re
import threading
import time
from pathlib import Path
from types import TracebackType

from kernels.core.launch import launched_last

WRITTEN_AFTER = 0.9
"""Fraction of the timeout without a step: at the timeout NCCL's watchdog would end the process with nothing written."""
TOLD_AFTER = 0.85
NOTED_EVERY = 0.05
"""Fraction of the timeout between resets of the clock, which take the host a tenth of a millisecond each."""


class StallWatch:
    """Inside its `with`, a rank that takes no step for most of `seconds` writes its stacks to a file and goes on.

    The stacks of waiting ranks show their collective, those of the rank that they wait for what it does instead. Where
    that is to wait for the GPU, the kernel of ours that was launched last, but for replays of graphs, is named as well.
    When a run ends normally, the file is removed.
    """

    def __init__(self, run_dir: Path, rank: int, seconds: float) -> None:
        """`seconds`: the timeout of the collectives, which raise an error after it."""
        self._path = run_dir / f"stalled_rank_{rank}.txt"
        self._rank, self._seconds = rank, seconds
        self._step, self._noted = 0, 0.0
        self._teller: threading.Timer | None = None

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        self._set_clock()

    def passed(self, step: int) -> None:
        """To be called at the end of every step."""
        self._step = step
        if time.monotonic() - self._noted > NOTED_EVERY * self._seconds:
            self._set_clock()

    def _set_clock(self) -> None:
        self._noted = time.monotonic()
        faulthandler.dump_traceback_later(WRITTEN_AFTER * self._seconds, file=self._file)
        self._stop_telling()
        # As Python, a little earlier than the stacks, which are written even if no Python runs any more.
        self._teller = threading.Timer(TOLD_AFTER * self._seconds, self._tell)
        self._teller.daemon = True
        self._teller.start()

    def _tell(self) -> None:
        self._file.write(f"rank {self._rank} behind step {self._step}, kernel launched last: {launched_last()}\n")
        self._file.flush()

    def _stop_telling(self) -> None:
        if self._teller is not None:
            self._teller.cancel()
            self._teller.join()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stop_telling()
        self._file.close()
        stalled = error is not None and self._path.stat().st_size > 0
        if not stalled:
            self._path.unlink()
        if stalled and isinstance(error, RuntimeError) and re.search("timed out|timeout", str(error), re.IGNORECASE):
            raise RuntimeError(
                f"rank {self._rank} waited {self._seconds:g} s (runtime.collective_timeout) behind step {self._step} "
                f"for a rank that did not come: {self._path.parent}/stalled_rank_*.txt show where each of them stood. "
                f"Where one is only slow, wait longer, e.g. runtime.collective_timeout={2 * self._seconds:g}"
            ) from error
