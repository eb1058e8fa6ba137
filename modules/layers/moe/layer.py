"""The routed mixture of experts as one layer: router, dispatcher, experts, and optionally shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modules.config import option
from modules.layers.moe.balancing import load_balancing_loss
from modules.layers.moe.dispatcher import Dispatcher
from modules.layers.moe.exchange import Exchange
from modules.layers.moe.experts import Experts, SharedExperts
from modules.layers.moe.router import Router


@dataclass
class RoutingConfig:
    """How tokens choose among experts."""

    num_experts: int = option(8, least=1)
    top_k: int = option(2, least=1)
    bias_update_rate: float = 1e-3  # loss-free balancing: step of the selection bias, 0 turns it off


class MoE(nn.Module):
    """y_n = sum_{e in top-k(n)} weight_{n,e} * expert_e(x_n) + shared(x_n). No token is dropped and no capacity exists.

    `aux_loss` is the weighted balancing loss of the last forward, a scalar to add to the training loss.

    Args:
        dim: width of a token; expert_dim: hidden width of one expert.
        score: "softmax" over the experts, or "sigmoid" of each on its own.
        normalize_weights: divide a token's k mixing weights by their sum. With sigmoid scores and without it the scale
            of the output grows with k.
        num_shared_experts: experts of the same width that every token passes through, unweighted.
        bias_update_rate: step of the loss-free balancing, see `update_router_biases`; 0 turns it off.
        aux_loss_weight: of `load_balancing_loss` in `aux_loss`; 0 turns it off.
        num_kinds: tokens are of as many kinds in turn, each with `num_experts / num_kinds` experts of its own.
    Raises:
        ValueError: top_k outside 1..num_experts, unknown score, or a router that could get no gradient.
    """

    @dataclass
    class Config(RoutingConfig):
        """The arguments after `dim`, as a configuration has them."""

        expert_dim: int = option(128, least=1)  # hidden width of one expert
        score: str = option("softmax", choices=["softmax", "sigmoid"])
        normalize_weights: bool = True  # divide the top-k mixing weights by their sum
        num_shared_experts: int = 0  # experts that every token passes through
        aux_loss_weight: float = 0.0  # classical load-balancing loss, added to the training loss

        retired: ClassVar[dict[str, Any]] = {"force_balance": False}

        def check_at(self, path: str) -> None:
            if not 1 <= self.top_k <= self.num_experts:
                raise ValueError(f"{path}.top_k={self.top_k} must lie in 1..{path}.num_experts={self.num_experts}")

    def __init__(
        self,
        dim: int,
        expert_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize_weights: bool = True,
        num_shared_experts: int = 0,
        bias_update_rate: float = 1e-3,
        aux_loss_weight: float = 0.0,
        num_kinds: int = 1,
    ) -> None:
        super().__init__()
        self.router = Router(
            dim,
            num_experts,
            top_k,
            score=score,
            normalize_weights=normalize_weights,
            bias_update_rate=bias_update_rate,
            num_kinds=num_kinds,
        )
        self.dispatcher: Dispatcher | Exchange = Dispatcher()
        self.experts = Experts(dim, expert_dim, num_experts)
        self.shared = SharedExperts(dim, expert_dim, num_shared_experts) if num_shared_experts else None
        self.aux_loss_weight = aux_loss_weight
        self.aux_loss = torch.zeros(())

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the value of `aux_loss`, detached from the forward that it came from."""
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}

    def forward(self, x: Tensor) -> Tensor:
        """x [N, dim], or with more dimensions before the last -> the same shape, in autocast's dtype if autocast is on,
        else in that of x. There may be no tokens."""
        leading, x = x.shape[:-1], x.flatten(0, -2)
        routing = self.router(x)
        if self.aux_loss_weight:
            self.aux_loss = self.aux_loss_weight * load_balancing_loss(routing.scores, routing.counts)
        else:
            self.aux_loss = routing.scores.new_zeros(())
        # The experts dispatch, so that their hooks and wrappers see every call.
        if self.shared is None:
            y = self.experts(x, routing, self.dispatcher)
        elif isinstance(self.dispatcher, Exchange):
            shared: list[Tensor] = []
            y = self.experts(x, routing, self.dispatcher, partial(_append, shared, self.shared, x))
            y = y + shared[0]
        else:
            y = self.experts(x, routing, self.dispatcher) + self.shared(x)
        return y.unflatten(0, leading) if len(leading) > 1 else y


def _append(results: list[Tensor], layer: nn.Module, x: Tensor) -> None:
    results.append(layer(x))
