"""Counters that kernels share because they leave them at 0."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from kernels.core import counters
from kernels.core.caches import uncached

DEVICE = SimpleNamespace(index=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the stream is and whether it is captured, of a GPU with counters for two kernels in graphs."""
    state = SimpleNamespace(stream=1, capturing=False, cleared=0)

    def zeros(size: int, device: object) -> torch.Tensor:
        state.cleared += 1
        return torch.zeros(size, dtype=torch.int32)

    for name, value in (("_LINES", 2), ("_of_streams", {}), ("_of_graphs", {}), ("_zeros", zeros)):
        monkeypatch.setattr(counters, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return state


def test_kernels_of_a_stream_share_one_that_is_cleared_once(gpu: SimpleNamespace) -> None:
    first = counters.counter(DEVICE)
    gpu.stream = 2
    other = counters.counter(DEVICE)
    gpu.stream, cleared = 1, gpu.cleared
    assert counters.counter(DEVICE) is first
    assert gpu.cleared == cleared
    assert first.data_ptr() != other.data_ptr()


def test_each_captured_kernel_has_one(gpu: SimpleNamespace) -> None:
    eager = counters.counter(DEVICE)
    gpu.capturing, cleared = True, gpu.cleared
    found = [counters.counter(DEVICE) for _ in range(2)]
    assert gpu.cleared == cleared
    found += [counters.counter(DEVICE) for _ in range(2)]
    assert gpu.cleared == cleared + 2, "those behind the last line are cleared in the graph"
    assert all(int(counter[0]) == 0 for counter in found)
    pointers = [counter.data_ptr() for counter in (eager, *found)]
    assert all(a != b for a, b in itertools.combinations(pointers, 2))


def test_kernels_that_count_more_have_wider_lines(gpu: SimpleNamespace) -> None:
    narrow, wide = counters.counter(DEVICE), counters.counter(DEVICE, 34)
    assert wide.numel() >= 34
    assert wide.data_ptr() != narrow.data_ptr()
    assert counters.counter(DEVICE, 40) is wide
    gpu.capturing, cleared = True, gpu.cleared
    first, second = (counters.counter(DEVICE, 34) for _ in range(2))
    assert first.numel() >= 34
    assert gpu.cleared == cleared + 1, "two lines are one of twice the width"
    assert not {first.data_ptr(), second.data_ptr()} & {narrow.data_ptr(), wide.data_ptr()}


def test_a_graph_that_comes_first_clears_its_own(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    counters.counter(DEVICE)
    assert gpu.cleared == 1


def test_compiled_code_keeps_none(gpu: SimpleNamespace) -> None:
    first, second = (uncached(counters.counter)(DEVICE) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert not counters._of_streams
    assert not counters._of_graphs
