"""Multi-head self-attention over jagged sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.attention import jagged_attention
from modules.core.checks import check_maximum, check_tokens
from modules.core.vanilla import is_vanilla
from modules.layers.attention.rotary import Rotation, project_qkv, rotate_qkv


class JaggedSelfAttention(nn.Module):
    """Softmax self-attention within each row of (values [N, dim], offsets [B + 1]) -> [N, dim]; nothing is padded.

    Every token of a row sees every other (InterFormer's sequences end before the candidate, so nothing there needs a
    causal mask); `window` limits a token to neighbours |i - j| <= window, `causal` to itself and those before it.
    `sinks` learns a logit for each head that joins every softmax and has no value, so that a head may look away.
    `max_length` is a constant that no row exceeds, not a maximum of the batch. There is no dropout on attention
    weights: fused kernels do not hold them in memory.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_length: int,
        window: int | None = None,
        causal: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.max_length = max_length
        self.window = window
        self.causal = causal
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, values: Tensor, offsets: Tensor, rotation: Rotation | None = None) -> Tensor:
        """`rotation` is (cos, sin) of the tokens' positions, from `rotary.rotation`; without it the order of
        tokens has no effect except through masks."""
        check_tokens(values, self.query_key_value.in_features, self.query_key_value)
        check_maximum(offsets, self.max_length, "max_length")
        layer = self.query_key_value
        if rotation is not None and is_vanilla(layer, nn.Linear) and layer.bias is None:
            query, key, value = project_qkv(values, layer.weight, *rotation, heads=self.num_heads)
        else:
            projected = layer(values).view(-1, 3, self.num_heads, self.head_dim)
            query, key, value = projected.unbind(1) if rotation is None else rotate_qkv(projected, *rotation)
        attended = jagged_attention(
            query,
            key,
            value,
            offsets,
            offsets,
            max_q=self.max_length,
            max_k=self.max_length,
            window=self.window,
            causal=self.causal,
            sinks=self.sinks,
        )
        return self.output(attended.flatten(1))


def head_dim(dim: int, num_heads: int) -> int:
    """Width of a head; ValueError unless it is a whole, even number (rotation pairs features)."""
    if dim % (2 * num_heads):
        raise ValueError(f"dim={dim} must be a multiple of 2 * num_heads={2 * num_heads}, e.g. dim={16 * num_heads}")
    return dim // num_heads
