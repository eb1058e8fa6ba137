"""Routings and layers of experts that their tests share."""

from __future__ import annotations

import torch
from torch import Tensor

RECIPES = ["bf16", "mxfp8", "mxfp8_g128"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing(num_tokens: int, num_experts: int, top_k: int, load: str = "random") -> Tensor:
    """Distinct experts for each token."""
    if load == "one":
        return torch.arange(top_k).flip(0).expand(num_tokens, top_k).contiguous()
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return (scores if load == "random" else scores * torch.arange(num_experts)).topk(top_k).indices


# Tokens, experts, k, load: no tokens, one, no expert without rows, most experts without rows, more than a block counts.
ROUTINGS = [
    (0, 4, 2, "random"),
    (1, 3, 1, "random"),
    (200, 3, 3, "random"),
    (300, 64, 2, "one"),
    (2000, 20, 4, "skewed"),
]


def layer(
    num_tokens: int,
    dim: int,
    expert_dim: int,
    num_experts: int,
    top_k: int,
    load: str = "random",
    out_dim: int | None = None,
):
    out_dim = out_dim or dim
    chosen = routing(num_tokens, num_experts, top_k, load)
    leaves = {
        "x": random(num_tokens, dim, seed=1),
        "weights": torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(2)),
        "gate_up": random(num_experts, 2 * expert_dim, dim, seed=3) / dim**0.5,
        "down": random(num_experts, out_dim, expert_dim, seed=4) / expert_dim**0.5,
    }
    return chosen, leaves, random(num_tokens, out_dim, seed=5)


def same_codes(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
