"""Keeping experts evenly loaded: the selection bias (default) and the classical auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modules.layers.moe.router import Router


@torch.no_grad()
def update_router_biases(model: nn.Module, all_reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Step the selection bias of every router by the tokens counted since the last call. Once per optimiser step.

    Args:
        all_reduce: sums an int64 tensor over the data-parallel ranks and returns it; None on a single rank. Called once
            for all routers together, and not at all for a model without any. Every rank must call this function.
    Returns:
        Load violation of each router by its name: max(count) / mean(count) - 1, a scalar on the device; 0 is perfect
        balance (MaxVio of arXiv 2408.15664), and what an idle router reports.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not routers:
        return {}
    counts = torch.cat([router.tokens_per_expert for router in routers.values()])
    if all_reduce is not None:
        counts = all_reduce(counts)
    violation = {}
    parts = counts.split([router.num_experts for router in routers.values()])
    for (name, router), part in zip(routers.items(), parts, strict=True):
        router.update_bias(part)
        router.tokens_per_expert.zero_()
        violation[name] = (part.max() * router.num_experts - part.sum()) / part.sum().clamp(min=1)
    return violation


def load_balancing_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """E * sum_e f_e * P_e, the auxiliary loss of Switch Transformer (arXiv 2101.03961, eq. 4) for k selections a token.

    f_e is the fraction of all N * k selections that went to expert e and has no gradient; P_e is the mean over tokens
    of the score of e as a share of the token's scores (softmax scores are shares). 1 at perfect balance, 0 if N = 0.

    Args:
        scores: [N, E]; counts: [E], selections of each expert.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    mean_share = shares.sum(0) / max(scores.shape[0], 1)
    fraction = counts.to(scores.dtype) / counts.sum().clamp(min=1)
    return scores.shape[1] * (fraction * mean_share).sum()
