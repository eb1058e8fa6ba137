"""Attention of a layer's tokens to those that earlier layers made."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from modules.layers.norms import rms_norm


class CrossLayerAttention(nn.Module):
    """Norm(X + MHA(X, M, M)): tokens X [C, n, dim] attend to M [C, m, dim], those of earlier layers -> [C, n, dim].

    Both are of one candidate and normalised; so is the result. With it a layer reads interactions of every lower order
    directly and not through all layers between.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} must be a multiple of num_heads={num_heads}, e.g. dim={8 * num_heads}")
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        query = self.query(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        pairs = self.key_value(memory).unflatten(-1, (2, self.num_heads, -1)).transpose(1, 3)
        attended = F.scaled_dot_product_attention(query, pairs[:, :, 0], pairs[:, :, 1])
        return rms_norm(tokens + self.output(attended.transpose(1, 2).flatten(2)))
