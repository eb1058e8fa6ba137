"""What `modules.ikbo_rewrite` does to a graph before it looks for copies: the same results, and more of them found."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload

from modules.rewrite_graph import Node, key_of, written


def merge_equal(graph: fx.Graph) -> None:
    """Equal calls become one: only then are copies by an owner map that the model computes twice by the same map."""
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
    """Whether calling it again gives the same. A size that data decide is another symbol in every call."""
    target = node.target
    known = target.namespace == "aten" if isinstance(target, OpOverload) else _of_python(target)
    return node.op == "call_function" and known and not node.is_impure() and "unbacked_bindings" not in node.meta


def _of_python(target: Any) -> bool:
    """Whether it is one of Python's operators, which compute sizes and choose among results."""
    return getattr(target, "__module__", None) == "_operator"
