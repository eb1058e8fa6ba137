"""Where this process stands: rank, device and process groups. NCCL carries CUDA tensors, gloo everything else."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from train.process.heartbeat import Heartbeat
from train.process.interface import listen_on

if TYPE_CHECKING:  # it knows all models, whose import takes seconds
    from train.config.schema import RuntimeConfig

T = TypeVar("T")

LET_GO = 0.1  # seconds that the threads of collectives get at the end


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    guard_group: dist.ProcessGroup  # collectives inside the backward, which may interleave with DDP's
    host_group: dist.ProcessGroup  # gloo: Python objects and barriers
    checkpoint_group: dist.ProcessGroup  # gloo: checkpoints, written from a thread of their own
    heartbeat: Heartbeat | None = None  # of rank 0 where others wait for it

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's picklable value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]

    def by_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank; an error on rank 0 is one on all.

        Otherwise the others would fail a little later because rank 0 is gone, and torchrun would show one of their
        errors as the cause. `make` may take any time while it makes progress; RuntimeError on the others when it makes
        none for `runtime.collective_timeout`.
        """
        made: list[T] = []
        failure: Exception | None = None
        if self.is_first:
            with self.heartbeat.working() if self.heartbeat else nullcontext():
                try:
                    made.append(make())
                except Exception as error:
                    failure = error
        elif self.heartbeat:
            self.heartbeat.wait()
        made, reason = self.broadcast((made, failure and str(failure)))
        if failure is not None:
            raise failure
        if reason is not None:
            raise ValueError(f"rank 0: {reason}")
        return made[0]

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)


def device_type_of(runtime: RuntimeConfig) -> str:
    """cuda or cpu; ValueError for a GPU that is not there."""
    device_type = runtime.device if runtime.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("runtime.device=cuda, but this process sees no GPU; use runtime.device=cpu or auto")
    return device_type


def start(runtime: RuntimeConfig) -> World:
    """Join the process group that torchrun described, or make one of a single process; pick the device."""
    device_type = device_type_of(runtime)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} visible; "
            f"start with --nproc-per-node {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Kernels that fill the chip beside a collective would otherwise begin before it does.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    else:
        torch.set_num_threads(runtime.threads or max(1, (os.cpu_count() or 1) // local_size))
    if runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=runtime.collective_timeout)
    if not dist.is_initialized():
        store, rank, size = _rendezvous(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    size = dist.get_world_size()
    return World(
        rank=dist.get_rank(),
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        guard_group=dist.new_group(backend=backend, timeout=timeout),
        host_group=dist.new_group(backend="gloo", timeout=timeout),
        checkpoint_group=dist.new_group(backend="gloo", timeout=timeout),
        heartbeat=Heartbeat(_get_default_store(), runtime.collective_timeout) if size > 1 else None,
    )


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """torchrun's store, or a new one for a single process."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    if interface := os.environ.get("INTERFACE"):
        listen_on(interface)  # the store that rank 0 makes where ranks of several nodes meet
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(_meeting(store, rank, size, timeout.total_seconds()), store), rank, size


def _meeting(store: dist.Store, rank: int, size: int, seconds: float) -> str:
    """A name that only these processes share: torchrun keeps its store over restarts, with what the dead wrote.

    Its counts of restarts are no such name, since agents count apart: one that is joined by another starts its
    processes again without counting. So rank 0 proposes a name, the others answer each with one of their own, and a
    name holds once rank 0 has confirmed all answers: nobody confirms the answer of a process to one who has died.
    RuntimeError if not all ranks come within so many seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    if rank == 0:
        store.set("meeting", own)
        answers = {str(other): f"{own}/{other}" for other in range(1, size)}
        while answers and not store.check(list(answers.values())):
            _wait(deadline, size, seconds)
        store.set(f"{own}/confirmed", json.dumps({other: store.get(key).decode() for other, key in answers.items()}))
        return own
    while True:
        if store.check(["meeting"]):
            proposed = store.get("meeting").decode()
            store.set(f"{proposed}/{rank}", own)
            confirmed = f"{proposed}/confirmed"
            if store.check([confirmed]) and json.loads(store.get(confirmed)).get(str(rank)) == own:
                return proposed
        _wait(deadline, size, seconds)


def _wait(deadline: float, size: int, seconds: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"not all of the {size} ranks have come within {seconds:g} s (runtime.collective_timeout); see the logs of "
            f"those that are missing, or wait longer, e.g. runtime.collective_timeout={2 * seconds:g}"
        )
    time.sleep(0.02)


def stop() -> None:
    """Leave the process group; the process may end after it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # A thread of gloo that drops the tensors of the last collective needs the interpreter for it. One that still
        # waits for it when the interpreter ends aborts the process (SIGABRT, SIGBUS), and with it a run that is done.
        time.sleep(LET_GO)
