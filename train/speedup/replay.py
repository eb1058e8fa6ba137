"""Parts of a step beside the architecture as CUDA graphs: `runtime.cuda_graphs=true`, see `train.speedup.graphs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

WARMUP_STEPS = 2
"""Calls of a kind before its capture: they compile its kernels, and libraries allocate their workspaces."""
MAX_GRAPHS = 16
"""More kinds than this run without a graph, since every graph keeps its inputs and results."""
MAX_KINDS = 10_000
"""Kinds that are counted before the counts are cleared."""


class Replay:
    """`function(*tensors)` without gradients, with a graph for each kind of call that recurs.

    The function must not wait for the device, and tensors that it changes must not move: a replay writes to the same
    memory. Its results belong to the graph, and the next replay overwrites them. If not `enabled`, it just calls the
    function.
    """

    def __init__(self, function: Callable[..., Any], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *tensors: Tensor, kind: Hashable = None) -> Any:
        """`kind` distinguishes calls whose tensors have the same shapes."""
        if not self._enabled:
            return self._function(*tensors)
        key = kind, tuple(tensor.shape for tensor in tensors)
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._seen) > MAX_KINDS:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= WARMUP_STEPS or len(self._graphs) == MAX_GRAPHS:
                return self._function(*tensors)
            graph = self._graphs[key] = _Graph(self._function, tensors)
        return graph.replay(tensors)


class _Graph:
    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        self._inputs = [torch.empty_like(tensor) for tensor in tensors]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture: loaders pin memory.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = function(*self._inputs)

    def replay(self, tensors: tuple[Tensor, ...]) -> Any:
        copy_all(self._inputs, tensors)
        self._graph.replay()
        return self._results


@torch.no_grad()
def copy_all(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each source to its target, with one launch for each dtype."""
    by_type: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensor in zip(to, tensors, strict=True):
        places, values = by_type.setdefault((place.dtype, tensor.dtype), ([], []))
        places.append(place)
        values.append(tensor)
    for places, values in by_type.values():
        torch._foreach_copy_(places, values)
