"""A torch.profiler trace of five steps: `runtime.profile_step=N`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from train.process.files import write_json

TRACED_STEPS = 5
Span = tuple[float, float]  # start and end, in microseconds
GROUPS = {
    "embedding tables": "fbgemm|split_embedding|embedding_codegen|linearize_index",
    "attention": "flash|fmha|attention|gdpa",
    "matrix products": "gemm|nvjet|cutlass|xmma|splitK|gemv|bmm|linear|low_rank|grouped|compress|product",
    "communication": "nccl",
    "dense optimiser": "multi_tensor|adam",
    "norms": "norm",
    "rotations": "rotate",
    "sort and scan": "sort|scan|radix|cub::|top_k|count_kernel|place_kernel|order_kernel",
    "index, gather, copy": (
        "index|gather|scatter|copy|cat|memcpy|memset|fill|move_kernel|permute|pick_rows|select|slice|rank_kernel|"
        "transpose|move_rows|zero_unless|row_of_place|lengths_kernel|table_kernel|schedule|whole_rows|collect"
    ),
    "reductions": "reduce|softmax|segment|join|sum_|sums_|combine",
    "elementwise": "elementwise|triton|activate|swiglu|quantize|round_tiles",
}
"""Groups of kernels by parts of their names; the first that matches counts, the rest is "other"."""


class StepTracer:
    """`with tracer.run(): ... tracer.step()` writes `trace.json`, `kernels.txt`, `breakdown.json`; step 0: nothing."""

    def __init__(self, first_step: int, folder: Path, device: torch.device) -> None:
        self._folder, self._device, self._last_untraced = folder, device, first_step - 1
        self._profile: profile | None = None
        self.breakdown: dict[str, float] = {}  # what breakdown.json holds, once it is written
        if first_step:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=first_step - 1, warmup=1, active=TRACED_STEPS, repeat=1),
                on_trace_ready=self._write,
            )

    def run(self) -> AbstractContextManager[object]:
        return self._profile or nullcontext()

    def step(self) -> None:
        if self._profile is not None:
            # Otherwise work of earlier steps that the device has not finished would be counted in the trace.
            if self._device.type == "cuda" and self._profile.step_num == self._last_untraced:
                torch.cuda.synchronize(self._device)
            self._profile.step()

    def _write(self, finished: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / "trace.json"))
        by = f"self_{self._device.type}_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
        (self._folder / "kernels.txt").write_text(table)
        if self._device.type == "cuda":
            self.breakdown = breakdown(finished)
            write_json(self._folder / "breakdown.json", self.breakdown)


def breakdown(finished: profile) -> dict[str, float]:
    """Milliseconds a step: GPU time by group of kernels; `wall`, from the start of the first kernel to the end of the
    last; `idle`, in which no kernel runs; and `communication alone`, in which nothing but NCCL runs.
    """
    kernels = [
        event
        for event in finished.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    spans: dict[str, list[Span]] = {name: [] for name in [*GROUPS, "other"]}
    for event in kernels:
        spans[group_of(event.name)].append((event.time_range.start, event.time_range.end))
    every = [span for group in spans.values() for span in group]
    work = [span for name, group in spans.items() if name != "communication" for span in group]
    wall = max(end for _, end in every) - min(start for start, _ in every)
    microseconds = {name: sum(end - start for start, end in group) for name, group in spans.items()} | {
        "wall": wall,
        "idle": wall - covered(every),
        "communication alone": covered(every) - covered(work),
    }
    return {name: round(value / 1e3 / TRACED_STEPS, 3) for name, value in microseconds.items()}


def group_of(kernel: str) -> str:
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def covered(spans: Iterable[Span]) -> float:
    """The time in which at least one of the spans runs."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
