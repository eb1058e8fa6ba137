"""Counters on a GPU that a kernel finds at 0 and leaves at 0, so that nothing has to clear them before it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernels.remember import forgets

_LINES = 4096  # for kernels in CUDA graphs
_LINE = 32  # int32 in a line of the cache

_of_streams: dict[tuple[int, int], Tensor] = {}
_of_graphs: dict[int, tuple[Tensor, itertools.count[int]]] = {}


def counter(device: torch.device) -> Tensor:
    """int32, at first 0, for a kernel that is launched on the current stream next and leaves a 0 there.

    Kernels of a stream follow one another and share one. Graphs may be replayed beside each other, so each kernel that
    is captured has its own; if none has been cleared for it beforehand, that is a part of the graph. Compiled code has
    a new one each time: what is allocated while Inductor warms up for its CUDA graphs must not outlive the call.
    """
    if torch.cuda.is_current_stream_capturing():
        lines, numbers = _of_graphs.get(device.index, (None, None))
        number = _LINES if numbers is None else next(numbers)
        return _zeros(1, device) if lines is None or number >= _LINES else lines[number]
    if forgets():
        return _zeros(1, device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _of_streams.get(key)
    if found is None:
        found = _of_streams[key] = _zeros(1, device)
        if device.index not in _of_graphs:
            lines = _zeros(_LINES * _LINE, device).view(_LINES, _LINE)
            torch.cuda.current_stream(device).synchronize()  # graphs run on other streams
            _of_graphs[device.index] = lines, itertools.count()
    return found


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
