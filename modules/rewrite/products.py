"""Rules of `modules.ikbo_rewrite` for products: linear layers, token mixing and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from kernels.ikbo import linear_compression, target_attention
from modules.rewrite.graph import Node, Part, Rows, Split, UnchangedError, same_size, shape_of
from modules.rewrite.rules import Rule, Rules

aten = torch.ops.aten


def _linear(rules: Rules, node: Node) -> Split | fx.Node:
    x, weight, *bias = node.args
    rules.only(weight, *bias)
    split, build = rules.splits[x], rules.build
    last = len(shape_of(x)) - 1
    if split.single is not None or split.dim != last:
        return rules.each(node, split, split.dim)
    if last == 2:
        mixed = build.call(aten.transpose.int, _compressed(rules, split, weight, transposed=True), 1, 2)
        return build.call(aten.add.Tensor, mixed, bias[0]) if bias and bias[0] is not None else mixed
    groups = build.groups(split)
    biased = next(iter(groups)) if None not in groups else None
    return rules.sum(
        {
            rows: build.call(
                aten.linear.default, value, build.columns(weight, 1, columns), *(bias if rows == biased else ())
            )
            for rows, (value, columns) in groups.items()
        }
    )


def _compressed(rules: Rules, split: Split, weight: fx.Node, transposed: bool = False) -> fx.Node:
    """W X [C, m, d] for X [C, n, d] split along n (or `transposed`, [C, d, n]), W [m, n]."""
    build = rules.build
    groups = {
        rows: (build.call(aten.transpose.int, value, 1, 2) if transposed else value, columns)
        for rows, (value, columns) in build.groups(split).items()
    }
    shared = [(rows, *group) for rows, group in groups.items() if rows is not None]
    terms: dict[Rows | None, fx.Node] = {}
    if None in groups:
        (rows, value, columns), *shared = shared
        own, own_columns = groups[None]
        weights = (build.columns(weight, 1, own_columns), build.columns(weight, 1, columns))
        like = own.meta["val"].new_empty(shape_of(own)[0], shape_of(weight)[0], shape_of(own)[2])
        terms[None] = rules.operator(
            "linear_compression", linear_compression, own, value, *weights, rows.offsets, like=like
        )
    for rows, value, columns in shared:
        terms[rows] = build.call(aten.matmul.default, build.columns(weight, 1, columns), value)
    return rules.sum(terms)


def _matmul(rules: Rules, node: Node) -> Split | fx.Node:
    a, b = node.args
    rules.only(*(x for x in (a, b) if x in rules.splits and len({a, b} & set(rules.splits)) == 2))
    if b in rules.splits:
        split, shape = rules.splits[b], shape_of(a)
        if len(shape) == 3 and same_size(shape[0], 1):
            a, shape = rules.build.call(aten.select.int, a, 0, 0), shape[1:]
        if len(shape) != 2 or len(shape_of(b)) != 3:
            raise UnchangedError("multiplies a request's value with a candidate's")
        if split.single is not None:
            part = Part(rules.build.call(aten.matmul.default, a, split.parts[0].node), split.parts[0].rows)
            return Split((part,))
        return _compressed(rules, split, a) if split.dim == 1 else rules.each(node, split, 2)
    split, shape = rules.splits[a], shape_of(b)
    if len(shape) != 2:
        raise UnchangedError("multiplies a request's value with a candidate's")
    last = len(shape_of(a)) - 1
    if split.single is not None or split.dim != last:
        return rules.each(node, split, split.dim)
    return rules.sum(
        {
            rows: rules.build.call(aten.matmul.default, value, rules.build.columns(b, 0, columns))
            for rows, (value, columns) in rules.build.groups(split).items()
        }
    )


def _einsum(rules: Rules, node: Node) -> Split | fx.Node:
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    inputs, _, output = equation.partition("->")
    names = inputs.split(",")
    if len(names) != 2 or not output:
        raise UnchangedError(f"einsum {equation!r} is not a product of a weight and tokens")
    (weight_names, weight), (x_names, x) = zip(names, operands, strict=True)
    if weight in rules.splits:
        (weight_names, weight), (x_names, x) = (x_names, x), (weight_names, weight)
    rules.only(weight)
    row, token, feature = x_names if len(x_names) == 3 else ("", "", "")
    mixed = output.replace(row, "").replace(feature, "")
    distinct = all(len(set(some)) == len(some) for some in (weight_names, x_names))
    if not distinct or len(weight_names) != 2 or set(weight_names) != {token, mixed} or output != row + mixed + feature:
        raise UnchangedError(f"einsum {equation!r} is not a product of a weight and tokens")
    if weight_names == token + mixed:
        weight = rules.build.call(aten.transpose.int, weight, 0, 1)
    split = rules.splits[x]
    if split.single is not None:
        part = split.parts[0]
        return Split((Part(rules.build.call(aten.matmul.default, weight, part.node), part.rows),))
    if split.dim != 1:
        raise UnchangedError("mixes tokens whose features are split")
    return _compressed(rules, split, weight)


def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, most: int | None, scale: float | None) -> Tensor:
    """scaled_dot_product_attention of q [C, H, S, d] over k and v [R, Hkv, T, d] of the request of each candidate."""
    length = k.shape[2]
    k_offsets = torch.arange(k.shape[0] + 1, device=k.device, dtype=offsets.dtype) * length
    out = target_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).flatten(0, 1),
        v.transpose(1, 2).flatten(0, 1),
        offsets,
        k_offsets,
        max_candidates=q.shape[0] if most is None else most,
        max_k=length,
        score_scale=scale,
    )
    return out.transpose(1, 2)


def _attention(rules: Rules, node: Node) -> Split | fx.Node:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    query, key, value = (rules.splits.get(given[name]) for name in names[:3])
    if given.get("attn_mask") is not None or given.get("is_causal") or given.get("dropout_p"):
        raise UnchangedError("attends with a mask or dropout, which the operator does not have")
    if key is None or value is None or key.single is None or value.single is None:
        raise UnchangedError("attends to keys or values that are not one request's")
    rows = key.single.rows
    if rows is None or rows != value.single.rows:
        raise UnchangedError("attends to keys and values of different requests")
    if query is not None and query.single is not None and query.single.rows == rows:
        return Split((rules.on_part(node, 0),))
    q = given["query"] if query is None else rules.build.materialise(query)
    shapes = [shape_of(x) for x in (q, given["key"], given["value"])]
    if any(len(shape) != 4 for shape in shapes):
        raise UnchangedError("attends without a dimension of heads")
    if not all(map(same_size, shapes[0][:3], shape_of(node)[:3])):
        raise UnchangedError("attends with one query for all candidates or all heads")
    most = rules.max_candidates if rows.most is None else rows.most
    arguments = (q, key.single.node, value.single.node, rows.offsets, most, given.get("scale"))
    return rules.operator("target_attention", attend, *arguments, like=node.meta["val"])


PRODUCT_RULES: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.einsum.default: _einsum,
    aten.scaled_dot_product_attention.default: _attention,
}
