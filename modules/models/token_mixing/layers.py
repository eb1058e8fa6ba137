"""The block of token mixing: mixing, feed-forward networks of each token, and where events are read in each layer.

Tokens of requests `user` [R, T_u, D] and of candidates `item` [C, T_i, D]; T = T_u + T_i heads of k = D / T features.
Where all tokens are candidates', T_u = 0 and `user` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.layers.attention.token_attention import TokenAttention
from modules.layers.feed_forward.token_linear import TokenFeedForward
from modules.layers.moe import MoE
from modules.layers.norms import rms_norm
from modules.models.token_mixing.config import TokenMixingConfig
from modules.models.token_mixing.ranks import Mixed, TokenRanks, turned
from modules.models.token_mixing.sequences import (
    EventEncoding,
    EventNetwork,
    Events,
    HeadAttention,
    QueryDecoding,
    Sides,
)


def mix(user: Tensor | None, item: Tensor, ranks: TokenRanks | None = None) -> Mixed:
    """Token h of the result has the h-th slice of every token: user [R, T_u, T, k] and item [C, T_i, T, k], or [C, T_i,
    T_i, k] where slices that go to user tokens have not been made. Done twice it is the identity, but for these.

    With `ranks`, tokens are those of this rank, and so is the result's.
    """
    turn = turned if ranks is None else ranks.turned
    if user is None:
        return Mixed(None, None, *turn([item]))
    num_user = user.shape[1] * (1 if ranks is None else ranks.part[1])
    num_item = user.shape[2] - num_user
    return Mixed(*turn([*user.split([num_user, num_item], 2), item[:, :, -num_item:]]))


class SparseFeedForward(nn.Module):
    """alpha * (sum of g_j expert_j(z_t) over the chosen experts of token t) + shared expert_t(z_t).

    An expert reads whole rows, so what a request shares is copied to its candidates. Rows are filled up with zeros to
    `dim`, and the last `out_dim` features of the results are returned.
    """

    ranks: TokenRanks | None = None

    def __init__(self, num_tokens: int, dim: int, out_dim: int, config: TokenMixingConfig) -> None:
        super().__init__()
        sparse, self.dim, self.out_dim = config.moe, dim, out_dim
        hidden = max(1, int(config.expansion * dim) // sparse.num_experts)
        kinds = num_tokens if "token_networks" not in config.without else 1
        self.moe = MoE(
            dim,
            hidden,
            sparse.num_experts * kinds,
            sparse.top_k,
            normalize_weights=False,
            bias_update_rate=sparse.bias_update_rate,
            num_kinds=kinds,
        )
        options: dict[str, Any] = {
            "per_token": "token_networks" not in config.without,
            "bias": config.bias,
            "std": config.output_std,
        }
        self.shared = TokenFeedForward(num_tokens, dim, hidden, dim, **options) if sparse.shared_expert else None
        self.alpha = sparse.alpha
        self.dropout = nn.Dropout(config.dropout)
        if config.output_std:
            nn.init.normal_(self.moe.experts.w_down, std=config.output_std)

    def forward(
        self, own: Tensor, shared: Tensor | None = None, rows: CandidateRows | None = None, *, normalize: bool = False
    ) -> Tensor:
        z = own if shared is None or rows is None else torch.cat([rows.expand(shared), own], dim=2)
        z = rms_norm(z) if normalize else z
        z = F.pad(z, (0, self.dim - z.shape[2]))
        y = self.alpha * self.moe(z)
        if self.shared is not None:
            y = y + (self.shared(z) if self.ranks is None else self.ranks.call(self.shared, z))
        return self.dropout(y[..., self.dim - self.out_dim :])


class FeedForward(nn.Module):
    """The networks of the tokens of both sides: of `Mixed` tokens, or unmixed ones of `in_dim`."""

    ranks: TokenRanks | None = None

    def __init__(self, config: TokenMixingConfig, *, mixed: bool, in_dim: int = 0, narrow: bool = False) -> None:
        """`narrow`: of item tokens only the slices of item tokens are made."""
        super().__init__()
        dim, total = config.token_dim, config.num_tokens
        num_user = config.of_user if config.one_way else 0
        of_user = dim // total * num_user  # T_u k
        own, user, shared = (dim - of_user, of_user, of_user) if mixed else (in_dim, in_dim, 0)
        self.item = _network(config, total - num_user, own, shared, dim - of_user if narrow else dim)
        self.user = _network(config, num_user, user, 0, dim) if num_user else None

    def forward(self, mixed: Mixed, rows: CandidateRows, *, normalize: bool = False) -> Sides:
        call = nn.Module.__call__ if self.ranks is None else self.ranks.call
        item = call(self.item, mixed.own, mixed.shared, rows, normalize=normalize)
        return None if self.user is None else call(self.user, mixed.user, normalize=normalize), item


def _network(config: TokenMixingConfig, num_tokens: int, own: int, shared: int, out: int) -> nn.Module:
    if config.feed_forward == "moe":
        return SparseFeedForward(num_tokens, config.token_dim, out, config)
    return TokenFeedForward(
        num_tokens,
        own,
        int(config.expansion * config.token_dim),
        out,
        shared_dim=shared,
        activation=None if config.feed_forward == "linear" else config.feed_forward,
        per_token="token_networks" not in config.without,
        bias=config.bias,
        std=config.output_std,
        dropout=config.dropout,
    )


class MixingBlock(nn.Module):
    """Tokens of both sides -> tokens of both sides, by `config.mixing`:

        add        s = x + Mix(x);  x' = s + FFN(s)                              RankMixer
        revert     h = Mix(x) + FFN(Mix(x));  x' = x + FFN(Unmix(h))             TokenMixer-Large
        boost      x' = x + FFN(Mix(x))                                          HyFormer, MixFormer
        attention  s = x + MHA(x);  x' = s + FFN(s)
        none       x' = x + FFN(x)

    Norms are those of the inputs of Mix, MHA and FFN (pre), or of every sum (post). Under `revert`, what is mixed has a
    norm of its own in place of x. Without `residual` the sums have no first term. With `ranks`, x are tokens of this
    rank alone.
    """

    ranks: TokenRanks | None = None

    def __init__(self, config: TokenMixingConfig, max_candidates: int) -> None:
        super().__init__()
        self.mixing, self.residual, self.pre = config.mixing, "residuals" not in config.without, config.norm == "pre"
        self.num_tokens, dim = config.num_tokens, config.token_dim
        self.attention: TokenAttention | None = None
        if config.mixing == "attention":
            self.attention = TokenAttention(dim, config.num_heads, max_candidates=max_candidates)
        self.inner = FeedForward(config, mixed=True, narrow=True) if config.mixing == "revert" else None
        self.ffn = FeedForward(config, mixed=config.mixing in ("revert", "boost"), in_dim=dim)

    def mixed(self, x: Sides, ranks: TokenRanks | None = None) -> Mixed | None:
        """What the block mixes first, of tokens of all ranks or, with `ranks`, of this one."""
        if self.mixing in ("attention", "none"):
            return None
        return self._mix(x if self.mixing == "revert" else self.before(x), ranks)

    def forward(self, x: Sides, rows: CandidateRows, mixed: Mixed | None = None) -> Sides:
        """`mixed`: that of x, if it is there already."""
        mixed = mixed or self.mixed(x, self.ranks)
        if mixed is not None:
            if self.mixing == "revert":
                return self._revert(x, mixed, rows)
            if self.mixing == "boost":
                return self.added(x, self.ffn(mixed, rows))
            x = self._add(x, mixed, rows)
        elif self.attention is not None:
            x = self.added(x, self.attention(*self.before(x), rows))
        user, item = self.before(x)
        return self.added(x, self.ffn(Mixed(user, None, item), rows))

    def _add(self, x: Sides, mixed: Mixed, rows: CandidateRows) -> Sides:
        """x + Mix(x), in which what users give to items is added to the items without a copy."""
        user, shared, own = mixed
        if user is None or shared is None:
            return self.added(x, (None, own))
        width = shared.shape[2]
        first, last = x[1].split([width, own.shape[2]], dim=2)
        if not self.residual:
            first = torch.zeros_like(first)
        item = torch.cat([rows.add(first, shared), last + own if self.residual else own], dim=2)
        user = F.pad(user, (0, own.shape[2]))
        if self.residual and x[0] is not None:
            user = x[0] + user
        return self._after(user, item)

    def _revert(self, x: Sides, mixed: Mixed, rows: CandidateRows) -> Sides:
        assert self.inner is not None
        user = None if mixed.user is None else F.pad(mixed.user, (0, x[1].shape[2] - mixed.user.shape[2]))
        mixed_user, mixed_item = self.added((user, mixed.own), self.inner(mixed, rows, normalize=self.pre))
        unmixed = self._mix((mixed_user, mixed_item), self.ranks)
        return self.added(x, self.ffn(unmixed, rows, normalize=self.pre))

    def _mix(self, x: Sides, ranks: TokenRanks | None) -> Mixed:
        user, item = x
        if user is None:
            return mix(None, item.unflatten(2, (self.num_tokens, -1)), ranks)
        head = user.shape[2] // self.num_tokens
        return mix(user.unflatten(2, (self.num_tokens, head)), item.unflatten(2, (-1, head)), ranks)

    def before(self, x: Sides) -> Sides:
        return (None if x[0] is None else rms_norm(x[0]), rms_norm(x[1])) if self.pre else x

    def added(self, x: Sides, change: Sides) -> Sides:
        user, item = change
        if self.residual:
            user = None if user is None or x[0] is None else x[0] + user
            item = x[1] + item
        return self._after(user, item)

    def _after(self, user: Tensor | None, item: Tensor) -> Sides:
        return (user, item) if self.pre else (None if user is None else rms_norm(user), rms_norm(item))


class TokenMixingLayer(nn.Module):
    """A block, and before it HyFormer's query decoding (`sequences=queries`) or behind it MixFormer's attention of
    each token to the events and its second network (`heads`)."""

    def __init__(self, config: TokenMixingConfig, max_lengths: Sequence[int], max_candidates: int) -> None:
        super().__init__()
        self.kind, self.num_queries = config.sequences, config.num_queries
        self.block = MixingBlock(config, max_candidates)
        dim, num_user = config.token_dim, config.of_user if config.one_way else 0
        limits = [{"max_candidates": max_candidates, "max_length": length} for length in max_lengths]
        self.max_lengths = list(max_lengths)
        self.encodings = nn.ModuleList()
        self.attend = nn.ModuleList()
        if self.kind == "queries":
            self.encodings = nn.ModuleList(EventEncoding(config, length) for length in max_lengths)
            self.max_lengths = [cast(EventEncoding, each).longest for each in self.encodings]
            for each, longest in zip(limits, self.max_lengths, strict=True):
                each["max_length"] = longest
            self.attend = nn.ModuleList(QueryDecoding(dim, config.num_heads, each) for each in limits)
        elif self.kind == "heads" and limits:
            num_item = config.num_tokens - num_user
            own = "layer_networks" not in config.without
            self.swiglu = EventNetwork(config) if own else None
            heads = [HeadAttention(num_user, num_item, dim, config.head_dim, each) for each in limits]
            self.attend = nn.ModuleList(heads)
            self.output = FeedForward(config, mixed=False, in_dim=dim + len(limits) * config.head_dim)

    def forward(self, x: Sides, events: list[Events], rows: CandidateRows, mixed: Mixed | None = None) -> Any:
        """-> (tokens, events of the next layer)."""
        if self.kind == "queries" and self.attend:
            num_requests = rows.offsets.shape[0] - 1
            pairs = zip(self.encodings, events, strict=True)
            events = [encoding(each, num_requests) for encoding, each in pairs]
            x = self._decode(x, events, rows)
        x = self.block(x, rows, mixed)
        if self.kind == "heads" and self.attend:
            x = self._attend(x, events, rows)
        return x, events

    def _decode(self, x: Sides, events: list[Events], rows: CandidateRows) -> Sides:
        of_all = self.num_queries * len(events)
        queries = [[None] * len(events) if side is None else side[:, :of_all].chunk(len(events), 1) for side in x]
        decoded = [
            attend((user, item), each, rows)
            for attend, user, item, each in zip(self.attend, *queries, events, strict=True)
        ]
        users, items = zip(*decoded, strict=True)
        user, item = x
        joined = torch.cat([*items, item[:, of_all:]], dim=1)
        return None if user is None else torch.cat([*users, user[:, of_all:]], dim=1), joined

    def _attend(self, x: Sides, events: list[Events], rows: CandidateRows) -> Sides:
        if self.swiglu is not None:
            events = [self.swiglu(each) for each in events]
        queries = self.block.before(x)
        attended = [attend(queries, each, rows) for attend, each in zip(self.attend, events, strict=True)]
        users, items = zip(*attended, strict=True)
        user, item = queries
        joined = torch.cat([item, *items], dim=2)
        mixed = Mixed(None if user is None else torch.cat([user, *users], dim=2), None, joined)
        return self.block.added(x, self.output(mixed, rows))
