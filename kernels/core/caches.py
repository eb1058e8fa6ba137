"""Tables that depend only on offsets, made once for all layers that share these offsets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table")


class _Kept(NamedTuple):
    versions: tuple[int, ...]
    others: tuple[weakref.ref[Tensor], ...]
    table: Any

    def is_of(self, offsets: Sequence[Tensor | None]) -> bool:
        return self.versions == _versions(offsets) and all(
            ref() is other for ref, other in zip(self.others, offsets[1:], strict=True)
        )


def _versions(offsets: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The versions of those tensors that still exist."""
    return tuple([x._version for x in offsets if x is not None])


# By the identity of the first offsets: a weak reference to them, and their tables by key. An entry dies with them.
_tables: dict[int, tuple[weakref.ref[Tensor], dict[Hashable, _Kept]]] = {}
_thread = threading.local()


def cached(make: Callable[[], Table], key: Hashable, *offsets: Tensor) -> Table:
    """`make()`, or what it returned for this key and these very tensors, if none was written to since.

    PyTorch counts the writes of its operators, but not those through `.data` or NumPy, by a kernel of your own, by some
    collectives (`all_to_all_single` into offsets) or by a replayed CUDA graph: after such a write to offsets that were
    in use, call `torch.autograd.graph.increment_version` on them. Tables are not shared between streams. While a CUDA
    graph is captured, none is reused and none kept: replays have to make their own.
    """
    # Writes to inference tensors are not counted, nor are all writes of compiled code.
    if any(x.is_inference() for x in offsets) or is_uncached():
        return make()
    first = offsets[0]
    stream = None
    if first.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch._C._cuda_getCurrentRawStream(first.device.index)
    number = id(first)
    entry = _tables.get(number)
    if entry is None or entry[0]() is not first:
        entry = _tables[number] = weakref.ref(first, lambda gone: _drop(number, gone)), {}
    tables = entry[1]
    # Kernels differ in how many offsets they take.
    place = key, stream, len(offsets)
    kept = tables.get(place)
    if kept is None or not kept.is_of(offsets):
        # Keys differ from batch to batch: earlier tables of offsets that live on would never be used again.
        for old, other in list(tables.items()):
            if not other.is_of((first, *(ref() for ref in other.others))):
                tables.pop(old, None)
        kept = _Kept(_versions(offsets), tuple([weakref.ref(x) for x in offsets[1:]]), make())
        tables[place] = kept
    return kept.table


def is_uncached() -> bool:
    """Whether this thread is in a function that `uncached` made."""
    return getattr(_thread, "is_uncached", False)


def uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in which nothing is cached: for callers whose writes to tensors are not counted."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        before = is_uncached()
        _thread.is_uncached = True
        try:
            return function(*arguments)
        finally:
            _thread.is_uncached = before

    return call


def _drop(number: int, gone: weakref.ref[Tensor]) -> None:
    if number in _tables and _tables[number][0] is gone:
        del _tables[number]
