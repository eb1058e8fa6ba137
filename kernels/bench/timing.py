"""Interleaved timing of several functions, and the memory that one takes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
WARM_UP_ROUNDS = 3
MAX_ROUNDS = 200
GRAPH_ROUNDS = 10  # upper limit
GRAPH_MS = 20.0


@contextlib.contextmanager
def turn_of(folder: Path) -> Iterator[None]:
    """A context that only one of the processes with results in `folder` enters at a time; they compile concurrently.

    The first call of each contender, which compiles it and is checked, does not wait for its turn.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float
    rounds: int


def interleaved(
    steps: dict[str, Callable[[], Any]], device: torch.device, seconds: float, min_rounds: int
) -> dict[str, Timing]:
    """Time each step once per round, for about `seconds` a step in total and at least `min_rounds` rounds."""
    flush = _flush_buffer(FLUSH_BYTES[device.type], device)
    time_once = _time_cuda if device.type == "cuda" else _time_cpu

    def one_round() -> dict[str, Callable[[], float]]:
        return {name: time_once(step, flush) for name, step in steps.items()}

    for _ in range(WARM_UP_ROUNDS):
        start = time.perf_counter()
        for read in one_round().values():
            read()
        elapsed = time.perf_counter() - start
    rounds = max(min_rounds, min(MAX_ROUNDS, int(seconds * len(steps) / elapsed)))
    reads = [one_round() for _ in range(rounds)]
    return {name: _summary([read[name]() for read in reads]) for name in steps}


def _flush_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Memory that is read to empty the caches. If it were written, the next kernel would pay for writing it back."""
    return torch.zeros(size // 4, device=device)


def _time_cuda(step: Callable[[], Any], flush: torch.Tensor) -> Callable[[], float]:
    # Events are read later: waiting here would empty the queue, and launches would be timed instead of kernels.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.sum()
    start.record()
    step()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return read


def _time_cpu(step: Callable[[], Any], flush: torch.Tensor) -> Callable[[], float]:
    flush.sum()
    start = time.perf_counter()
    step()
    elapsed = (time.perf_counter() - start) * 1e3
    return lambda: elapsed


def _summary(milliseconds: list[float]) -> Timing:
    low, median, high = torch.tensor(milliseconds).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return Timing(median, low, high, len(milliseconds))


def peak_memory(step: Callable[[], Any], device: torch.device) -> float | None:
    """MiB that `step` takes at its peak beyond what was allocated before, including its result; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def graph_rounds(steps: dict[str, Callable[[], Any]], stream: torch.cuda.Stream) -> int:
    """How many rounds a graph has: as many as the slowest step does in GRAPH_MS."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    slowest = GRAPH_MS / GRAPH_ROUNDS
    with torch.cuda.stream(stream):
        for step in steps.values():
            start.record()
            step()
            end.record()
            end.synchronize()
            slowest = max(slowest, start.elapsed_time(end))
    return max(int(GRAPH_MS / slowest), 1)


def captured(step: Callable[[], Any], stream: torch.cuda.Stream, rounds: int) -> Callable[[], None]:
    """The replay of a CUDA graph of `rounds` rounds of a cache flush and `step`, without launch overhead.

    A backward runs on the stream of its forward, so whatever `step` differentiates must have run on `stream`.
    RuntimeError if `step` cannot be captured.
    """
    flush = _flush_buffer(FLUSH_BYTES["cuda"] // 2, torch.device("cuda"))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_ROUNDS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            flush.sum()
            step()

    def replay(used: tuple[Any, ...] = (flush, step)) -> None:
        """Replay the graph; `used` keeps the memory alive that the graph reads and writes."""
        graph.replay()

    return replay


def interleaved_graphs(
    steps: dict[str, Callable[[], Any]],
    stream: torch.cuda.Stream,
    device: torch.device,
    seconds: float,
    min_rounds: int,
    rounds: int,
) -> dict[str, Timing]:
    """`interleaved` for graphs of `rounds` made by `captured`, minus the time of a graph of only the flushes."""
    timings = interleaved({"": captured(lambda: None, stream, rounds), **steps}, device, seconds, min_rounds)
    flushes = timings.pop("").median
    return {
        name: Timing(*((value - flushes) / rounds for value in (t.median, t.low, t.high)), t.rounds)
        for name, t in timings.items()
    }
