"""Bringing tokens to their experts and results back to their tokens.

N tokens, k experts each, E experts, D wide. Everything stays on the device: no size depends on the routing.
"""

from __future__ import annotations

from torch import Tensor

from kernels import moe
from modules.layers.moe.router import Routing


class Dispatcher:
    """Dispatch within one process: every expert is local.

    With exactly this class, `MoE` runs gather, experts and combination as one operator, `kernels.moe.experts`. To run
    the experts elsewhere, replace `MoE.dispatcher` by an object with the same two methods. The third result of
    `dispatch` is private to the dispatcher and passed on to `combine`.
    """

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, moe.Order]:
        """x [N, D] to rows [N * k, D] grouped by expert, and ends [E] int32: rows of e are ends[e-1]:ends[e].

        The sort is stable: within an expert rows keep the order of their tokens.
        """
        rows, order = moe.gather(x, routing.selected_experts)
        return rows, routing.counts.cumsum(0).int(), order

    def combine(self, rows: Tensor, routing: Routing, order: moe.Order) -> Tensor:
        """Rows [N * k, D] to tokens [N, D]: each token's rows times its mixing weights, summed in their dtype."""
        return moe.combine(rows, routing.weights, order)
