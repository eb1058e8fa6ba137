"""Attention among the tokens of candidates and to what their request has; nothing of a request is copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.attention import jagged_attention
from kernels.ikbo import tree_attention
from kernels.tokens import unbind
from modules.broadcast import CandidateRows


def equal_offsets(rows: int, length: int, like: Tensor) -> Tensor:
    """[rows + 1] of rows of one length."""
    return torch.arange(rows + 1, device=like.device, dtype=like.dtype) * length


def attend_within(query: Tensor, key: Tensor, value: Tensor, like: Tensor) -> Tensor:
    """Softmax attention within each row of tokens [N, T, H, d] -> [N, T, H, d]; `like` are offsets of any rows."""
    count, tokens = query.shape[:2]
    offsets = equal_offsets(count, tokens, like)
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    attended = jagged_attention(query, key, value, offsets, offsets, max_q=tokens, max_k=tokens)
    return attended.unflatten(0, (count, tokens))


def attend_one_way(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    above: tuple[Tensor, Tensor],
    above_offsets: Tensor,
    candidate_offsets: Tensor,
    *,
    max_candidates: int,
    max_above: int,
) -> Tensor:
    """Each candidate's tokens attend to each other and to their request's: one softmax over both.

    query and keys and values `own` are [C, T, H, d]; those `above` [N, H, d] are jagged by above_offsets [R + 1], as
    the candidates are by candidate_offsets. `max_candidates` and `max_above` are constants that no request exceeds.
    """
    count, tokens = query.shape[:2]
    (key, value), (above_key, above_value) = own, above
    each = equal_offsets(count, 1, candidate_offsets)
    return tree_attention(
        query,
        [above_key, key.flatten(0, 1)],
        [above_value, value.flatten(0, 1)],
        [candidate_offsets, each],
        [above_offsets, equal_offsets(count, tokens, candidate_offsets)],
        max_candidates=[max_candidates, 1],
        max_k=[max_above, tokens],
    )


class TokenAttention(nn.Module):
    """Multi-head self-attention of tokens; those of a request [R, T_u, dim] do not see its candidates' [C, T_i, dim],
    which see both. Without tokens of requests it is self-attention of each candidate's tokens."""

    def __init__(self, dim: int, num_heads: int, *, max_candidates: int) -> None:
        super().__init__()
        self.num_heads, self.max_candidates = num_heads, max_candidates
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, user: Tensor | None, item: Tensor, rows: CandidateRows) -> tuple[Tensor | None, Tensor]:
        query, key, value = self._projected(item)
        if user is None:
            return None, self.output(attend_within(query, key, value, rows.offsets).flatten(2))
        own, above_key, above_value = self._projected(user)
        attended = attend_one_way(
            query,
            (key, value),
            (above_key.flatten(0, 1), above_value.flatten(0, 1)),
            equal_offsets(user.shape[0], user.shape[1], rows.offsets),
            rows.offsets,
            max_candidates=self.max_candidates,
            max_above=user.shape[1],
        )
        within = attend_within(own, above_key, above_value, rows.offsets)
        return self.output(within.flatten(2)), self.output(attended.flatten(2))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        count, tokens, dim = x.shape
        projected = self.query_key_value(x).view(-1, 3, self.num_heads, dim // self.num_heads)
        return tuple(part.unflatten(0, (count, tokens)) for part in unbind(projected))
