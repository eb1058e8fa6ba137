"""Rules of `modules.ikbo_rewrite`: what each operator makes of values whose parts belong to requests.

A rule gets a node of which at least one argument is a `Split`. It returns the result's `Split` (computed at requests,
still to be broadcast), or a node that replaces it (an operator that broadcasts inside), or raises `UnchangedError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from kernels.jagged import jagged_dense_elementwise
from modules.rewrite.graph import (
    Builder,
    Node,
    Part,
    Rows,
    Split,
    UnchangedError,
    normal_dim,
    same_size,
    shape_of,
    value_of,
)

aten = torch.ops.aten
ADDED = "jagged_dense_elementwise"
Splits = Mapping[fx.Node, Split]
Rule = Callable[["Rules", fx.Node], "Split | fx.Node"]

# Elementwise operators of one tensor.
UNARY = (
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default,
    aten.exp.default, aten.sqrt.default, aten.rsqrt.default, aten.abs.default, aten.pow.Tensor_Scalar,
    aten.leaky_relu.default, aten.softplus.default, aten.elu.default, aten.clamp.default, aten.hardtanh.default,
    aten.clone.default, aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.square.default,
    aten.mul.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.div.Scalar,
)  # fmt: skip
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# Operators that work row by row, and which argument names the dimensions, which must not include that of rows.
ALONG: dict[Any, tuple[int, ...]] = {
    aten.softmax.int: (1,),
    aten.log_softmax.int: (1,),
    aten.select.int: (1,),
    aten.slice.Tensor: (1,),
    aten.squeeze.dim: (1,),
    aten.chunk.default: (2,),
    aten.split.Tensor: (2,),
    aten.split_with_sizes.default: (2,),
    aten.unflatten.int: (1,),
    aten.flatten.using_ints: (1,),
    aten.transpose.int: (1, 2),
    aten.mean.dim: (1,),
    aten.sum.dim_IntList: (1,),
}


class Rules:
    """The rules with what they share: the graph under construction and what is known about its nodes."""

    def __init__(self, table: Mapping[Any, Rule], build: Builder, splits: Splits, max_candidates: int | None) -> None:
        self.table = table
        self.build = build
        self.splits = splits
        self.max_candidates = max_candidates
        self.used: list[str] = []

    def apply(self, node: Node) -> tuple[Split | fx.Node, str]:
        """The rule's result, and the operators that broadcast inside it."""
        rule = self.table.get(node.target)
        if rule is None:
            raise UnchangedError("has no rule")
        self.used = []
        return rule(self, node), " and ".join(dict.fromkeys(self.used))

    def operator(self, name: str, target: Callable[..., Any], *args: Any, like: Any) -> fx.Node:
        """A call of an operator that broadcasts inside."""
        self.used.append(name)
        return self.build.call(target, *args, like=like)

    def sum(self, terms: Mapping[Rows | None, fx.Node]) -> fx.Node:
        """The sum, at candidates, of terms that have the same shape except for their rows."""
        total = terms.get(None)
        for rows, term in terms.items():
            if rows is None:
                continue
            if total is None:
                total = self.build.expand(Part(term, rows))
            else:
                total = self.operator(
                    ADDED, jagged_dense_elementwise, total, rows.offsets, term, like=total.meta["val"]
                )
        assert total is not None
        return total

    def only(self, *arguments: Any) -> None:
        """UnchangedError if any of these arguments is split."""
        if any(isinstance(argument, fx.Node) and argument in self.splits for argument in arguments):
            raise UnchangedError("combines two values that depend on requests")

    def on_part(self, node: Node, index: int) -> Part:
        """The node's operator on one part, in which sizes that count candidates become the part's number of rows."""
        inputs = {x: self.splits[x].parts[index] for x in node.all_input_nodes if x in self.splits}
        first = next(iter(inputs.values()))
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: inputs[x].node if x in inputs else x)
        if node.target in RESHAPES:
            self.keeps_rows(node)
            # A view of a copy may not be possible on what was copied: reshape instead.
            shape = [self.build.size(first.node, 0), *args[1][1:]]
            return Part(self.build.call(aten.reshape.default, args[0], shape), first.rows)
        return Part(self.build.call(node.target, *args, **kwargs), first.rows)

    def keeps_rows(self, reshape: Node) -> None:
        """UnchangedError unless the first dimension remains that of candidates."""
        if not same_size(shape_of(reshape)[0], shape_of(reshape.args[0])[0]):
            raise UnchangedError("merges or splits the rows of candidates")

    def each(self, node: Node, split: Split, dim: int) -> Split:
        """The operator on every part separately."""
        return Split(tuple(self.on_part(node, index) for index in range(len(split.parts))), dim)


def _unary(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    rules.only(*node.args[1:])
    return rules.each(node, split, split.dim)


def _dropout(rules: Rules, node: Node) -> Split:
    _, probability, training = node.args
    if probability and training:
        raise UnchangedError("draws a mask for every candidate; export the model in eval mode to drop nothing")
    return _unary(rules, node)


def _binary(rules: Rules, node: Node) -> Split | fx.Node:
    """An operator of a split value and one that is the same for all rows, or one of the same requests."""
    operands = node.args[:2]
    split = [rules.splits[x] for x in operands if isinstance(x, fx.Node) and x in rules.splits]
    result = shape_of(node)
    if len(split) == 2:
        one, other = (x.single for x in split)
        if one is None or other is None or one.rows != other.rows or one.rows is None:
            raise UnchangedError("combines values whose parts do not match")
        if any(len(shape_of(part.node)) != len(result) for part in (one, other)):
            raise UnchangedError("combines values of different numbers of dimensions")
        return Split((rules.on_part(node, 0),))
    (value,) = split
    plain = next(x for x in operands if not (isinstance(x, fx.Node) and x in rules.splits))
    shape = shape_of(plain) if isinstance(plain, fx.Node) and isinstance(plain.meta.get("val"), Tensor) else ()
    if len(shape_of(value.parts[0].node)) != len(result) or len(shape) > len(result):
        raise UnchangedError("combines values of different numbers of dimensions")
    aligned = (1,) * (len(result) - len(shape)) + tuple(shape)
    if not same_size(aligned[0], 1):
        return _elementwise(rules, node, value, plain)
    if value.single is None and not same_size(aligned[value.dim], 1):
        raise UnchangedError("combines parts with a tensor that differs along them")
    return rules.each(node, value, value.dim)


def _elementwise(rules: Rules, node: Node, value: Split, plain: Node) -> fx.Node:
    """The sum or product of a request's value and a candidate's of the same shape."""
    op = {aten.add.Tensor: "add", aten.mul.Tensor: "mul"}.get(node.target)
    part, result = value.single, node.meta["val"]
    if part is None or part.rows is None or op is None or node.kwargs:
        raise UnchangedError("combines a request's value with a candidate's element by element")
    operands = (plain.meta["val"], part.node.meta["val"])
    if any(x.dtype is not result.dtype or not all(map(same_size, x.shape[1:], result.shape[1:])) for x in operands):
        raise UnchangedError("combines a request's value with a candidate's of another shape or dtype")
    return rules.operator(ADDED, jagged_dense_elementwise, plain, part.rows.offsets, part.node, op, like=result)


def _along(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    rank = len(shape_of(split.parts[0].node))
    given = [node.args[i] if i < len(node.args) else None for i in ALONG[node.target]]
    dims = {d % rank for x in given for d in (x if isinstance(x, (list, tuple)) else [0 if x is None else x])}
    if node.target is aten.flatten.using_ints:
        end = node.args[2] if len(node.args) > 2 else -1
        dims |= set(range(min(dims), end % rank + 1))
    if 0 in dims or not dims:
        raise UnchangedError("works along the rows of candidates")
    if split.single is not None:
        return rules.each(node, split, 1)
    if node.target is aten.transpose.int and split.dim in dims:
        return rules.each(node, split, next(iter(dims - {split.dim})))
    if node.target is aten.flatten.using_ints and min(dims) == split.dim:
        return rules.each(node, split, split.dim)
    reduced = node.target in (
        *(aten.mean.dim, aten.sum.dim_IntList, aten.select.int, aten.squeeze.dim, aten.flatten.using_ints),
    )
    if split.dim in dims or node.target is aten.unflatten.int or (reduced and min(dims) < split.dim):
        raise UnchangedError("works along parts of which some depend on requests and some on candidates")
    return rules.each(node, split, split.dim)


def _getitem(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    return rules.each(node, split, split.dim)


def _mt(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    rank = len(shape_of(split.parts[0].node))
    if rank < 3:
        raise UnchangedError("transposes the rows of candidates")
    swap = {rank - 1: rank - 2, rank - 2: rank - 1}
    return rules.each(node, split, swap.get(split.dim, split.dim))


def _permute(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    order = [d % len(node.args[1]) for d in node.args[1]]
    if order[0] != 0:
        raise UnchangedError("permutes the rows of candidates")
    return rules.each(node, split, 1 if split.single is not None else order.index(split.dim))


def _unsqueeze(rules: Rules, node: Node) -> Split:
    split, dim = rules.splits[node.args[0]], node.args[1] % (len(shape_of(node)))
    if dim == 0:
        raise UnchangedError("puts a dimension before the rows of candidates")
    return rules.each(node, split, split.dim + (dim <= split.dim))


def _reshape(rules: Rules, node: Node) -> Split:
    split = rules.splits[node.args[0]]
    if split.single is not None:
        return rules.each(node, split, 1)
    rules.keeps_rows(node)
    # [C, n, ...] -> [C, n * ...] is a concatenation of each part's rows.
    if split.dim == 1 and len(shape_of(node)) == 2:
        parts = tuple(Part(rules.build.call(aten.flatten.using_ints, part.node, 1), part.rows) for part in split.parts)
        return Split(parts, 1)
    raise UnchangedError("reshapes parts of which some depend on requests and some on candidates")


def _norm(rules: Rules, node: Node) -> Split:
    split, rank = rules.splits[node.args[0]], len(shape_of(node))
    if len(node.args[1]) >= rank or (split.single is None and split.dim >= rank - len(node.args[1])):
        raise UnchangedError("normalises over parts of which some depend on requests and some on candidates")
    return rules.each(node, split, split.dim)


def _cat(rules: Rules, node: Node) -> Split:
    dim = normal_dim(node, node.args[1] if len(node.args) > 1 else 0)
    if dim == 0:
        raise UnchangedError("concatenates rows")
    parts: list[Part] = []
    for value in node.args[0]:
        split = rules.splits.get(value)
        if split is None:
            parts.append(Part(value, None))
        elif split.single is not None or split.dim == dim:
            parts += split.parts
        else:
            parts.append(Part(rules.build.materialise(split), None))
    dtype = value_of(node).dtype
    merged: list[Part] = []
    for part in parts:
        if value_of(part.node).dtype is not dtype:
            part = Part(rules.build.call(aten.to.dtype, part.node, dtype), part.rows)
        if merged and merged[-1].rows == part.rows:
            merged[-1] = Part(rules.build.cat([merged[-1].node, part.node], dim), part.rows)
        else:
            merged.append(part)
    return Split(tuple(merged), dim)


ROW_RULES: dict[Any, Rule] = (
    dict.fromkeys(UNARY, _unary)
    | dict.fromkeys(BINARY, _binary)
    | dict.fromkeys(ALONG, _along)
    | dict.fromkeys(RESHAPES, _reshape)
    | {
        aten.dropout.default: _dropout,
        aten.mT.default: _mt,
        aten.permute.default: _permute,
        aten.unsqueeze.default: _unsqueeze,
        aten.layer_norm.default: _norm,
        aten.rms_norm.default: _norm,
        aten.cat.default: _cat,
        operator.getitem: _getitem,
    }
)
