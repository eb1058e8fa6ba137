"""Event sequences in token mixing: their tokens, their encoding in each layer, and how tokens of both sides attend.

Shapes: R requests, C candidates, N events, T_u and T_i tokens of a request and of a candidate, all of width D. Events
and keys stay at the rows of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.attention import jagged_attention
from kernels.ikbo import target_attention
from kernels.jagged import segment_mean
from kernels.tokens import unbind
from modules.batch import FeatureSpec
from modules.broadcast import CandidateRows
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import from_end, rotation
from modules.layers.embedding.tokens import JaggedSequence
from modules.layers.feed_forward.token_linear import TokenLinear
from modules.layers.moe.experts import SharedExperts
from modules.layers.norms import rms_norm
from modules.layers.sequence.history import merge_by_time
from modules.layers.sequence.newest import newest, with_spare_rows
from modules.models.token_mixing.config import TokenMixingConfig

Sides = tuple[Tensor | None, Tensor]
"""Tokens of requests [R, T_u, D], None where all are candidates', and of candidates [C, T_i, D]."""


class Events(NamedTuple):
    """A sequence of every request, oldest first."""

    values: Tensor  # [N, D]
    offsets: Tensor  # [R + 1], or with spare rows (`modules.layers.sequence.newest`) [2 R + 1]

    def counting(self, offsets: Tensor) -> Tensor:
        """Offsets [R + 1] of what attends to the sequence, with as many rows as it has."""
        return offsets if offsets.shape == self.offsets.shape else with_spare_rows(offsets)


class EventTokens(nn.Module):
    """Tokens of each event type, or of all merged by time: a linear layer of the type, whose bias tells it apart."""

    def __init__(self, spec: FeatureSpec, config: TokenMixingConfig) -> None:
        super().__init__()
        self.names = [event.name for event in spec.histories]
        self.merge = config.merge_events
        widths = [len(event.fields) * config.dim for event in spec.histories]
        self.linear = nn.ModuleList(nn.Linear(width, config.token_dim) for width in widths)
        lengths = [event.max_length for event in spec.histories]
        self.max_lengths = [sum(lengths)] if self.merge and lengths else lengths

    def forward(self, histories: Mapping[str, JaggedSequence]) -> list[Events]:
        given = [histories[name] for name in self.names]
        made = [
            JaggedSequence(linear(each.values), each.offsets, each.times)
            for linear, each in zip(self.linear, given, strict=True)
        ]
        if self.merge and made:
            made = [merge_by_time(made)]
        return [Events(each.values, each.offsets) for each in made]


class EventEncoding(nn.Module):
    """H + f(Norm(H)) of a sequence, once or twice: `swiglu`, or before it self-attention (`attention`), or the
    attention of the newest events to all (`newest`), which alone go on."""

    def __init__(self, config: TokenMixingConfig, max_length: int) -> None:
        super().__init__()
        dim, heads = config.token_dim, config.num_heads
        self.kind, self.num_heads, self.max_length = config.encoding, heads, max_length
        self.count = min(config.num_newest, max_length)
        if self.kind == "attention":
            self.attention = JaggedSelfAttention(dim, heads, max_length=max_length)
        if self.kind == "newest":
            self.query = nn.Linear(dim, dim, bias=False)
            self.key_value = nn.Linear(dim, 2 * dim, bias=False)
            self.output = nn.Linear(dim, dim, bias=False)
        self.swiglu = None if self.kind == "none" else SharedExperts(dim, int(config.expansion * dim), 1)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def longest(self) -> int:
        """Of what it makes of a row."""
        return self.count if self.kind == "newest" else self.max_length

    def forward(self, events: Events, num_requests: int) -> Events:
        values, offsets = events
        if self.kind == "attention":
            angles = rotation(from_end(offsets, values.shape[0]), values.shape[1] // self.num_heads)
            values = values + self.dropout(self.attention(rms_norm(values), offsets, angles))
        elif self.kind == "newest":
            normed, rows = rms_norm(values), offsets[: num_requests + 1]
            index, cuts = newest(rows, values.shape[0], self.count)
            values = values[index] + self.dropout(self._attend(normed, index, cuts, events))
            offsets = cuts
        if self.swiglu is not None:
            values = values + self.dropout(self.swiglu(rms_norm(values)))
        return Events(values, offsets)

    def _attend(self, normed: Tensor, index: Tensor, cuts: Tensor, events: Events) -> Tensor:
        heads = (self.num_heads, normed.shape[1] // self.num_heads)
        query = self.query(normed[index]).unflatten(1, heads)
        key, value = unbind(self.key_value(normed).view(-1, 2, *heads))
        keys = events.offsets if events.offsets.shape == cuts.shape else with_spare_rows(events.offsets)
        attended = jagged_attention(query, key, value, cuts, keys, max_q=self.count, max_k=self.max_length)
        return self.output(attended.flatten(1))


class EventNetwork(nn.Module):
    """SwiGLU(Norm(S)): MixFormer's encoding of a sequence."""

    def __init__(self, config: TokenMixingConfig) -> None:
        super().__init__()
        self.swiglu = SharedExperts(config.token_dim, int(config.expansion * config.token_dim), 1)

    def forward(self, events: Events) -> Events:
        return Events(self.swiglu(rms_norm(events.values)), events.offsets)


class QueryDecoding(nn.Module):
    """HyFormer's: queries of both sides attend to a sequence, which is projected once for both."""

    def __init__(self, dim: int, num_heads: int, limits: dict[str, int]) -> None:
        super().__init__()
        self.num_heads, self.limits = num_heads, limits
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, queries: Sides, events: Events, rows: CandidateRows) -> Sides:
        heads = (self.num_heads, self.query.in_features // self.num_heads)
        key, value = unbind(self.key_value(events.values).view(-1, 2, *heads))
        user, item = queries
        made = _attend(
            None if user is None else self.query(user).unflatten(2, heads),
            self.query(item).unflatten(2, heads),
            (key, value, key, value),
            events,
            rows,
            self.limits,
        )
        attended = [None if each is None else self.output(each.flatten(2)) for each in made]
        return attended[0], cast(Tensor, attended[1])


class HeadAttention(nn.Module):
    """MixFormer's: each token is the query of an attention head of its own, over keys and values of that head."""

    def __init__(self, num_user: int, num_item: int, dim: int, head_dim: int, limits: dict[str, int]) -> None:
        super().__init__()
        self.num_user, self.limits = num_user, limits
        self.user = TokenLinear(num_user, dim, head_dim, bias=False) if num_user else None
        self.item = TokenLinear(num_item, dim, head_dim, bias=False)
        self.heads = (num_user + num_item, head_dim)
        self.key_value = nn.Linear(dim, 2 * self.heads[0] * head_dim, bias=False)

    def forward(self, tokens: Sides, events: Events, rows: CandidateRows) -> Sides:
        """tokens -> [R, T_u, head_dim] and [C, T_i, head_dim]."""
        user, item = tokens
        both = unbind(self.key_value(events.values).view(-1, 2, *self.heads))
        sizes = [self.num_user, self.heads[0] - self.num_user]
        (user_key, key), (user_value, value) = (part.split(sizes, 1) for part in both)
        made = _attend(
            None if user is None or self.user is None else self.user(user)[:, None],
            self.item(item)[:, None],
            (user_key, user_value, key, value),
            events,
            rows,
            self.limits,
        )
        return None if made[0] is None else made[0].flatten(1, 2), made[1].flatten(1, 2)


def _attend(
    user: Tensor | None,
    item: Tensor,
    keys_and_values: tuple[Tensor, Tensor, Tensor, Tensor],
    events: Events,
    rows: CandidateRows,
    limits: dict[str, int],
) -> Sides:
    """Queries [R, S, H, d] and [C, S, H, d] to keys and values [N, H, d] of users and of items -> alike."""
    user_key, user_value, key, value = keys_and_values

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, most: int) -> Tensor:
        sizes: dict[str, Any] = {"max_candidates": most, "max_k": limits["max_length"]}
        return target_attention(q, k, v, events.counting(offsets), events.offsets, **sizes)

    attended = attend(item, key, value, rows.offsets, limits["max_candidates"])
    if user is None:
        return None, attended
    each = torch.arange(user.shape[0] + 1, device=user.device, dtype=rows.offsets.dtype)
    return attend(user, user_key, user_value, each, 1), attended


def means(histories: Mapping[str, JaggedSequence], names: list[str], dim: int) -> Tensor | None:
    """[R, fields of all event types, dim], None where there is none."""
    found = [segment_mean(histories[name].values, histories[name].offsets) for name in names]
    return torch.cat([mean.unflatten(1, (-1, dim)) for mean in found], dim=1) if found else None
