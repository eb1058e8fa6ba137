"""Experts on several ranks: tokens travel to their experts and back.

R ranks share the E experts of a layer: rank r has experts r * L to (r + 1) * L, L = E / R. A rank has N tokens, k
experts each, D wide; each rank has another N, which may be 0. A `mix` around the experts of a rank does what the one
operator does for a layer whose experts are all here, so the two have the same gradients. On a group of one rank the
same code runs, and nothing is sent.

Gradients of the experts are sums over the tokens of all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import moe
from modules.moe.router import Routing

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [M, D], selected [M, j] int64 in 0..L - 1, weights [M, j] -> [M, D], the weighted sum over the selected ones."""


class AllToAll:
    """Each selection of a token travels as a row to the rank of its expert and back: 2 N k D numbers a layer.

    The sizes of what is sent depend on the routing. They are exchanged on the device, and read by the host once.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def mix(self, x: Tensor, routing: Routing, experts: LocalExperts) -> Tensor:
        """x [N, D] through the experts of its routing on all ranks -> [N, D] in autocast's dtype, else in that of x."""
        rows, order = moe.gather(_for_products(x), routing.selected_experts)
        sent = routing.counts.view(self.group.size(), -1)  # [R, L]: rows for each expert of each rank
        received = torch.empty_like(sent)  # [R, L]: rows from each rank for each expert of this one
        dist.all_to_all_single(received, sent, group=self.group)
        out, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        given = _Exchange.apply(rows, back, out, self.group)
        own = torch.arange(received.shape[1], device=x.device).repeat(received.shape[0])
        selected = own.repeat_interleave(received.flatten(), output_size=sum(back))[:, None]
        mixed = experts(given, selected, torch.ones_like(selected, dtype=routing.weights.dtype))
        return moe.combine(_Exchange.apply(mixed, out, back, self.group), routing.weights, order)


class AllGather:
    """For layers where every token sees every expert (k = E): every rank gets all tokens of the group, and the sum of
    what the experts of all ranks make of a token returns to its rank. 2 N (R - 1) D numbers a layer, instead of E / R
    times as many.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def mix(self, x: Tensor, routing: Routing, experts: LocalExperts) -> Tensor:
        """As `AllToAll.mix`. ValueError unless each token selects all experts."""
        top_k, total, ranks = routing.selected_experts.shape[1], routing.scores.shape[1], self.group.size()
        if top_k != total:
            raise ValueError(f"AllGather needs tokens that go to all {total} experts, got top_k={top_k}; use AllToAll")
        count = torch.full((ranks,), x.shape[0], device=x.device)
        counts = torch.empty_like(count)
        dist.all_to_all_single(counts, count, group=self.group)
        received, local = counts.tolist(), total // ranks
        sent = [x.shape[0]] * ranks
        everyone = _for_products(x).repeat(ranks, 1)
        gathered = _Exchange.apply(everyone, received, sent, self.group)
        # Of each token's weights, in order of the experts, each rank gets those of its own experts.
        in_order = torch.empty_like(routing.weights).scatter(1, routing.selected_experts, routing.weights)
        weights = _Exchange.apply(
            in_order.unflatten(1, (ranks, local)).transpose(0, 1).flatten(0, 1), received, sent, self.group
        )
        selected = torch.arange(local, device=x.device).expand(gathered.shape[0], -1)
        partial = _Exchange.apply(experts(gathered, selected, weights), sent, received, self.group)
        dtype = torch.promote_types(partial.dtype, torch.float32)
        return partial.unflatten(0, (ranks, -1)).sum(0, dtype=dtype).to(partial.dtype)


def _for_products(x: Tensor) -> Tensor:
    """Tokens in the dtype in which experts multiply them, so that no wider one travels."""
    device = x.device.type
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


class _Exchange(torch.autograd.Function):
    """Rows to all ranks of a group, and their gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        """rows [sum(sent), width], those for rank 0 first -> [sum(received), width], those of rank 0 first."""
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(rows, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradient, ctx.sent, ctx.received, ctx.group), None, None, None


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return rows.clone()
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
