"""Attention of candidates to the behaviour sequence of their request."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.jagged import jagged_attention
from modules.jagged_attention import head_dim
from modules.mlp import linear_flops


class TargetAttention(nn.Module):
    """Multi-head attention of `num_queries` tokens of each candidate to its request's sequence.

    Keys and values stay at R rows: all queries of a request are one row of a jagged tensor, so a sequence is projected
    and read once for all its candidates and never copied per candidate. No position enters: what a candidate looks for
    is content (positions act in self-attention). `max_candidates` and `max_length` are constants that none exceeds.
    """

    def __init__(self, dim: int, num_heads: int, num_queries: int, *, max_candidates: int, max_length: int) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.num_queries = num_queries
        self.max_candidates = max_candidates
        self.max_length = max_length
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, queries: Tensor, candidate_offsets: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """queries [C, num_queries, dim], candidate_offsets [R + 1], sequence values [N, dim] and offsets [R + 1]
        -> [C, num_queries, dim]. A candidate of a request without events gets zeros."""
        key, value = self.key_value(values).view(-1, 2, self.num_heads, self.head_dim).unbind(1)
        attended = jagged_attention(
            self.query(queries).view(-1, self.num_heads, self.head_dim),
            key,
            value,
            candidate_offsets * self.num_queries,
            offsets,
            max_q=self.max_candidates * self.num_queries,
            max_k=self.max_length,
        )
        return self.output(attended.view(queries.shape))

    def flops(self, num_candidates: float, num_tokens: float, candidate_token_pairs: float) -> float:
        """Forward FLOPs; `candidate_token_pairs` is the sum over requests of candidates times sequence tokens."""
        num_queries = num_candidates * self.num_queries
        projections = num_queries * linear_flops(self.query) + num_tokens * linear_flops(self.key_value)
        attention = 4 * self.query.in_features * self.num_queries * candidate_token_pairs
        return projections + attention + num_queries * linear_flops(self.output)
