"""What `modules.ikbo_rewrite` does to a graph before it looks for copies, to find more of them with equal results."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from modules.rewrite.graph import Node, aliases, key_of, value_of, written

aten = torch.ops.aten

ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "elu", "hardtanh", "clamp", "dropout")
# Operators that write their first argument, and the same operators without the write.
OUT_OF_PLACE = {getattr(aten, f"{name}_").default: getattr(aten, name).default for name in ACTIVATIONS} | {
    getattr(aten, f"{name}_").Tensor: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")
}


def write_elsewhere(graph: fx.Graph) -> None:
    """Replace writes into memory that nothing else reads by operators that return a new result."""
    for node in graph.nodes:
        target = OUT_OF_PLACE.get(node.target)
        if target is not None and _unshared(node.args[0]) and _of_one_dtype(node):
            node.target = target


def _unshared(node: Node) -> bool:
    """Whether nothing but its one user reads its memory, which it may share with its argument (a view, or dropout)."""
    return node.op == "call_function" and len(node.users) == 1 and all(map(_unshared, aliases(node)[0]))


def _of_one_dtype(node: Node) -> bool:
    """Whether all operands have one dtype: a write keeps that of its target, a new result could have another."""
    dtypes = {value.dtype for value in map(value_of, (node, *node.all_input_nodes)) if isinstance(value, torch.Tensor)}
    return len(dtypes) == 1


def merge_equal(graph: fx.Graph) -> None:
    """Make equal calls one, so that copies by an owner map that the model computes twice are copies by the same map."""
    changing = written(graph)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _pure(node) or not changing.isdisjoint((node, *node.all_input_nodes)):
            continue
        first = known.setdefault(key_of(node.target, node.args, node.kwargs), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _pure(node: Node) -> bool:
    """Whether a second call gives the same result. A size that depends on data is a new symbol in every call."""
    target = node.target
    known = target.namespace == "aten" if isinstance(target, OpOverload) else _of_python(target)
    return node.op == "call_function" and known and not node.is_impure() and "unbacked_bindings" not in node.meta


def _of_python(target: Any) -> bool:
    """Whether it is an operator of Python's, such as those that compute sizes or select one of several results."""
    return getattr(target, "__module__", None) == "_operator"
