"""SwiGLU experts: two grouped GEMMs over tokens sorted by expert. A precision only sets `Experts.recipe`.

M rows in expert order, E experts, D the model width, F the hidden width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kernels.moe import experts, swiglu
from kernels.mxfp8 import QUANTIZED, experts_execution, grouped_mm, multiplies_expert_codes
from modules.layers.moe.dispatcher import Dispatcher
from modules.layers.moe.exchange import Exchange
from modules.layers.moe.router import Routing
from modules.precision import Quantizable


class Experts(Quantizable):
    """E SwiGLU feed-forwards without bias: y = W_down (silu(W_gate x) * (W_up x)).

    `w_gate_up` [E, 2F, D] holds W_gate in rows 0:F and W_up in rows F:2F of every expert, `w_down` is [E, D, F]: both
    as [out, in], like nn.Linear. Gate and up are one parameter because they are one GEMM in the forward, and in the
    backward one GEMM sums their input gradients. Under expert parallelism they are this rank's experts, a part of all
    along the last axis of `mesh`.
    """

    mesh: DeviceMesh | None = None

    def __init__(self, dim: int, expert_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.w_down = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan-in of one expert), nn.Linear's own: an expert starts as a dense SwiGLU would."""
        for weight in (self.w_gate_up, self.w_down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        dispatcher: Dispatcher | Exchange,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """x [N, D] through the experts of its routing, mixed -> [N, D] in autocast's dtype, else in that of x.

        With a `Dispatcher` this is one operator, and between ranks one operator around which tokens are exchanged.
        Another dispatcher moves the rows to the experts and back itself. `meanwhile` is called while tokens travel.
        """
        if isinstance(dispatcher, Exchange):
            return dispatcher.mix(x, routing, self._mixed, meanwhile)
        if type(dispatcher) is Dispatcher:
            return self._mixed(x, routing.selected_experts, routing.weights)
        rows, ends, handle = dispatcher.dispatch(x, routing)
        return dispatcher.combine(self.grouped(rows, ends), routing, handle)

    def _mixed(self, x: Tensor, selected_experts: Tensor, weights: Tensor) -> Tensor:
        return experts(x, selected_experts, weights, self.w_gate_up, self.w_down, recipe=self.recipe)

    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        return multiplies_expert_codes(self.w_gate_up, recipe, QUANTIZED[recipe], device)

    def execution(self) -> str:
        return experts_execution(self.w_gate_up, self.recipe, QUANTIZED[self.recipe])

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [M, D] in expert order, ends [E] int32 cumulative -> [M, D] in the dtype of `forward`."""
        gate_up = grouped_mm(rows, self.w_gate_up, ends, recipe=self.recipe)
        return grouped_mm(swiglu(gate_up), self.w_down, ends, recipe=self.recipe)


class SharedExperts(nn.Module):
    """Experts that every token passes through: `num_experts` SwiGLUs of width F side by side are one of n * F."""

    def __init__(self, dim: int, expert_dim: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * num_experts * expert_dim, bias=False)
        self.down = nn.Linear(num_experts * expert_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))
