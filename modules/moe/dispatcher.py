"""Bringing tokens to their experts and results back to their tokens.

N tokens, k experts each, E experts, D wide. Everything stays on the device: no size depends on the routing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modules.moe.router import Routing


class Permutation(NamedTuple):
    """Selection s = n * k + j is the j-th expert of token n; rows are the selections sorted by expert."""

    order: Tensor  # [N * k] int64: the selection at each row
    inverse: Tensor  # [N * k] int64: the row of each selection


class Dispatcher:
    """Dispatch within one process: every expert is local.

    Replace `MoE.dispatcher` by an object with the same two methods to run the experts elsewhere. What `dispatch`
    returns third is the dispatcher's own and handed back to `combine`.
    """

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Permutation]:
        """x [N, D] to rows [N * k, D] grouped by expert, and ends [E] int32: rows of e are ends[e-1]:ends[e].

        The sort is stable: within an expert rows keep the order of their tokens.
        """
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        top_k = routing.experts.shape[1]
        rows = _Gather.apply(x, order // top_k, inverse.view(-1, top_k))
        return rows, routing.counts.cumsum(0).to(torch.int32), Permutation(order, inverse)

    def combine(self, rows: Tensor, routing: Routing, permutation: Permutation) -> Tensor:
        """Rows [N * k, D] to tokens [N, D]: each token's rows times its mixing weights, summed in their dtype."""
        selections = _Gather.apply(rows, permutation.inverse, permutation.order[:, None])
        weighted = selections.view(*routing.weights.shape, rows.shape[1]) * routing.weights[..., None]
        return weighted.sum(1).to(rows.dtype)


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
