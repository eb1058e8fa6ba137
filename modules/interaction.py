"""Feature interaction over tokens [C, n, d]: inner products, cross network, and their ensemble."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modules.mlp import MLP, linear_flops
from modules.norms import rms_norm


class DotInteraction(nn.Module):
    """Inner products of all pairs i < j of n tokens: [C, n, d] -> [C, n (n - 1) / 2], multiplied by `scale`."""

    pairs: Tensor

    def __init__(self, num_tokens: int, scale: float = 1.0) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.scale = scale
        row, column = torch.triu_indices(num_tokens, num_tokens, offset=1)
        self.register_buffer("pairs", row * num_tokens + column, persistent=False)

    @property
    def num_pairs(self) -> int:
        return self.pairs.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        gram = torch.bmm(tokens, tokens.mT).flatten(1)
        return gram.index_select(1, self.pairs) * self.scale

    def flops(self, dim: int) -> float:
        """Per candidate; the whole symmetric product is what runs."""
        return 2 * self.num_tokens**2 * dim


class CrossNet(nn.Module):
    """Cross network of DCNv2 (arXiv 2008.13535) with low-rank weights: x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[C, width] -> [C, width]."""
        crossed = x
        for down, up in zip(self.down, self.up, strict=True):
            crossed = x * up(down(crossed)) + crossed
        return crossed


class DHENLayer(nn.Module):
    """One layer of DHEN (arXiv 2203.11014), Y = Norm(DOT(X) + DCN(X) + X): [C, n, d] -> [C, n, d].

    Chosen here: the ensemble is a sum; inner products go through an MLP with `hidden` layers to n x d; DCN is one
    cross layer; the norm is over the width of each token. Its place after the sum is DHEN's own.
    """

    def __init__(self, num_tokens: int, dim: int, *, rank: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        # Tokens come normalised, so this keeps inner products at unit variance whatever the width.
        self.dot = DotInteraction(num_tokens, scale=dim**-0.5)
        self.dot_output = MLP(self.dot.num_pairs, hidden, num_tokens * dim, dropout)
        self.cross = CrossNet(num_tokens * dim, num_layers=1, rank=rank)
        self.dim = dim

    def forward(self, tokens: Tensor) -> Tensor:
        ensemble = self.dot_output(self.dot(tokens)) + self.cross(tokens.flatten(1))
        return rms_norm(ensemble.view_as(tokens) + tokens)

    def flops(self) -> float:
        """Per candidate."""
        return self.dot.flops(self.dim) + linear_flops(self)
