"""Run a function on several gloo ranks inside one test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from train.process.signals import SIGNALS

# Imported once, by the server that ranks are forked from: the imports take longer than most of what ranks do here.
multiprocessing.set_forkserver_preload(["train.main", "train.record.plots", "tests.launching"])


def run_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """`function(*arguments)` in `ranks` processes that see torchrun's environment; a failure of one raises here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_enter, args=(function, ranks, port, arguments), nprocs=ranks, start_method="forkserver")


def _enter(rank: int, function: Callable[..., None], ranks: int, port: int, arguments: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
    }
    # Blocked where a loader of an earlier test started the server that this process was forked from.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    function(*arguments)
