"""The breakdown of a traced step."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType

from train.record import tracing


def test_time_that_spans_cover_counts_once() -> None:
    assert tracing.covered([]) == 0
    assert tracing.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == pytest.approx(4.0)


def event(name: str, start: int, end: int, device: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
    span = SimpleNamespace(start=1e3 * start, end=1e3 * end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)


def test_kernels_are_added_up_by_kind_and_what_overlaps_counts_once() -> None:
    events = [
        event("ncclDevKernel_AllGather", 30, 80),
        event("nvjet_hsh_128x128", 55, 70),
        event("vectorized_elementwise_kernel", 130, 140),
        event("a range of the user", 0, 500, annotation=True),
        event("aten::mm", 0, 500, DeviceType.CPU),
    ]
    shares = tracing.breakdown(cast(Any, SimpleNamespace(events=lambda: events)))
    assert {name: share for name, share in shares.items() if share} == {  # milliseconds of one of five steps
        "communication": 10, "matrix products": 3, "elementwise": 2, "wall": 22, "idle": 10, "communication alone": 7,
    }  # fmt: skip


def test_groups_know_every_kernel_of_ours() -> None:
    sources = [path.read_text() for path in (Path(__file__).parents[3] / "kernels").rglob("*.py")]
    kernels = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    assert len(kernels) > 70
    assert {name for name in kernels if tracing.group_of(name) == "other"} == set()
    launched = {name for text in sources for name in re.findall(r"\bLauncher\((\w+)[,)]", text)}
    assert launched <= kernels  # or a trace would show a name that was not looked at


def test_a_trace_begins_when_the_device_is_done_with_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler records what runs on the device from then on, whichever step launched it."""
    done: list[int] = []
    tracer = tracing.StepTracer(0, tmp_path, torch.device("cuda"))
    profile = SimpleNamespace(step_num=0, step=lambda: setattr(profile, "step_num", profile.step_num + 1))
    tracer._profile, tracer._last_untraced = cast(Any, profile), 3
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(profile.step_num))
    for _ in range(8):
        tracer.step()
    assert done == [3]
