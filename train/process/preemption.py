"""A run that is told to stop: SIGTERM and SIGUSR1 end it after a step that all ranks agree on, with a checkpoint.

Schedulers send one of the two before they take a machine away, to some processes of a job or to all of them. Another
rank may be steps ahead at that moment, so the handler only notes the signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from train.process.distributed import World
from train.process.signals import SIGNALS, STATUS

PERIOD = 1.0
"""Seconds between two agreements. Schedulers wait 30 seconds or so before they kill."""
MOST_STEPS = 1000
"""Steps between two agreements at the most."""


class Preempted(SystemExit):
    """Ends a process with `STATUS`, once its run has saved a checkpoint."""

    def __init__(self) -> None:
        super().__init__(STATUS)


class Preemption:
    """Inside its `with`, signals are noted. After one, on any rank, `agreed` turns true at the same step on all."""

    def __init__(self, world: World, seconds: float) -> None:
        """`seconds`: the timeout of the collectives; ranks wait no longer for one that hangs."""
        self.world, self._timeout = world, timedelta(seconds=seconds)
        self._told = False
        self._previous: dict[signal.Signals, Any] = {}
        self._shared = torch.zeros(2, dtype=torch.float64)  # was any rank told, and seconds a step of the slowest
        self._reduction: dist.Work | None = None
        self._slow = False  # a step takes longer than a period
        self._interval = 1  # steps from the last agreement to the next
        self._since = 0  # steps since the last agreement
        self._clock = time.monotonic()

    def __enter__(self) -> None:
        self._clock = time.monotonic()
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def __exit__(self, *ended_by: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def agreed(self) -> bool:
        """To be called after every step, by all ranks. True within two periods of a signal, or at the end of the step.

        Agreements are a period apart, in steps of the slowest rank. The value that is read was reduced over gloo since
        the last one, so neither host nor device waits; where a step takes longer than a period, ranks wait for it.
        """
        if self.world.size == 1:
            return self._told
        self._since += 1
        if self._since < self._interval:
            return False
        stop = self._conclude()
        now = time.monotonic()
        self._shared[0], self._shared[1] = float(self._told), (now - self._clock) / self._since
        self._reduction = dist.all_reduce(
            self._shared, op=dist.ReduceOp.MAX, group=self.world.host_group, async_op=True
        )
        self._clock, self._since = now, 0
        return stop or (self._interval == 1 and self._slow and self._conclude())

    def agreed_now(self) -> bool:
        """As `agreed`, where ranks wait together for something else than a step: every call is an agreement."""
        if self.world.size == 1:
            return self._told
        told = torch.tensor([float(self._conclude() or self._told)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.world.host_group)
        return bool(told.item())

    def _conclude(self) -> bool:
        """Wait for the reduction that is under way: was any rank told? The same steps follow on all ranks."""
        if self._reduction is None:
            return False
        self._reduction.wait(self._timeout)
        self._reduction = None
        told, seconds = self._shared.tolist()
        self._slow = seconds >= PERIOD
        self._interval = max(1, int(PERIOD / max(seconds, PERIOD / MOST_STEPS)))
        return bool(told)


def shield(worker: int) -> None:
    """`worker_init_fn` of a loader: only the process that reads its batches ends a worker, by a signal or its own end.

    torchrun signals the process group of each rank, and Slurm every process of a job: a worker that died of the signal
    would end its rank before the checkpoint is written.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    reader = multiprocessing.parent_process()
    assert reader is not None
    threading.Thread(target=_obey, args=(reader,), daemon=True).start()


def _obey(reader: BaseProcess) -> None:
    """Ends this process. Torch watches the process that forked it, which stays as long as there are workers."""
    while reader.is_alive():
        told = signal.sigtimedwait(SIGNALS, 2)
        if told is not None and told.si_pid == reader.pid:
            break
    os._exit(0)
