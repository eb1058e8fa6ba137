"""What a step does besides the architecture, as CUDA graphs: `runtime.cuda_graphs=true`, see `train.graphs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

WARMUP_STEPS = 2
"""Calls of a kind before it is captured."""
MAX_GRAPHS = 16
"""Further kinds run as they are."""


class Replay:
    """`function(*tensors)` without gradients, as a graph for each kind of call that comes back.

    The function must not wait for the device, and what it changes must stay where it is: a replay writes to the same
    memory. Its results are the graph's own, which the next replay writes over. Not `enabled`, it is the function.
    """

    def __init__(self, function: Callable[..., Any], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *tensors: Tensor, kind: Hashable = None) -> Any:
        """`kind` tells calls apart whose tensors have the same shapes."""
        if not self._enabled:
            return self._function(*tensors)
        key = kind, tuple(tensor.shape for tensor in tensors)
        graph = self._graphs.get(key)
        if graph is None:
            self._seen[key] += 1
            if self._seen[key] <= WARMUP_STEPS or len(self._graphs) == MAX_GRAPHS:
                return self._function(*tensors)
            graph = self._graphs[key] = _Graph(self._function, tensors)
        return graph.replay(tensors)


class _Graph:
    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        self._inputs = [torch.empty_like(tensor) for tensor in tensors]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: loaders pin memory.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = function(*self._inputs)

    @torch.no_grad()
    def replay(self, tensors: tuple[Tensor, ...]) -> Any:
        # One launch for all that are of one type.
        for dtype in {tensor.dtype for tensor in tensors}:
            of_type = [index for index, tensor in enumerate(tensors) if tensor.dtype is dtype]
            torch._foreach_copy_([self._inputs[index] for index in of_type], [tensors[index] for index in of_type])
        self._graph.replay()
        return self._results
