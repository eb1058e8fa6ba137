"""`ikbo_rewrite`: a model that copies requests to their candidates becomes one that does not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram, export
from torch.fx.node import map_arg
from torch.nn.functional import pad

from modules.rewrite.graph import (
    Builder,
    Node,
    Part,
    Rows,
    Split,
    UnchangedError,
    aliases,
    same_size,
    shape_of,
    value_of,
    written,
)
from modules.rewrite.multihead import rows_first
from modules.rewrite.prepare import merge_equal, write_elsewhere
from modules.rewrite.products import PRODUCT_RULES
from modules.rewrite.rules import RESHAPES, ROW_RULES, Rules

aten = torch.ops.aten

# Operators that compute nothing; the report of what is computed leaves them out.
LAYOUT = (
    *RESHAPES,
    *(aten.transpose.int, aten.mT.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.flatten.using_ints, aten.unflatten.int, aten.cat.default, aten.chunk.default, aten.split.Tensor),
    *(aten.split_with_sizes.default, aten.select.int, aten.slice.Tensor, operator.getitem),
)


# Operators that depend on training or evaluation mode, and which of their arguments says so.
MODES = {aten.dropout.default: 2, aten.batch_norm.default: 5}


@dataclass(frozen=True)
class Swap:
    """An operator of the model and what it became; `requests` and `candidates` are its numbers of rows, with ranges."""

    name: str
    before: str
    after: str
    requests: str
    candidates: str


@dataclass(frozen=True)
class Kept:
    """An operator that still takes a copy of a request's rows for each candidate, and why."""

    name: str
    operator: str
    reason: str


@dataclass
class Report:
    """What `ikbo_rewrite` did: broadcasts that it found, operators that it swapped, those that now run at the rows of
    requests, and those that it could not change."""

    broadcasts: list[str] = field(default_factory=list)
    swapped: list[Swap] = field(default_factory=list)
    at_requests: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"broadcasts found: {', '.join(self.broadcasts) or 'none'}"]
        lines += [
            f"swapped {swap.name}: {swap.before} -> {swap.after}, requests {swap.requests}, "
            f"candidates {swap.candidates}"
            for swap in self.swapped
        ]
        lines.append(f"computed at requests: {', '.join(self.at_requests) or 'nothing'}")
        lines += [f"kept {kept.name}: {kept.operator} {kept.reason}" for kept in self.kept]
        return "\n".join(lines)


def ikbo_rewrite(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    owners: Sequence[str] = (),
    max_candidates: int | None = None,
) -> tuple[fx.GraphModule, Report]:
    """(the model without materialised broadcasts, what was changed), for inference and training.

    It finds these copies of a request's rows to its candidates: `x[owner]` and `index_select` with the owner map
    `repeat_interleave(arange(R), counts)`, `repeat_interleave(x, counts)`, `repeat_interleave(x, n)`, and `expand` or
    `repeat` after an `unsqueeze(1)` and before a reshape. What is computed from copies only is computed once a request.
    Where copies meet candidates in a linear layer or a token-mixing product (linear, matmul, einsum) over a
    concatenation, or as keys and values of scaled_dot_product_attention, an operator of `kernels.ikbo` replaces the
    model's. Elsewhere the copy is made, as late as possible.

    Args:
        model: a program of `torch.export.export`, or a module, which is exported with `args`, `kwargs` and
            `dynamic_shapes`. Requests and candidates may be two independent dynamic sizes. nn.MultiheadAttention is
            rewritten only in a module: in a program its rows are no longer the first dimension.
        owners: names of inputs that are owner maps: the request of each candidate, non-decreasing. One that decreases
            is an error in a call on the CPU and a device assertion on a GPU.
        max_candidates: a constant that no request's number of candidates exceeds, for attention. Without it attention
            allows for one request that has all candidates.
    Returns:
        A graph module that shares the model's parameters. Its results differ by rounding: sums are taken in another
        order. It is exported in the model's mode: with dropout or batch norm, a call in the other mode is an error.
    Raises:
        ValueError: a module without example inputs, or an unknown name in `owners`.
    """
    mode = None if isinstance(model, ExportedProgram) else model.training
    if not isinstance(model, ExportedProgram):
        if not args and not kwargs:
            raise ValueError("a module needs example inputs: ikbo_rewrite(model, (user, candidate, offsets))")
        with rows_first(model):
            model = export(model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    module = model.module()
    assert isinstance(module, fx.GraphModule)
    owners = [owners] if isinstance(owners, str) else owners
    inputs = {node.name for node in module.graph.nodes if node.op == "placeholder"}
    if unknown := sorted(set(owners) - inputs):
        raise ValueError(f"owners {unknown} are not inputs of the model; its inputs: {sorted(inputs)}")
    write_elsewhere(module.graph)
    merge_equal(module.graph)
    report = _Rewriter(module.graph, owners, max_candidates, model.range_constraints).run()
    module.training = _hold_mode(module.graph, mode)
    return fx.GraphModule(module, module.graph), report


def _hold_mode(graph: fx.Graph, mode: bool | None) -> bool:
    """The mode, of training if true, in which the graph was exported; its operators tell if `mode` does not.

    Export has fixed it in the operators that depend on it. If there are any, calls in the other mode are refused.
    """
    depend = [node for node in graph.nodes if node.target in MODES and node.args[1] != 0]  # dropout with p = 0 does not
    flags = {node.args[MODES[node.target]] for node in depend}
    if mode is None:
        mode = True in flags or not flags
    if mode in flags:
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            now = graph.create_node("get_attr", "training")
            graph.call_function(_check_mode, (now, mode))
    return mode


def _check_mode(training: bool, exported: bool) -> None:
    if training != exported:
        now, then = ("training" if mode else "evaluation" for mode in (training, exported))
        raise RuntimeError(
            f"a model that was rewritten in {then} mode is called in {now} mode; rewrite it in each mode that it is "
            f"used in, ikbo_rewrite(model.{'train' if training else 'eval'}(), ...)"
        )


def _offsets_of(counts: Tensor) -> Tensor:
    return pad(counts.cumsum(0), (1, 0))


def _offsets_of_owner(owner: Tensor, num_rows: int) -> Tensor:
    in_order = (owner[1:] >= owner[:-1]).all()
    message = "an owner map that owners= of ikbo_rewrite promised to be sorted decreases; sort the candidates by it"
    if owner.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(in_order, message)
    elif not in_order:
        raise ValueError(message)
    return torch.searchsorted(owner, torch.arange(num_rows + 1, device=owner.device, dtype=owner.dtype))


def _uniform_offsets(x: Tensor, count: int) -> Tensor:
    return torch.arange(x.shape[0] + 1, device=x.device) * count


class _Rewriter:
    def __init__(
        self, graph: fx.Graph, owners: Sequence[str], max_candidates: int | None, ranges: Mapping[Any, Any]
    ) -> None:
        self.graph = graph
        self.owners = frozenset(owners)
        self.ranges = ranges
        self.build = Builder(graph)
        self.splits: dict[fx.Node, Split] = {}
        self.rules = Rules(ROW_RULES | PRODUCT_RULES, self.build, self.splits, max_candidates)
        self.report = Report()
        self.written = written(graph)

    def run(self) -> Report:
        for node in list(self.graph.nodes):
            if node.op not in ("call_function", "output"):
                continue
            self.build.position = node
            try:
                found = self.broadcast(node)
            except UnchangedError as reason:
                self.late(node, str(reason))
                continue
            if found is not None:
                self.splits[node] = found
                self.report.broadcasts.append(node.name)
            elif any(x in self.splits for x in node.all_input_nodes):
                self.rewrite(node)
            elif isinstance(node.target, HigherOrderOperator):
                self.late(node, "is a graph of its own (of autocast, no_grad or a branch), which is not looked into")
        # Remove what nothing reads, also operators that draw random numbers, which fx never counts as dead.
        for node in reversed(self.splits):
            if not node.users:
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code(lambda node: node.is_impure() or bool(aliases(node)[1]))
        self.graph.lint()
        return self.report

    def rewrite(self, node: Node) -> None:
        if node.target is aten.sym_size.int:
            self.size(node)
            return
        if node.target is aten._assert_tensor_metadata.default:
            # A check that export inserted: it must not keep a copy alive.
            self.graph.erase_node(node)
            return
        try:
            if node.op == "output":
                raise UnchangedError("is the result")
            self.refuse_written(*node.all_input_nodes)
            # A result that the model writes in place must be new, not one of an earlier call that others read too.
            with self.build.afresh(node in self.written):
                result, operators = self.rules.apply(node)
            if isinstance(result, Split):
                self.refuse_written(node)
        except UnchangedError as reason:
            self.late(node, str(reason))
            return
        if isinstance(result, Split):
            self.splits[node] = result
            if node.target not in LAYOUT:
                self.report.at_requests.append(node.name)
        else:
            self.report.swapped.append(self.swap(node, operators or "expand_rows behind it"))
            node.replace_all_uses_with(result)
            self.graph.erase_node(node)

    def refuse_written(self, *nodes: fx.Node) -> None:
        """Refuse copies of memory that is written: a copy is made later than in the model, perhaps after the write."""
        if not self.written.isdisjoint(nodes):
            raise UnchangedError("shares memory that the model writes in place")

    def size(self, node: Node) -> None:
        """The size of a copy, without keeping the copy alive for it."""
        parts, dim = self.splits[node.args[0]].parts, node.args[1]
        rows = next((part.rows for part in parts if part.rows is not None), None)
        size = self.build.size(parts[0].node, dim) if dim and len(parts) == 1 else rows.total if rows and not dim else 0
        if isinstance(size, fx.Node):
            node.replace_all_uses_with(size)

    def late(self, node: Node, reason: str) -> None:
        """Let `node` read a copy that is made here; the model's own copy if nothing was computed with it."""

        def copied(x: fx.Node) -> fx.Node:
            split = self.splits.get(x)
            return x if split is None or split.original else self.build.materialise(split)

        node.args, node.kwargs = map_arg((node.args, node.kwargs), copied)
        self.report.kept.append(Kept(node.name, _name(node), reason))

    def broadcast(self, node: Node) -> Split | None:
        """The copy of rows that this node makes, or None."""
        match = self.by_index(node) or self.by_counts(node) or self.by_shape(node)
        if match is None:
            return None
        source, rows = match
        self.refuse_written(node, source, *rows.offsets.all_input_nodes)
        outer = self.splits.get(source)
        if outer is None:
            return Split((Part(source, rows),), original=True)
        if outer.single is None or outer.single.rows is None:
            return Split((Part(self.build.materialise(outer), rows),))
        return Split((Part(outer.single.node, self.build.nested(outer.single.rows, rows)),))

    def by_index(self, node: Node) -> tuple[fx.Node, Rows] | None:
        if node.target is aten.index_select.default and node.args[1] == 0:
            source, _, index = node.args
        elif node.target is aten.index.Tensor and len(node.args[1]) == 1:
            source, index = node.args[0], node.args[1][0]
        else:
            return None
        if len(shape_of(index)) != 1 or index.meta["val"].dtype in (torch.bool, torch.uint8):
            return None
        while index.target in (aten.to.dtype, aten.to.device, aten._to_copy.default, aten.clone.default):
            index = index.args[0]
        num_rows = shape_of(source)[0]
        if index.op == "placeholder" and index.name in self.owners:
            offsets = self.offsets(num_rows, _offsets_of_owner, index, self.build.size(source, 0))
            return source, Rows(offsets, self.build.size(index, 0))
        if index.target is aten.repeat_interleave.self_Tensor:
            base, counts = index.args[:2]
            arange = base.target is aten.arange.default and same_size(shape_of(base)[0], num_rows)
            arange = arange and _one_each(counts, num_rows)
        elif index.target is aten.repeat_interleave.Tensor:
            (counts,), arange = index.args, same_size(shape_of(index.args[0])[0], num_rows)
        else:
            arange = False
        if not arange:
            hint = f"; owners=({index.name!r},) if it is sorted" if index.op == "placeholder" else ""
            raise UnchangedError(f"reads rows in an order that is not known{hint}")
        return source, Rows(self.offsets(num_rows, _offsets_of, counts), self.total(index))

    def by_counts(self, node: Node) -> tuple[fx.Node, Rows] | None:
        if node.target not in (aten.repeat_interleave.self_Tensor, aten.repeat_interleave.self_int):
            return None
        source, counts, *dim = node.args
        if not dim or dim[0] is None or dim[0] % len(shape_of(node)) != 0:
            return None
        if node.target is aten.repeat_interleave.self_Tensor:
            if not _one_each(counts, shape_of(source)[0]):
                raise UnchangedError("repeats all rows by one count that is a tensor")
            offsets = self.offsets(shape_of(source)[0], _offsets_of, counts)
            return source, Rows(offsets, self.total(node))
        return self.uniform(source, counts)

    def by_shape(self, node: Node) -> tuple[fx.Node, Rows] | None:
        """unsqueeze(1), expand or repeat along it, then both leading dimensions merged."""
        if node.target not in (*RESHAPES, aten.flatten.using_ints):
            return None
        wide = node.args[0]
        if wide.target is aten.clone.default:
            wide = wide.args[0]
        if wide.target not in (aten.expand.default, aten.repeat.default):
            return None
        narrow = wide.args[0]
        if narrow.target is not aten.unsqueeze.default or narrow.args[1] % len(shape_of(narrow)) != 1:
            return None
        (source, _), merged, shape = narrow.args, shape_of(node), shape_of(wide)
        rows, *rest = shape_of(source)
        if _same_shape(shape, (rows, shape[1], *rest)) and _same_shape(merged[1:], rest):
            return self.uniform(source, 1 if same_size(shape[1], 1) else wide.args[1][1])
        if same_size(shape[1], 1) or _same_shape(merged[:1], shape[:1]):
            # Either rows are not copied, or the copies do not become rows.
            return None
        raise UnchangedError("copies rows, and repeats or merges other dimensions as well")

    def uniform(self, source: fx.Node, count: Any) -> tuple[fx.Node, Rows]:
        total = self.build.call(_product, self.build.size(source, 0), count)
        return source, Rows(self.offsets(shape_of(source)[0], _uniform_offsets, source, count), total, count)

    def offsets(self, num_rows: Any, function: Callable[..., Tensor], *args: Any) -> fx.Node:
        # Running the function on symbolic sizes could add guards, and its result is known anyway.
        like = value_of(args[0]).new_empty(num_rows + 1, dtype=torch.int64)
        return self.build.call(function, *args, like=like)

    def total(self, repeated: Node) -> fx.Node | int:
        """How many rows a repeat_interleave makes: its `output_size`, or the length of an owner map made for this."""
        size = repeated.kwargs.get("output_size")
        if size is not None:
            return size
        counts = repeated.args[1] if len(repeated.args) > 1 else repeated.args[0]
        like = repeated.meta["val"].new_empty(shape_of(repeated)[0], dtype=torch.int64)
        owner = self.build.call(aten.repeat_interleave.Tensor, counts, like=like)
        return self.build.size(owner, 0)

    def swap(self, node: Node, operators: str) -> Swap:
        parts = [part for x in node.all_input_nodes if x in self.splits for part in self.splits[x].parts]
        requests = shape_of(next(part.rows.offsets for part in parts if part.rows is not None))[0] - 1
        return Swap(node.name, _name(node), operators, self.ranged(requests), self.ranged(shape_of(node)[0]))

    def ranged(self, size: Any) -> str:
        """A size with the range that export allows for it."""
        if isinstance(size, int):
            return str(size)
        limits = self.ranges.get(size.node.expr)
        return f"{size}" if limits is None else f"{size} in {limits.lower}..{limits.upper}"


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def _one_each(counts: fx.Node, num_rows: Any) -> bool:
    """Whether every row has its own count; a single count would apply to all rows."""
    return _same_shape(shape_of(counts), (num_rows,))


def _product(a: int, b: int) -> int:
    return a * b


def _name(node: Node) -> str:
    return node.target.__name__ if callable(node.target) else str(node.target)
