"""A run of `tools.speeds` on any ranks: every step's loss from equal tables, its time, and what NCCL alone takes.

    python -m tools.layouts FILE.json

prints the table of docs/parallel.md from what `python -m tools.speeds OUT.jsonl --json FILE.json` has written.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.profiler import ProfilerActivity, profile, schedule

from modules.batch import RequestBatch
from train.commands.speed import SpeedRun
from train.config.schema import Config
from train.process.distributed import World
from train.process.stall import StallWatch
from train.record.meters import WARMUP_STEPS
from train.record.tracing import TRACED_STEPS, StepTracer, breakdown

GIB = 2**30
LARGEST = 16 * GIB
"""Bytes of tables on a rank, above which they stay as they were made: losses are then those of other rows."""
AT_ONCE = 2**24
"""Numbers of a table that are made together."""
LAST = 8
"""Steps whose mean loss is compared."""


class LayoutRun(SpeedRun):
    """Also gives the loss of each step (all ranks' mean), and the median of a step's time (rank 0's)."""

    def __init__(self, config: Config, world: World, *, traced: bool) -> None:
        super().__init__(config, world)
        self.opened.stall = _Unwatched(self.run_dir, world.rank, 0)
        self.opened.tracer = _KernelTracer(self.measured + 2 if traced else 0, world.device)
        self.losses: list[Tensor] = []
        self.ends: list[Any] = []
        fill_tables(self.model.state_dict())

    def _forward(self, batch: RequestBatch) -> Any:
        found = super()._forward(batch)
        self.losses.append(found[1][0].clone())  # a graph's output is overwritten
        return found

    def _step(self, batches: Iterator[RequestBatch]) -> None:
        super()._step(batches)
        print(f"{time.strftime('%X')} step {self.progress.step}", flush=True)  # where a run that hangs was, since when
        if self.world.device.type == "cuda":
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())

    def _results(self, seconds: float) -> dict[str, Any]:
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        ends = self.ends[WARMUP_STEPS - 1 : self.measured]
        times = [_milliseconds(*pair) for pair in pairwise(ends)]
        losses = losses[: self.measured] / self.world.size
        return {**super()._results(seconds), "step_ms": statistics.median(times), "losses": losses.tolist()}


class _Unwatched(StallWatch):
    """Leaves the only clock that writes stacks to the one who measures."""

    def __enter__(self) -> None:
        pass

    def passed(self, step: int) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class _KernelTracer(StepTracer):
    """Of kernels only, and without files."""

    def __init__(self, first_step: int, device: torch.device) -> None:
        super().__init__(0, Path(), device)
        self._last_untraced = first_step - 1
        if first_step and device.type == "cuda":
            self._profile = profile(
                activities=[ProfilerActivity.CUDA],
                schedule=schedule(wait=first_step - 1, warmup=1, active=TRACED_STEPS, repeat=1),
                on_trace_ready=self._write,
            )

    def _write(self, finished: profile) -> None:
        self.breakdown = breakdown(finished)


def _milliseconds(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else 1e3 * (end - begin)


@torch.no_grad()
def fill_tables(state: dict[str, Any]) -> None:
    """Give each row of the tables numbers that depend on the table and the row alone, not on how they are sharded."""
    weights = [(name, each) for name, each in state.items() if ".embeddings." in name and name.endswith(".weight")]
    shards = [
        (name, shard.tensor, *shard.metadata.shard_offsets)
        for name, weight in weights
        if isinstance(weight, ShardedTensor)
        for shard in weight.local_shards()
    ]
    shards += [(name, weight, 0, 0) for name, weight in weights if not isinstance(weight, ShardedTensor)]
    if sum(tensor.nbytes for _, tensor, _, _ in shards) > LARGEST:
        return
    for name, tensor, row, column in shards:
        height, width = tensor.shape
        columns = torch.arange(column, column + width, device=tensor.device) * 0x85EBCA77
        for begin in range(0, height, max(1, AT_ONCE // width)):
            part = tensor[begin : begin + max(1, AT_ONCE // width)]
            rows = torch.arange(row + begin, row + begin + len(part), device=tensor.device) * 0x9E3779B1
            bits = rows[:, None] + columns + zlib.crc32(name.split(".")[-2].encode())
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # the finaliser of "lowbias32"
                bits = (bits ^ (bits & 0xFFFFFFFF) >> shift) * factor & 0xFFFFFFFF
            bits ^= bits >> 16
            part.copy_((bits.float() / 2**32 - 0.5) * (12 / width) ** 0.5)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each layout beside its model on one GPU, with as many requests a GPU (efficiency) or a step (loss).

    What efficiency four and eight GPUs of a host would have is computed: of N equal parts of what is exchanged, a rank
    sends N - 1, and all the time that two ranks lose is this exchange's.
    """
    by_name = {row["name"]: row for row in rows if "error" not in row}
    lines = [
        "| model | layout | examples/s | efficiency | of 4, 8 | peak memory | NCCL alone | loss, last | first |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        model, layout = row["name"].split(", ", 1)
        if "error" in row:
            lines.append(f"| {model} | {layout} | {row['error'].splitlines()[-1]} | | | | | | |")
            continue
        one, whole = by_name.get(f"{model}, one GPU"), by_name.get(f"{model}, one GPU, whole batch")
        one, whole = one or whole, by_name.get(f"{model}, {row['loss_as']}") if "loss_as" in row else whole
        spent = max((rank["breakdown"].get("communication alone", 0.0) for rank in row["each_rank"]), default=0.0)
        peak = max(rank["peak_memory_bytes"] for rank in row["each_rank"])
        share, more, last, first = "", "", "", ""
        if row["ranks"] == 2 and one:
            efficiency = rate(row) / 2 / rate(one)
            lost = 1 / efficiency - 1
            share = f"{efficiency:.1%}"
            more = ", ".join(f"{1 / (1 + lost * 2 * (ranks - 1) / ranks):.0%}" for ranks in (4, 8))
        if whole and whole is not row and requests(whole) == requests(row):
            last, first = gaps(row, whole)
        lines.append(
            f"| {model} | {layout} | {rate(row):,.0f} | {share} | {more} | {peak / GIB:.1f} GiB | {spent:.1f} of "
            f"{row['step_ms']:.1f} ms | {last} | {first} |"
        )
    return "\n".join(lines) + "\n"


def requests(row: dict[str, Any]) -> int:
    """Of a step, on all ranks."""
    return round(row["requests_per_s"] / row["steps_per_s"])


def rate(row: dict[str, Any]) -> float:
    """Examples per second by the median step: a kernel that is compiled late does not count."""
    return row["examples_per_s"] / row["steps_per_s"] / row["step_ms"] * 1e3


def gaps(row: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """How far the mean loss of the last steps lies from the other's, and at most that of any of the first four."""
    here, there = row["losses"], other["losses"]
    steps = min(len(here), len(there))
    last = statistics.mean(here[steps - LAST : steps]) - statistics.mean(there[steps - LAST : steps])
    return f"{last:+.5f}", f"{max(abs(a - b) for a, b in zip(here[:4], there[:4], strict=True)):.5f}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]), end="")
