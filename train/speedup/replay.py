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


LARGE = 1 << 20
"""Bytes from which on a tensor may be read where it lies."""
PATIENCE = 4 * WARMUP_STEPS
"""Calls with large tensors in places that do not recur, before a graph that copies them is captured."""


class Replay:
    """`function(*tensors)` without gradients, with a graph for each kind of call that recurs.

    The function must not wait for the device, and tensors that it changes must not move: a replay writes to the same
    memory. Its results belong to the graph, and the next replay overwrites them. If not `enabled`, it just calls the
    function.

    A graph reads copies of its arguments, of its own. With `in_place`, large ones that recur in the same places, as
    gradients that another graph writes, are read and changed there, as by the function; the graph does not keep them.
    """

    def __init__(self, function: Callable[..., Any], enabled: bool, *, in_place: bool = False) -> None:
        self._function, self._enabled, self._in_place = function, enabled, in_place
        self._seen: Counter[int] = Counter()  # by the hash of the kind
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *tensors: Tensor, kind: Hashable = None) -> Any:
        """`kind` distinguishes calls whose tensors have the same shapes."""
        if not self._enabled:
            return self._function(*tensors)
        key = kind, tuple([tensor.shape for tensor in tensors])
        graph, warmup = None, WARMUP_STEPS
        if self._in_place:
            places = tuple([tensor.data_ptr() for tensor in tensors if _is_large(tensor)])
            graph, warmup = self._graph((key, places), tensors, WARMUP_STEPS, True), PATIENCE
        graph = graph or self._graph(key, tensors, warmup, False)
        return self._function(*tensors) if graph is None else graph.replay(tensors)

    def _graph(self, key: Hashable, tensors: tuple[Tensor, ...], warmup: int, in_place: bool) -> _Graph | None:
        """The graph of this kind, which is captured after so many calls without one."""
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._seen) > MAX_KINDS:
                self._seen.clear()
            self._seen[hash(key)] += 1
            if self._seen[hash(key)] <= warmup or len(self._graphs) == MAX_GRAPHS:
                return None
            graph = self._graphs[key] = _Graph(self._function, tensors, in_place)
        return graph


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= LARGE


class _Graph:
    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...], in_place: bool) -> None:
        self._copied = [i for i, tensor in enumerate(tensors) if not (in_place and _is_large(tensor))]
        inputs = list(tensors)
        for i in self._copied:
            inputs[i] = torch.empty_like(tensors[i])
        self._inputs = [inputs[i] for i in self._copied]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture: loaders pin memory.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = function(*inputs)

    def replay(self, tensors: tuple[Tensor, ...]) -> Any:
        copy_all(self._inputs, [tensors[i] for i in self._copied])
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
