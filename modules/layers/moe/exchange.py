"""Experts on several ranks: tokens travel to their experts and back.

R ranks share the E experts of a layer: rank r has experts r * L to (r + 1) * L, L = E / R. A rank has N tokens, k
experts each, D wide; each rank has another N, which may be 0. A `mix` around the experts of a rank does what the one
operator does for a layer whose experts are all here, so the two have the same gradients. On a group of one rank the
same code runs, and nothing is sent.

Gradients of the experts are sums over the tokens of all ranks of the group.

While rows are on their way, the layer's shared experts run: between the start of an exchange and the wait for it in the
forward, and so, by the order in which autograd runs what it recorded, between those of its gradient in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import moe, mxfp8
from modules.layers.moe.router import Routing

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [M, D], selected [M, j] int64 in 0..L - 1, weights [M, j] -> [M, D], the weighted sum over the selected ones."""

PAYLOADS = {"full": (False, False), "mxfp8": (True, True), "mxfp8_forward": (True, False)}
"""Whether rows, and whether their gradients, travel as MXFP8: a byte a number and one for each 32. Else as they are."""


class AllToAll:
    """Each selection of a token travels as a row to the rank of its expert and back: 2 N k D numbers a layer.

    The sizes of what is sent depend on the routing. They are exchanged on the device, and read by the host once.
    """

    def __init__(self, group: dist.ProcessGroup, payload: str = "full") -> None:
        """`payload`: of PAYLOADS."""
        self.group, self.rounded = group, PAYLOADS[payload]

    def mix(
        self, x: Tensor, routing: Routing, experts: LocalExperts, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """x [N, D] through the experts of its routing on all ranks -> [N, D] in autocast's dtype, else in that of x.

        `meanwhile` is called while rows travel to their experts.
        """
        rows, order = moe.gather(_for_products(x), routing.selected_experts)
        sent = routing.counts.view(self.group.size(), -1)  # [R, L]: rows for each expert of each rank
        received = torch.empty_like(sent)  # [R, L]: rows from each rank for each expert of this one
        dist.all_to_all_single(received, sent, group=self.group)
        out, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        given = exchange_tokens(rows, back, out, self.group, self.rounded, meanwhile)
        own = torch.arange(received.shape[1], device=x.device).repeat(received.shape[0])
        selected = own.repeat_interleave(received.flatten(), output_size=sum(back))[:, None]
        mixed = experts(given, selected, torch.ones_like(selected, dtype=routing.weights.dtype))
        return moe.combine(exchange_tokens(mixed, out, back, self.group, self.rounded), routing.weights, order)


class AllGather:
    """For layers where every token sees every expert (k = E): every rank gets all tokens of the group, and the sum of
    what the experts of all ranks make of a token returns to its rank. 2 N (R - 1) D numbers a layer, instead of E / R
    times as many.
    """

    def __init__(self, group: dist.ProcessGroup, payload: str = "full") -> None:
        """`payload`: of PAYLOADS."""
        self.group, self.rounded = group, PAYLOADS[payload]

    def mix(
        self, x: Tensor, routing: Routing, experts: LocalExperts, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
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
        gathered = exchange_tokens(everyone, received, sent, self.group, self.rounded, meanwhile)
        # Of each token's weights, in order of the experts, each rank gets those of its own experts.
        in_order = torch.empty_like(routing.weights).scatter(1, routing.selected_experts, routing.weights)
        of_ranks = in_order.unflatten(1, (ranks, local)).transpose(0, 1).flatten(0, 1)
        weights = exchange_tokens(of_ranks, received, sent, self.group)
        selected = torch.arange(local, device=x.device).expand(gathered.shape[0], -1)
        partial = exchange_tokens(experts(gathered, selected, weights), sent, received, self.group, self.rounded)
        dtype = torch.promote_types(partial.dtype, torch.float32)
        return partial.unflatten(0, (ranks, -1)).sum(0, dtype=dtype).to(partial.dtype)


Exchange = AllToAll | AllGather


def _for_products(x: Tensor) -> Tensor:
    """Tokens in the dtype in which experts multiply them, so that no wider one travels."""
    device = x.device.type
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def exchange_tokens(
    rows: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup,
    rounded: tuple[bool, bool] = PAYLOADS["full"],
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """rows [sum(sent), D], those for rank 0 first -> [sum(received), D], those of rank 0 first; gradients the way back.

    `rounded`: whether rows, and whether gradients, travel as MXFP8.
    """
    there, back = _Transfer(received, sent, group, rounded[0]), _Transfer(sent, received, group, rounded[1])
    started = _Start.apply(rows, there, back)
    if meanwhile is not None:
        meanwhile()
    return _Finish.apply(started, there, back)


class _Transfer:
    """Rows on their way to all ranks of a group; on a group of one they stay."""

    def __init__(self, received: list[int], sent: list[int], group: dist.ProcessGroup, rounded: bool) -> None:
        self.received, self._sent, self._group, self._rounded = received, sent, group, rounded

    def start(self, rows: Tensor) -> None:
        self._dtype, self._width = rows.dtype, rows.shape[1]
        if self._group.size() == 1:
            self._arriving = rows.clone()
        else:
            self._payload = _as_bytes(rows) if self._rounded else rows.contiguous()
            self._arriving = self._payload.new_empty(sum(self.received), self._payload.shape[1])
            self._work = dist.all_to_all_single(
                self._arriving, self._payload, self.received, self._sent, group=self._group, async_op=True
            )

    def finish(self) -> Tensor:
        arrived = self._arriving
        del self._arriving
        if self._group.size() > 1:
            self._work.wait()
            del self._work, self._payload
            if self._rounded:
                return _from_bytes(arrived, self._width, self._dtype)
        return arrived


def _as_bytes(rows: Tensor) -> Tensor:
    """rows [N, D] -> [N, D + ceil(D / 32)] uint8: their MXFP8 codes, then the scales."""
    codes, scales, _ = mxfp8.quantize(rows)
    return torch.cat([codes.view(torch.uint8), scales], dim=1)


def _from_bytes(received: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    codes, scales = received[:, :width].contiguous().view(torch.float8_e4m3fn), received[:, width:].contiguous()
    return mxfp8.dequantize(mxfp8.MXTensor(codes, scales, 1), dtype)


class _Start(torch.autograd.Function):
    """The start of an exchange, and the end of that of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: _Transfer, back: _Transfer) -> Tensor:
        ctx.back = back
        there.start(rows)
        return rows.new_zeros(()).expand(sum(there.received), rows.shape[1])  # stands in for what is on its way

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back.finish(), None, None


class _Finish(torch.autograd.Function):
    """The end of an exchange, and the start of that of its gradient."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, there: _Transfer, back: _Transfer) -> Tensor:
        ctx.back = back
        return there.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.back.start(gradient)
        return gradient, None, None  # stands in, too
