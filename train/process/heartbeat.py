"""Waiting for rank 0 as long as it makes progress: preparing data may take hours, a rank that hangs or has died not."""

from __future__ import annotations

import faulthandler
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

BEATS = 20
"""In a timeout."""
GIVEN_UP = 0.9
"""Fraction of the timeout without a beat: with the beat before, the wait ends within the timeout after the work did."""
LEAST_LOAD = 0.03
"""CPU seconds a second below which a process does nothing: gloo's idle threads alone take half a hundredth."""
WORK, DONE = "first/work", "first/done"


class Heartbeat:
    """What rank 0 does alone, one work after the other, and the others' waits for it.

    It beats while its process computes, reads or writes files: one that hangs does not beat, although it lives.
    """

    def __init__(self, store: dist.Store, seconds: float) -> None:
        """`seconds`: without progress, after which the others give up; `runtime.collective_timeout`."""
        self._store, self._seconds = store, seconds
        self._number = 0  # of the work, the same on all ranks

    @contextmanager
    def working(self) -> Iterator[None]:
        """On rank 0: inside this `with`, the others wait for as long as there is progress."""
        self._number += 1
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self._store.set(DONE, str(self._number))

    def _beat(self, ended: threading.Event) -> None:
        interval, beats, silent = self._seconds / BEATS, 0, 0
        busy, moved = _activity()
        while not ended.wait(interval):
            busy_before, moved_before = busy, moved
            busy, moved = _activity()
            if moved > moved_before or busy - busy_before > LEAST_LOAD * interval:
                beats, silent = beats + 1, 0
                self._store.set(WORK, f"{self._number} {beats}")
            else:
                silent += 1
            if silent == BEATS // 2:
                print(f"rank 0 has done nothing for {silent * interval:g} s; its threads:", file=sys.stderr)
                faulthandler.dump_traceback()

    def wait(self) -> None:
        """On the others: until rank 0 has done its work. RuntimeError if it has died or makes no progress."""
        self._number += 1
        beat, since, pause = b"", time.monotonic(), 0.001
        try:
            while int(self._read(DONE) or 0) < self._number:
                newest = self._read(WORK)
                if newest != beat:
                    beat, since = newest, time.monotonic()
                elif time.monotonic() - since > GIVEN_UP * self._seconds:
                    raise RuntimeError(
                        f"rank 0 has made no progress for {self._seconds:g} s (runtime.collective_timeout) in what it "
                        "does alone while the others wait, such as preparing the data: it has died, or hangs, perhaps "
                        "in a file system, and has written to its stderr where. Where it is only slow, wait longer, "
                        f"e.g. runtime.collective_timeout={2 * self._seconds:g}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 1.0, self._seconds / BEATS)
        except dist.DistError as error:  # it held the store
            raise RuntimeError(
                "rank 0 has died in what it does alone while the others wait, such as preparing the data; see its log"
            ) from error

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""


def _activity() -> tuple[float, int]:
    """CPU seconds of this process, and how often it has read or written a block of a file."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_oublock + used.ru_majflt
