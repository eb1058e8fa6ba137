"""Routed SwiGLU experts in plain PyTorch: the specification of a fused backend.

N tokens of width D, k experts each, E experts of hidden width F. A selection s = n * k + j is the j-th expert of token
n. `experts` works on the selections sorted by expert, one after another:

    h = x W_gate_up^T,   y = silu(h[:F]) * h[F:],   o = y W_down^T,   out_n = sum_j weights[n, j] o[row of (n, j)]

in which the two products are those of `kernels.mxfp8.grouped_mm` with the same recipe. A fused backend may give every
expert whole multiples of 128 rows (`permutation`), so that no quantised group holds rows of two experts, and may move
the weights: d weights[n, j] = <dout_n W_down, y>, and W_down's gradient takes weights[n, j] * y in place of
weights[n, j] * dout_n, which is the same product up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.mxfp8 import grouped_mm

ROWS = 128
"""Experts begin at multiples of this many rows in a `Permutation`: the longest group of elements with one scale."""
NEIGHBOURS = 4
"""Tiles of ROWS rows that stay together in the order of a `Permutation`, so that writes are long."""


class Permutation(NamedTuple):
    """Rows in expert order, each expert's padded to a multiple of ROWS; rows after the last end are undefined."""

    rows: Tensor  # [N, k] int32: the row of each selection
    selections: Tensor  # [capacity] int32: the selection at each row, -1 for padding
    ends: Tensor  # [E] int32: cumulative ends of the padded groups
    # [capacity / ROWS] int32: tiles of ROWS rows, NEIGHBOURS at a time, in the order of their first tokens. Gathering
    # in this order finds tokens that several experts take in the cache.
    order: Tensor


def capacity_of(num_selections: int, num_experts: int) -> int:
    """The number of rows that suffices for any division of the selections into groups padded to multiples of ROWS."""
    # `min` would specialise a traced graph to batches with more selections than experts.
    return (num_selections + torch.sym_min(num_experts, num_selections) * (ROWS - 1)) // ROWS * ROWS


def permutation(selected_experts: Tensor, num_experts: int) -> Permutation:
    """Of selected_experts [N, k], 0..num_experts - 1, integers. The sort is stable; no size depends on the routing."""
    flat = selected_experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    padded = -(-counts // ROWS) * ROWS
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    row = torch.arange(flat.numel(), device=flat.device) + shift[flat[order]]
    selections = flat.new_full((capacity_of(flat.numel(), num_experts),), -1).scatter_(0, row, order)
    rows = torch.empty_like(order).scatter_(0, order, row)
    order = _tile_order(selections // selected_experts.shape[1], padded.sum())
    return Permutation(rows.view(selected_experts.shape).int(), selections.int(), padded.cumsum(0).int(), order)


def _tile_order(tokens: Tensor, end: Tensor) -> Tensor:
    """The order of tiles for tokens [capacity] at the rows; those from `end` on are undefined."""
    count = tokens.shape[0] // ROWS
    first = torch.arange(0, count, NEIGHBOURS, device=tokens.device)
    # Tiles after the end come last, and a group of fewer than NEIGHBOURS tiles at the very end.
    live = (first * ROWS < end) & (first + NEIGHBOURS <= count)
    order = tokens[first * ROWS].masked_fill(~live, torch.iinfo(torch.int64).max).argsort(stable=True)
    tiles = first[order, None] + torch.arange(NEIGHBOURS, device=tokens.device)
    return tiles.flatten()[:count].int()


class Order(NamedTuple):
    """Selections sorted by expert, without padding."""

    order: Tensor  # [N * k] int64: the selection at each row
    inverse: Tensor  # [N * k] int64: the row of each selection


def gather(x: Tensor, selected_experts: Tensor) -> tuple[Tensor, Order]:
    """x [N, D] -> rows [N * k, D] sorted by selected_experts [N, k]; those of an expert keep their tokens' order."""
    order = selected_experts.flatten().argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    top_k = selected_experts.shape[1]
    return _Gather.apply(x, order // top_k, inverse.view(-1, top_k)), Order(order, inverse)


def combine(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """rows [N * k, D] -> [N, D]: each token's rows times its weights [N, k], summed in their dtype."""
    selections = _Gather.apply(rows, order.inverse, order.order[:, None])
    weighted = selections.view(*weights.shape, rows.shape[1]) * weights[..., None]
    return weighted.sum(1).to(rows.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] to [..., F]: silu(first half) * second half (arXiv 2002.05202); computed in fp32, then rounded."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def experts(x: Tensor, selected_experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, recipe: str) -> Tensor:
    """See `kernels.moe.experts`."""
    rows, order = gather(x, selected_experts)
    # bincount would sync with the host. Integer atomics commute, so this scatter is deterministic.
    flat = selected_experts.flatten()
    ends = flat.new_zeros(gate_up.shape[0]).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)
    hidden = swiglu(grouped_mm(rows, gate_up, ends, recipe=recipe))
    return combine(grouped_mm(hidden, down, ends, recipe=recipe), weights, order)


class _Gather(torch.autograd.Function):
    """values [M, D] at index [L], where places [M, r] lists the r positions that each row of values was gathered to.

    Knowing them turns the gradient into a gather and a sum over r, in fixed order. Autograd's own backward of indexing
    scatters with float atomics on a GPU, which is neither deterministic nor fast.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places.flatten()).view(*places.shape, grad.shape[1]).sum(1), None, None


def top_k(scores: Tensor, k: int) -> Tensor:
    return scores.topk(k, dim=-1).indices
