"""Examples and requests a second, time spent waiting for data, and model FLOPs utilisation from true jagged lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from modules.batch import RequestBatch

PEAK_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "A100": {torch.bfloat16: 312e12},
    "H100": {torch.bfloat16: 989e12, torch.float8_e4m3fn: 1979e12},
    "H200": {torch.bfloat16: 989e12, torch.float8_e4m3fn: 1979e12},
    "B200": {torch.bfloat16: 2250e12, torch.float8_e4m3fn: 4500e12},
}
"""Vendors' dense tensor-core peaks (FLOP/s, SXM boards, no sparsity), by part of a device's name and operand type."""

TRAINING_FLOPS = 3
"""FLOPs of forward and backward over those of the forward: a GEMM has two more in its backward. No recomputation."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of `device` for GEMMs on `dtype` operands; None for a CPU and for what the table does not have."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peaks for part, peaks in PEAK_FLOPS.items() if part in name]
    return peaks[0].get(dtype) if peaks else None


ForwardFlops = Callable[[float, float, float, float], float]
"""Model FLOPs of one forward, by requests, candidates, and `history_sums`.

It must be homogeneous (twice the batch, twice the FLOPs), so that the sums over many steps give the FLOPs of all.
"""


def history_lengths(batch: RequestBatch) -> Tensor:
    """[event types, R]: events of each request."""
    return batch.history_times.lengths().view(len(batch.history_times.keys()), batch.num_requests)


def history_sums(lengths: Tensor) -> Tensor:
    """[2] float64: sums over requests of T and of T^2, T being a request's events of all types; lengths [types, R]."""
    length = lengths.sum(dim=0).double()
    return torch.stack([length.sum(), length.square().sum()])


class Throughput:
    """Clock and counters of the training loop; `step` never syncs with the host.

    The first `warmup_steps` steps (compilation, allocator growth, cold caches) are not counted. `compute` is a
    collective once `torch.distributed` is initialised; it waits for the device, so that the window holds the work it
    counts.
    """

    def __init__(self, device: torch.device, *, warmup_steps: int = 0, peak: float | None = None) -> None:
        """`peak`: the `peak_flops` that MFU is stated for; None leaves it out."""
        self.device, self.peak = device, peak
        self._warmup_left = warmup_steps
        self._lengths = torch.zeros(2, dtype=torch.float64, device=device)  # sums of T and of T^2
        self.reset()

    def reset(self) -> None:
        """Start a new window now."""
        self._lengths.zero_()
        self._steps = self._requests = self._examples = 0
        self._waited = self._paused = 0.0
        self._start = self._now()

    def step(self, batch: RequestBatch, history: Tensor, negatives: int = 0) -> None:
        """Count one finished training step on `batch`, of these `history_sums`; its last `negatives` candidates, a
        request of their own, are no examples."""
        if self._warmup_left:
            self._warmup_left -= 1
            if not self._warmup_left:
                self.reset()
            return
        self._steps += 1
        self._requests += batch.num_requests - bool(negatives)
        self._examples += batch.num_candidates - negatives
        self._lengths += history

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """A context for fetching the next batch: its time is reported as a share of the window."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for what is not training (validation, a checkpoint): its time is not counted."""
        start = self._now()
        yield
        self._paused += self._now() - start

    def compute(self, forward_flops: ForwardFlops | None = None) -> dict[str, float]:
        """Rates of the window over all ranks; empty while no step has been counted.

        examples_per_s (candidates), requests_per_s, steps_per_s, data_wait_share (of wall time), mean_history (events a
        request). With `forward_flops` also tflops_per_s (of a device, forward and backward) and, given `peak`, mfu.
        """
        seconds = self._now() - self._start - self._paused
        counted = [self._steps, seconds, self._waited, self._requests, self._examples]
        sums = torch.cat([torch.tensor(counted, dtype=torch.float64, device=self.device), self._lengths])
        world = 1
        if dist.is_initialized():
            dist.all_reduce(sums)
            world = dist.get_world_size()
        steps, seconds, waited, requests, examples, length, squared_length = sums.tolist()
        if steps == 0:
            return {}
        # Ranks run in lockstep: their clocks and step counts are averaged.
        steps, seconds, waited = steps / world, seconds / world, waited / world
        values = {
            "examples_per_s": examples / seconds,
            "requests_per_s": requests / seconds,
            "steps_per_s": steps / seconds,
            "data_wait_share": waited / seconds,
            "mean_history": length / max(requests, 1),
        }
        if forward_flops is not None:
            flops = TRAINING_FLOPS * forward_flops(requests, examples, length, squared_length)
            values["tflops_per_s"] = flops / seconds / world / 1e12
            if self.peak is not None:
                values["mfu"] = flops / seconds / world / self.peak
        return values

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
