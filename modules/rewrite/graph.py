"""What `modules.ikbo_rewrite` knows about a value of a graph: which parts of it are copies of a request's rows.

A value is a `Split` when every row belongs to a candidate and it is the concatenation, along one dimension, of parts of
which some are the same for all candidates of a request. Those parts exist at their own rows in the graph as well, and a
rule computes with them there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch.fx.node import map_aggregate, map_arg

from kernels.ikbo import expand_rows, nested_offsets

aten = torch.ops.aten

# Operators whose result may share memory with their first argument, though their schema does not say so.
UNANNOTATED = (operator.getitem, aten._unsafe_view.default, aten.dropout.default, aten.einsum.default)

Node = Any
"""A torch.fx.Node whose arguments are read: fx declares their type too widely to be useful."""


@dataclass(frozen=True)
class Rows:
    """Which row a candidate reads: offsets [R + 1] of the candidates of each row, how many candidates there are, and an
    upper bound of their number in a row (None: not known). The offsets determine the other two."""

    offsets: fx.Node
    total: fx.Node | int = field(compare=False)
    most: fx.Node | int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Part:
    """A value at candidate rows (`rows` None) or at the rows that candidates read it from."""

    node: fx.Node
    rows: Rows | None


@dataclass(frozen=True)
class Split:
    """The parts, broadcast to candidates and concatenated along `dim`, which is not 0; with one part `dim` is unused.

    `original` is the graph's own node for the broadcast value, as long as nothing was computed with the parts.
    """

    parts: tuple[Part, ...]
    dim: int = 1
    original: bool = False

    @property
    def single(self) -> Part | None:
        return self.parts[0] if len(self.parts) == 1 else None


class UnchangedError(Exception):
    """Why a rule leaves an operator as it is."""


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or expression, decided without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return a.node.expr == b.node.expr
    return False


def value_of(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def shape_of(argument: Any) -> tuple[Any, ...]:
    value = value_of(argument)
    if not isinstance(value, Tensor):
        raise UnchangedError(f"takes {argument}, which is no tensor")
    return tuple(value.shape)


def written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory an operator writes in place, directly or through a view."""
    memory: dict[fx.Node, list[fx.Node]] = {}  # the nodes that share its memory; all of them refer to the same list
    targets: list[fx.Node] = []
    for node in graph.nodes:
        shared = memory[node] = [node]
        views, writes = aliases(node)
        for x in views:
            if memory[x] is not shared:
                shared += memory[x]
                memory.update(dict.fromkeys(memory[x], shared))
        targets += writes
    return {node for target in targets for node in memory[target]}


def aliases(node: Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Arguments with which the node's result may share memory, and those that the node writes."""
    inputs = node.all_input_nodes
    if isinstance(node.target, HigherOrderOperator):
        modules = dict(node.graph.owning_module.named_modules())
        graphs = [modules[x.target].graph for x in inputs if x.op == "get_attr" and x.target in modules]
        return inputs, inputs if any(aliases(inner)[1] for graph in graphs for inner in graph.nodes) else []
    if node.target in UNANNOTATED:
        return inputs, []
    shared: list[fx.Node] = []
    writes: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            map_arg(value, shared.append)
            if argument.alias_info.is_write:
                map_arg(value, writes.append)
    return shared, writes


def normal_dim(node: Any, dim: int) -> int:
    return dim % len(shape_of(node))


def key_of(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A key that equal calls share: lists become hashable, and 2 is not 2.0."""
    return target, map_aggregate((args, tuple(sorted(kwargs.items()))), _typed)


def _typed(x: Any) -> Any:
    return type(x), x


class Builder:
    """Adds nodes with their shapes to a graph, before the node that is being rewritten."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.position: fx.Node | None = None
        values = [node.meta.get("val") for node in graph.nodes]
        self.fake_mode = detect_fake_mode([value for value in values if isinstance(value, Tensor)])
        self._known: dict[Any, fx.Node] = {}

    def call(self, target: Callable[..., Any], *args: Any, like: Any = None, **kwargs: Any) -> fx.Node:
        """A call. Its shapes come from running it on the shapes of its arguments, or from the value `like` if given."""
        assert self.position is not None
        key = key_of(target, args, kwargs)
        if key in self._known:
            return self._known[key]
        with self.graph.inserting_before(self.position):
            node = self.graph.call_function(target, args, kwargs)
        if like is None:
            with self.fake_mode or nullcontext(), torch.no_grad():
                like = target(*map_arg(args, value_of), **map_arg(kwargs, value_of))
        node.meta["val"] = like
        self._known[key] = node
        return node

    @contextmanager
    def afresh(self, wanted: bool) -> Iterator[None]:
        """A context in which, if `wanted`, calls are neither replaced by equal earlier ones nor reused later."""
        known = self._known
        if wanted:
            self._known = {}
        try:
            yield
        finally:
            self._known = known

    def size(self, node: fx.Node, dim: int) -> fx.Node | int:
        size = shape_of(node)[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, node, dim, like=size)

    def cat(self, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
        return nodes[0] if len(nodes) == 1 else self.call(aten.cat.default, list(nodes), dim)

    def columns(self, weight: fx.Node, dim: int, ranges: Sequence[tuple[int, int]]) -> fx.Node:
        """The given ranges of a weight's dimension, concatenated."""
        return self.cat([self.call(aten.slice.Tensor, weight, dim, a, b) for a, b in ranges], dim)

    def expand(self, part: Part) -> fx.Node:
        if part.rows is None:
            return part.node
        total = part.rows.total
        like = part.node.meta["val"].new_empty(value_of(total), *shape_of(part.node)[1:])
        return self.call(expand_rows, part.node, part.rows.offsets, total, like=like)

    def materialise(self, split: Split) -> fx.Node:
        return self.cat([self.expand(part) for part in split.parts], split.dim)

    def nested(self, outer: Rows, inner: Rows) -> Rows:
        offsets = self.call(nested_offsets, outer.offsets, inner.offsets, like=outer.offsets.meta["val"])
        return Rows(offsets, inner.total)

    def groups(self, split: Split) -> dict[Rows | None, tuple[fx.Node, list[tuple[int, int]]]]:
        """For each kind of rows: its parts concatenated, and which ranges of the dimension they are."""
        members: dict[Rows | None, list[tuple[fx.Node, tuple[int, int]]]] = {}
        start = 0
        for part in split.parts:
            width = shape_of(part.node)[split.dim]
            if not isinstance(width, int):
                raise UnchangedError(f"concatenates parts of sizes that are not constant ({width})")
            members.setdefault(part.rows, []).append((part.node, (start, start + width)))
            start += width
        return {
            rows: (self.cat([node for node, _ in pieces], split.dim), [columns for _, columns in pieces])
            for rows, pieces in members.items()
        }
