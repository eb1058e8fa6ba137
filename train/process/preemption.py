"""A run that is told to stop: SIGTERM and SIGUSR1 end it after a step that all ranks agree on, with a checkpoint.

Schedulers send one of the two before they take a machine away, to some processes of a job or to all of them. Another
rank may be steps ahead at that moment, so the handler only notes the signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from train.process.distributed import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 75
"""Exit status of processes that stopped because they were told to (EX_TEMPFAIL of sysexits.h): start the run again."""
INTERVAL = 4
"""Steps between two agreements."""


class Preempted(SystemExit):
    """Ends a process with `STATUS`, once its run has saved a checkpoint."""

    def __init__(self) -> None:
        super().__init__(STATUS)


class Preemption:
    """Inside its `with`, signals are noted. After one, on any rank, `agreed` turns true at the same step on all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._told = False
        self._previous: dict[signal.Signals, Any] = {}
        self._any_told = torch.zeros((), dtype=torch.int32)
        self._reduction: dist.Work | None = None

    def __enter__(self) -> None:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}

    def __exit__(self, *ended_by: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def agreed(self, step: int) -> bool:
        """To be called after every step, by all ranks. True at most two intervals after a signal.

        The value that is read was reduced over gloo during the last interval, so neither host nor device waits.
        """
        if self.world.size == 1:
            return self._told
        if step % INTERVAL:
            return False
        if self._reduction is not None:
            self._reduction.wait()
        stop = bool(self._any_told)
        self._any_told.fill_(self._told)
        self._reduction = dist.all_reduce(
            self._any_told, op=dist.ReduceOp.MAX, group=self.world.host_group, async_op=True
        )
        return stop


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
