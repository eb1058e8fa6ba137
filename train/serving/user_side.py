"""The user side of requests, kept between them: what a program computes of a request without its candidates.

A program (`torch.export`) is run in two halves: the nodes that depend on the request and its histories alone, and the
rest, which reads what the first ones give: tokens, keys and values of each layer, whatever the model.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from modules.batch import RequestBatch
from train.speedup.replay import Replay

FREE, USER, CANDIDATE = range(3)
"""What a node depends on: weights and constants; the request; candidates."""
FRESH = ("new_full", "new_zeros", "new_empty", "empty", "empty_like", "zeros", "zeros_like", "full", "clone")
"""Operators whose results nothing else shares: they may be changed in place."""
SHIFTED = ("index", "index_select", "slice", "select", "flatten", "view")
"""Operators whose results are times, later by as much as those of their first argument."""
ORDER = ("argsort", "empty_like", "sym_size", "_assert_tensor_metadata")
"""Operators on times that give the same for times that are all later by as much."""

Kept = list[Any]
"""Tensors, and sizes."""


class Halves:
    """`rest(user(...), ...)` is what the program gives, for one request without vendors.

    ValueError for a program that cannot be taken apart.
    """

    def __init__(self, program: GraphModule, num_histories: int, device: torch.device) -> None:
        self._graph = _Graph(program, [USER, CANDIDATE, CANDIDATE, *[USER] * (3 * num_histories)])
        self._sizes: Kept = []
        on_gpu = device.type == "cuda"
        self._first, self._second = Replay(self._user, on_gpu), Replay(self._rest, on_gpu)
        self._copies = on_gpu  # what a graph gives is overwritten when it is replayed
        times = self._graph.placeholders[5::3]
        self.by_age = _reads_age(program, times)
        """Whether it reads how old events are, and not only their order."""

    def user(self, request: Tensor, histories: Sequence[Tensor]) -> Kept:
        kept = self._first(request, *histories)
        return [each.clone() if self._copies and isinstance(each, Tensor) else each for each in kept]

    def rest(self, kept: Kept, candidate: Tensor, offsets: Tensor) -> Tensor:
        """Logits [C, outputs]. On a GPU one call at a time."""
        if not self._copies:
            return self._of(kept, candidate, offsets)
        self._sizes = [None if isinstance(each, Tensor) else each for each in kept]
        tensors = [each for each in kept if isinstance(each, Tensor)]
        return self._second(candidate, offsets, *tensors, kind=tuple(self._sizes))

    def _user(self, request: Tensor, *histories: Tensor) -> Kept:
        kept: Kept = []
        self._graph.run(USER, [request, None, None, *histories], kept)
        return kept

    def _rest(self, candidate: Tensor, offsets: Tensor, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return self._of([next(given) if each is None else each for each in self._sizes], candidate, offsets)

    def _of(self, kept: Kept, candidate: Tensor, offsets: Tensor) -> Tensor:
        inputs = [None, candidate, offsets, *[None] * (len(self._graph.placeholders) - 3)]
        (logits,) = self._graph.run(CANDIDATE, inputs, iter(kept))
        return logits


class _Graph:
    """A graph module, and those below it that a context runs: both halves of each."""

    def __init__(self, module: GraphModule, of_inputs: Sequence[int]) -> None:
        self.nodes = [node for node in module.graph.nodes if node.op != "call_module"]  # which check the inputs
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        if len(self.placeholders) != len(of_inputs):
            raise ValueError(f"the program has {len(self.placeholders)} inputs, not {len(of_inputs)}")
        self._attributes = {n: _attribute(module, str(n.target)) for n in self.nodes if n.op == "get_attr"}
        self.inner: dict[Node, _Graph] = {}
        self.of = dict(zip(self.placeholders, of_inputs, strict=True))
        while not self._classify():
            pass
        for node in self.nodes:
            if _is_context(node) and self.of[node] == CANDIDATE:
                inputs = [self.of[each] if isinstance(each, Node) else FREE for each in node.args[5:]]
                self.inner[node] = _Graph(self._attributes[node.args[4]], inputs)
        readers = {node: [user for user in node.users if user not in self.inner] for node in self.nodes}
        self._kept = {
            node
            for node in self.nodes
            if self.of[node] == USER and any(self.of.get(reader, FREE) == CANDIDATE for reader in readers[node])
        }
        last = {each: node for node in self.nodes for each in node.all_input_nodes}
        self._done: dict[Node, list[Node]] = {}
        for node, reader in last.items():
            self._done.setdefault(reader, []).append(node)

    def _classify(self) -> bool:
        """Whether all is as it was: what is changed in place depends on what it is changed by."""
        before = len(self.of), sum(self.of.values())
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            if node.op not in ("get_attr", "call_function", "output"):
                raise ValueError(f"{node} is a {node.op}")
            found = max((self.of[each] for each in node.all_input_nodes), default=FREE)
            self.of[node] = max(found, self.of.get(node, FREE))
            schema = getattr(node.target, "_schema", None)
            for place, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
                changed = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(changed, Node):
                    continue
                if self.of[changed] < self.of[node]:
                    if _name(changed) not in FRESH:
                        raise ValueError(f"{node} changes {changed}, which may be part of another tensor")
                    self.of[changed] = self.of[node]
        return before == (len(self.of), sum(self.of.values()))

    def run(self, half: int, inputs: Sequence[Any], kept: Kept | Iterator[Any]) -> Any:
        """Nodes of a half. The first one appends to `kept`, the second one takes from it."""
        values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        for node in self.nodes:
            of = self.of[node]
            if node in self.inner:
                arguments = [values.get(each) if isinstance(each, Node) else each for each in node.args]
                context: Any = torch.autocast(*arguments[:4])  # type: ignore[arg-type]
                with context:
                    values[node] = self.inner[node].run(half, arguments[5:], kept)
            elif node.op == "output":
                return map_arg(node.args[0], values.get)
            elif node.op == "get_attr":
                values[node] = self._attributes[node]
            elif node.op == "call_function" and of in (FREE, half):
                values[node] = node.target(*map_arg(node.args, values.get), **map_arg(node.kwargs, values.get))
            if node in self._kept:
                if isinstance(kept, list):
                    kept.append(values[node])
                else:
                    values[node] = next(kept)
            for done in self._done.get(node, ()):
                values.pop(done, None)
        raise AssertionError("a graph without an output")


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _is_context(node: Node) -> bool:
    return str(node.target) == "wrap_with_autocast"


def _reads_age(module: GraphModule, times: Sequence[Node]) -> bool:
    """Whether anything that counts would notice if all of these inputs were later by as much."""
    counts: set[Node] = set()
    for node in reversed(module.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        acts = node.op == "output" or (schema is not None and (schema.is_mutable or not schema.returns))
        if acts or not counts.isdisjoint(node.users):
            counts.add(node)
    later: set[Any] = set(times)
    for node in module.graph.nodes:
        given, name = [each for each in node.all_input_nodes if each in later], _name(node)
        if not given or node not in counts or node.op == "call_module" or name in ORDER:
            continue
        if _is_context(node):
            inner: GraphModule = _attribute(module, str(node.args[4].target))
            inputs = [each for each in inner.graph.nodes if each.op == "placeholder"]
            if _reads_age(inner, [each for each, of in zip(inputs, node.args[5:], strict=True) if of in later]):
                return True
        elif (
            (name == "cat" and later.issuperset(node.args[0]))
            or (name in SHIFTED and given == [node.args[0]])
            or (name == "scatter" and given == [node.args[3]])
        ):
            later.add(node)
        else:
            return True
    return False


class UserSides:
    """User sides of the newest requests, up to so many bytes; those that were not asked for longest go first.

    They are known by all that they depend on: ids and numbers of the request, and its events, so that one is never that
    of another history. If the program reads how old events are, that counts, too.
    """

    def __init__(self, most_bytes: int, *, by_age: bool) -> None:
        self.most_bytes, self._by_age = most_bytes, by_age
        self._held: OrderedDict[bytes, tuple[Kept, int, float]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = self.bytes = 0
        self.age = 0.0

    def key(self, batch: RequestBatch) -> bytes:
        """Of a batch of one request, in host memory."""
        times = batch.history_times.values() - batch.request_time
        if not self._by_age and len(times):
            times = times - times.min()
        digest = hashlib.blake2b(digest_size=32)
        for each in (batch.request_sparse, batch.histories):
            digest.update(each.lengths().numpy().tobytes() + each.values().numpy().tobytes())
        digest.update(batch.request_dense.numpy().tobytes() + times.numpy().tobytes())
        return digest.digest()

    def get(self, key: bytes) -> Kept | None:
        with self._lock:
            if key not in self._held:
                self.misses += 1
                return None
            self._held.move_to_end(key)
            kept, _, made = self._held[key]
            self.hits, self.age = self.hits + 1, time.monotonic() - made
            return kept

    def put(self, key: bytes, kept: Kept) -> None:
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage() for each in kept if isinstance(each, Tensor)
        }
        size = sum(each.nbytes() for each in storages.values())
        with self._lock:
            if size > self.most_bytes or key in self._held:
                return
            self._held[key] = kept, size, time.monotonic()
            self.bytes += size
            while self.bytes > self.most_bytes:
                self.bytes -= self._held.popitem(last=False)[1][1]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.bytes = 0

    def metrics(self) -> Mapping[str, tuple[str, float]]:
        """What each is, and its value, by name."""
        return {
            "gemsmith_user_side_hits": ("Requests whose user side was kept.", self.hits),
            "gemsmith_user_side_misses": ("Requests whose user side was computed.", self.misses),
            "gemsmith_user_side_bytes": ("Of user sides that are kept.", self.bytes),
            "gemsmith_user_side_age_seconds": ("Of the one that was used last.", self.age),
        }
