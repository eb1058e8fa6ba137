"""Counters on a GPU that are 0 before and after each kernel, so that no extra launch has to clear them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernels.core.caches import is_uncached

_LINES = 4096  # for kernels in CUDA graphs
_LINE = 32  # int32 in a line of the cache

_of_streams: dict[tuple[int, int, int], Tensor] = {}
_of_graphs: dict[tuple[int, int], tuple[Tensor, itertools.count[int]]] = {}


def counter(device: torch.device, size: int = 1) -> Tensor:
    """At least `size` int32 zeros for the kernel that is launched next on the current stream and leaves them at 0.

    Kernels of a stream run one after the other and share their counters. Graphs may be replayed concurrently, so each
    captured kernel has its own; if none were cleared beforehand, clearing them becomes part of the graph. Compiled code
    gets new ones each time: memory allocated while Inductor warms up for its CUDA graphs must not outlive the call.
    """
    width = max(1 << (size - 1).bit_length(), _LINE)
    if torch.cuda.is_current_stream_capturing():
        lines, numbers = _of_graphs.get((device.index, width), (None, None))
        number = _LINES if numbers is None else next(numbers)
        return _zeros(width, device) if lines is None or number >= len(lines) else lines[number]
    if is_uncached():
        return _zeros(width, device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index), width
    found = _of_streams.get(key)
    if found is None:
        found = _of_streams[key] = _zeros(width, device)
        if (device.index, width) not in _of_graphs:
            lines = _zeros(_LINES * _LINE, device).view(-1, width)
            torch.cuda.current_stream(device).synchronize()  # graphs run on other streams
            _of_graphs[device.index, width] = lines, itertools.count()
    return found


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
