"""Pooling by multi-head attention (PMA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modules.layers.attention.target_attention import TargetAttention


class PMA(nn.Module):
    """Learned seeds attend to a jagged sequence: its summary in `num_seeds` tokens.

    Only the attention of Set Transformer's PMA (arXiv 1810.00825), as in InterFormer: no residual, feed-forward or
    norms. Beyond InterFormer, a `condition` is added to the seeds, so that each candidate has queries of its own.
    """

    def __init__(self, dim: int, num_heads: int, num_seeds: int, *, max_candidates: int, max_length: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.empty(num_seeds, dim))
        self.reset_parameters()
        self.attention = TargetAttention(
            dim, num_heads, num_seeds, max_candidates=max_candidates, max_length=max_length
        )

    def reset_parameters(self) -> None:
        """Unit variance, like the normalised tokens from which the condition is computed."""
        nn.init.normal_(self.seeds)

    def forward(self, condition: Tensor, candidate_offsets: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """condition [C, num_seeds, dim] (zeros: plain PMA), candidate_offsets [R + 1], values [N, dim], offsets [R + 1]
        -> [C, num_seeds, dim]. The summary of an empty sequence is zeros."""
        return self.attention(self.seeds + condition, candidate_offsets, values, offsets)
