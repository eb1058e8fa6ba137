"""Attention of candidates to the behaviour sequence of their request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.attention import jagged_attention
from kernels.core.offsets import scaled_offsets
from kernels.ikbo import joint_attention, nested_offsets, stacked_linear, target_attention
from kernels.tokens import unbind
from modules.core.checks import check_dtype, check_maximum, check_tokens
from modules.core.vanilla import is_vanilla
from modules.layers.attention.absorbed import AbsorbingAttention
from modules.layers.attention.jagged_attention import head_dim
from modules.layers.attention.rotary import Rotation, project_qkv, rotate_qkv


class TargetAttention(AbsorbingAttention):
    """Multi-head attention of `num_queries` tokens of each candidate to its request's sequence.

    Keys and values stay at R rows: all queries of a request are one row of a jagged tensor, so a sequence is projected
    and read once for all its candidates and never copied per candidate. For few queries it is not even projected: see
    `AbsorbingAttention`. No position enters: what a candidate looks for is content (positions act in self-attention).
    `max_candidates` and `max_length` are constants that none exceeds.

    With `activation`, a name of `kernels.gdpa.ACTIVATIONS` or one per head, weights are this activation of the scores
    in place of their softmax; `score_scale` is then 1 / max_length unless given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_queries: int,
        *,
        max_candidates: int,
        max_length: int,
        activation: str | Sequence[str] | None = None,
        score_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.num_queries = num_queries
        self.max_candidates = max_candidates
        self.max_queries = max_candidates * num_queries
        self.max_length = max_length
        self.activation = activation
        self.score_scale = 1 / max_length if activation is not None and score_scale is None else score_scale
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(
        self, queries: Tensor, candidate_offsets: Tensor | Sequence[Tensor], values: Tensor, offsets: Tensor
    ) -> Tensor:
        """queries [C, num_queries, dim], candidate_offsets [R + 1], sequence values [N, dim] and offsets [R + 1]
        -> [C, num_queries, dim]. A candidate of a request without events gets zeros. A sequence of candidate_offsets
        is a tree, see `kernels.ikbo.nested_offsets`."""
        _check_queries(queries, self.num_queries, self.query)
        check_tokens(values, self.key_value.in_features, self.key_value)
        check_maximum(offsets, self.max_length, "max_length")
        query = self.query(queries).unflatten(-1, (self.num_heads, self.head_dim))
        if self.absorbs(values):
            if not isinstance(candidate_offsets, Tensor):
                candidate_offsets = nested_offsets(*candidate_offsets)
            check_maximum(candidate_offsets, self.max_candidates, "max_candidates")
            q_offsets = scaled_offsets(candidate_offsets, self.num_queries)
            absorbed = self.absorbed_query(query.flatten(0, 1))
            attended = self.absorbed_attention(absorbed, values, q_offsets, offsets, self.score_scale)
            return self.output(attended.reshape(queries.shape))
        key, value = unbind(self.key_value(values).view(-1, 2, self.num_heads, self.head_dim))
        attended = target_attention(
            query,
            key,
            value,
            candidate_offsets,
            offsets,
            max_candidates=self.max_candidates,
            max_k=self.max_length,
            score_scale=self.score_scale,
            activation=self.activation,
        )
        return self.output(attended.view(queries.shape))

    def absorbs(self, like: Tensor) -> bool:
        return self.activation is None and super().absorbs(like)


class SelfAndTargetAttention(nn.Module):
    """Self-attention of a request's sequence, and attention of its candidates to it, over the same keys and values.

    Keys and values are projected once for both groups of queries; each group has its own projection of queries.
    `max_candidates` and `max_length` are constants that no request exceeds. `window` limits a token of the sequence to
    neighbours |i - j| <= window; candidates see the whole sequence. Without a window the queries of both groups are one
    tensor, which one kernel reads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_queries: int,
        *,
        max_candidates: int,
        max_length: int,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.num_queries = num_queries
        self.max_candidates = max_candidates
        self.max_length = max_length
        self.window = window
        self.query = nn.Linear(dim, dim, bias=False)
        self.target_query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.target_output = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        queries: Tensor,
        candidate_offsets: Tensor | Sequence[Tensor],
        values: Tensor,
        offsets: Tensor,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """queries [C, num_queries, dim], candidate_offsets [R + 1], sequence values [N, dim] and offsets [R + 1]
        -> (values attended [N, dim], queries attended [C, num_queries, dim]). Trees as in `TargetAttention`.

        `rotation` turns the sequence's queries and keys by their positions. Candidates are then at position 0 and of
        age 0, which turns nothing.
        """
        if not isinstance(candidate_offsets, Tensor):
            candidate_offsets = nested_offsets(*candidate_offsets)
        _check_queries(queries, self.num_queries, self.query)
        check_tokens(values, self.key_value.in_features, self.key_value)
        check_maximum(offsets, self.max_length, "max_length")
        check_maximum(candidate_offsets, self.max_candidates, "max_candidates")
        attend = self._in_window if self.window is not None else self._in_one
        own, target = attend(queries, candidate_offsets, values, offsets, rotation)
        return self.output(own.flatten(1)), self.target_output(target.view(queries.shape))

    def _in_one(
        self,
        queries: Tensor,
        candidate_offsets: Tensor,
        values: Tensor,
        offsets: Tensor,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:
        sizes = (values.shape[0], queries.shape[0] * self.num_queries)
        groups, layers = (values, queries.flatten(0, 1)), (self.query, self.target_query)
        if rotation is not None:
            own, key, value = self._query_key_value(values, rotation)
            projected = torch.cat([own, self._heads(self.target_query(groups[1]))])
        else:
            key, value = unbind(self.key_value(values).view(-1, 2, self.num_heads, self.head_dim))
            if all(is_vanilla(layer, nn.Linear) for layer in layers):
                projected = self._heads(stacked_linear(groups, [layer.weight for layer in layers]))
            else:  # any other layer must be called
                parts = [layer(group) for layer, group in zip(layers, groups, strict=True)]
                projected = self._heads(torch.cat(parts))
        attended = joint_attention(
            projected,
            key,
            value,
            [offsets, scaled_offsets(candidate_offsets, self.num_queries)],
            offsets,
            max_q=(self.max_length, self.max_candidates * self.num_queries),
            max_k=self.max_length,
            sizes=sizes,
        )
        own, target = attended.split(sizes)
        return own, target

    def _in_window(
        self,
        queries: Tensor,
        candidate_offsets: Tensor,
        values: Tensor,
        offsets: Tensor,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:
        own, key, value, target_key, target_value = self._query_key_value(values, rotation, twice=True)
        own = jagged_attention(
            own, key, value, offsets, offsets, max_q=self.max_length, max_k=self.max_length, window=self.window
        )
        target = target_attention(
            self._heads(self.target_query(queries)),
            target_key,
            target_value,
            candidate_offsets,
            offsets,
            max_candidates=self.max_candidates,
            max_k=self.max_length,
        )
        return own, target

    def _query_key_value(self, values: Tensor, rotation: Rotation | None, twice: bool = False) -> tuple[Tensor, ...]:
        """Queries and keys, rotated, and values of the sequence, each [N, heads, head_dim], from one product. With
        `twice`, keys and values a second time, for a second reader."""
        layers = self.query, self.key_value
        if all(is_vanilla(layer, nn.Linear) for layer in layers):
            weight = torch.cat([layer.weight for layer in layers])
            if rotation is not None:
                return project_qkv(values, weight, *rotation, heads=self.num_heads, twice=twice)
            projected = F.linear(values, weight)
        else:  # any other layer must be called
            projected = torch.cat([layer(values) for layer in layers], dim=1)
        projected = projected.view(-1, 3, self.num_heads, self.head_dim)
        if rotation is not None:
            return rotate_qkv(projected, *rotation, twice=twice)
        query, *key_value = unbind(projected)
        return query, *key_value, *(key_value if twice else [])

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, self.head_dim))


def _check_queries(queries: Tensor, num_queries: int, layer: nn.Module) -> None:
    if queries.dim() != 3 or queries.shape[1] != num_queries:
        raise ValueError(f"queries must be [C, num_queries={num_queries}, dim], got {list(queries.shape)}")
    check_dtype(queries, layer, "queries")
