"""Attention of few queries to a long sequence, without projecting the sequence to keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.attention import attention_pool, pools
from modules.core.vanilla import is_vanilla


class AbsorbingAttention(nn.Module):
    """A layer whose queries attend to keys and values that `key_value`, [2 dim, dim], makes of a sequence.

    With W_k and W_v [head_dim, dim] the rows of `key_value` for a head, q (W_k s) = (W_k^T q) s, and a sum of p (W_v s)
    is W_v (sum of p s). So the few queries can be multiplied by W_k, attend to the sequence itself, and what they have
    pooled be multiplied by W_v: the same function of the same parameters. A request with Q queries and L events costs

        projected  4 L dim (dim + Q)               L projections, then heads of head_dim features
        absorbed   4 Q dim (dim + num_heads L)     Q projections, then num_heads vectors a query of dim features

    operations. The layer absorbs where that is less for the constants `max_queries` and `max_length`, and a kernel
    serves heads so wide. A projection that must be called, such as a quantised one, is.
    """

    num_heads: int
    head_dim: int
    max_length: int
    max_queries: int
    key_value: nn.Linear

    def absorbs(self, like: Tensor) -> bool:
        """Whether keys and values of a sequence like this one would not be projected; only its device and dtype
        count."""
        layer, queries = self.key_value, self.max_queries
        if not is_vanilla(layer, nn.Linear) or layer.bias is not None:
            return False
        dim = layer.in_features
        projected, absorbed = self.max_length * (dim + queries), queries * (dim + self.num_heads * self.max_length)
        return absorbed < projected and pools(like, dim, queries * self.num_heads)

    def absorbed_query(self, query: Tensor) -> Tensor:
        """W_k^T q of each head: [Q, num_heads, head_dim] -> [Q, num_heads, dim]."""
        return (query.transpose(0, 1) @ self._weights()[0]).transpose(0, 1)

    def absorbed_attention(
        self, query: Tensor, values: Tensor, q_offsets: Tensor, offsets: Tensor, scale: float | None = None
    ) -> Tensor:
        """`absorbed_query` of queries [Q, num_heads, head_dim] that are jagged by q_offsets, and a sequence [N, dim]
        -> [Q, num_heads, head_dim], what the queries attend to with keys and values of the sequence."""
        pooled = attention_pool(
            query,
            values,
            q_offsets,
            offsets,
            max_q=self.max_queries,
            max_k=self.max_length,
            scale=self.head_dim**-0.5 if scale is None else scale,
        )
        return (pooled.transpose(0, 1) @ self._weights()[1].mT).transpose(0, 1)

    def _weights(self) -> tuple[Tensor, ...]:
        """(W_k, W_v), each [num_heads, head_dim, dim]."""
        return torch.unbind(self.key_value.weight.view(2, self.num_heads, self.head_dim, -1))
