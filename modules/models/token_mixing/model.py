"""Token mixing: a stack of blocks over T tokens, then the heads. docs/token_mixing.md has the equations of RankMixer
(arXiv 2507.15551), TokenMixer-Large (2602.06563), HyFormer (2601.12681) and MixFormer (2602.14110), whose one-way mask
all of them have here: user tokens run once a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.layers.attention.target_attention import TargetAttention
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.mlp import TaskHeads
from modules.layers.interaction.lce import LCE
from modules.layers.moe import Router
from modules.layers.norms import rms_norm
from modules.models.ranking import LowerLogits, Ranker
from modules.models.token_mixing.config import TokenMixingConfig
from modules.models.token_mixing.layers import FeedForward, MixingBlock, SparseFeedForward, TokenMixingLayer
from modules.models.token_mixing.ranks import TokenRanks
from modules.models.token_mixing.sequences import EventNetwork, Events, EventTokens, Sides, means
from modules.models.token_mixing.tokens import GlobalTokens, SideTokens, even_groups, named_groups


class Tokeniser(nn.Module):
    """The tokens of both sides before the first block: queries of sequences, a global token, then groups or slices.

    Features of a request are its tokens and, with `sequences=mean`, the means of its history fields. Those of a
    candidate are its tokens and, with `target`, what it attends to in each event type.
    """

    def __init__(self, spec: FeatureSpec, config: TokenMixingConfig, num_sequences: int) -> None:
        super().__init__()
        self.config = config
        self.events = [event.name for event in spec.histories]
        user = [*(each.name for each in spec.request), *(each.name for each in spec.request_vectors)]
        user = [*user, *["request_dense"] * bool(spec.request_dense)] or ["any_request"]
        item = [*(each.name for each in spec.candidate), *(each.name for each in spec.candidate_vectors)]
        item += ["candidate_dense"] * bool(spec.candidate_dense)
        pools = [key for event in spec.histories for key in event.keys]
        self.num_queries = num_sequences * config.num_queries if config.sequences == "queries" else 0
        dim, width = config.dim, config.token_dim
        if config.sequences == "mean":
            user += pools
        self.target: nn.ModuleList = nn.ModuleList()
        if config.sequences == "target":
            item += self.events
            self.query = LCE(spec.num_candidate_tokens, len(self.events)) if self.events else None
            self.event_tokens = nn.ModuleList(nn.Linear(len(event.fields) * dim, dim) for event in spec.histories)
            self.target = nn.ModuleList(
                TargetAttention(
                    dim, config.num_heads, 1, max_candidates=spec.max_candidates, max_length=event.max_length
                )
                for event in spec.histories
            )
        self.pools = bool(self.num_queries) and config.query_from == "all"
        of_user = 0 if config.query_from == "candidate" else len(user) + self.pools * len(pools)
        reserved = self.num_queries + config.global_token
        sizes = []
        for side, count in (("user", config.of_user), ("item", config.num_tokens - config.of_user)):
            left = count - reserved if config.one_way or side == "item" else count
            if left < 1:
                raise ValueError(
                    f"the {side} side has {count} of model.num_tokens={config.num_tokens}, of which queries and the "
                    f"global token take {reserved}, and features need one; use e.g. model.num_tokens="
                    f"{2 * (reserved + 1)} with model.user_tokens=null"
                )
            sizes.append(left)
        groups: list[list[list[int]] | None] = [None, None]
        if config.groups:
            groups = list(named_groups(config.groups, user, item))
            if [len(each or ()) for each in groups] != sizes:
                raise ValueError(
                    f"model.groups has {len(groups[0] or ())} groups of requests' and {len(groups[1] or ())} of "
                    f"candidates' features; with the other keys there are {sizes[0]} and {sizes[1]} tokens for them"
                )
        elif config.tokens == "groups":
            groups = [even_groups(len(names), size) for names, size in zip((user, item), sizes, strict=True)]
        self.user = SideTokens(len(user), dim, sizes[0], width, groups[0])
        self.item = SideTokens(len(item), dim, sizes[1], width, groups[1])
        of_query = len(item) * dim, of_user * dim
        self.item_queries = GlobalTokens(*of_query, self.num_queries, width) if self.num_queries else None
        self.user_queries = (
            GlobalTokens(of_query[1], 0, self.num_queries, width) if self.num_queries and config.one_way else None
        )
        of_all = len(item) * dim, len(user) * dim
        self.item_global = GlobalTokens(*of_all, 1, width) if config.global_token else None
        self.user_global = GlobalTokens(of_all[1], 0, 1, width) if config.global_token and config.one_way else None

    def forward(self, tokens: Tokens, rows: CandidateRows) -> Sides:
        dim = self.config.dim
        pooled = means(tokens.histories, self.events, dim)
        request = rms_norm(tokens.request)
        user = [request] if pooled is None or self.config.sequences != "mean" else [request, rms_norm(pooled)]
        item = [rms_norm(tokens.candidate)]
        if self.target:
            item.append(self._attended(item[0], tokens, rows))
        of_user, of_item = torch.cat(user, dim=1), torch.cat(item, dim=1)
        users, items = [self.user(of_user)], [self.item(of_item)]
        flat_user, flat_item = of_user.flatten(1), of_item.flatten(1)
        if self.item_global is not None:
            items.insert(0, self.item_global(flat_item, flat_user, rows))
            users[:0] = [] if self.user_global is None else [self.user_global(flat_user)]
        if self.item_queries is not None:
            if self.pools and pooled is not None:
                flat_user = torch.cat([flat_user, rms_norm(pooled).flatten(1)], dim=1)
            known = None if self.config.query_from == "candidate" else flat_user
            items.insert(0, self.item_queries(flat_item, known, rows))
            users[:0] = [] if self.user_queries is None else [self.user_queries(flat_user)]
        if self.config.one_way:
            return torch.cat(users, dim=1), torch.cat(items, dim=1)
        items.append(rows.expand(users[0]))
        return None, torch.cat(items, dim=1)

    def _attended(self, candidate: Tensor, tokens: Tokens, rows: CandidateRows) -> Tensor:
        assert self.query is not None
        queries = rms_norm(self.query(candidate)).split(1, dim=1)
        attended = []
        for name, linear, target, query in zip(self.events, self.event_tokens, self.target, queries, strict=True):
            history = tokens.histories[name]
            attended.append(target(query, rows.offsets, rms_norm(linear(history.values)), history.offsets))
        return rms_norm(torch.cat(attended, dim=1))


class TokenMixing(LowerLogits, Ranker):
    """Logits [C, tasks] from tokens. Under `one_way`, all of the user side runs at the R rows of requests."""

    Config = TokenMixingConfig

    def __init__(self, spec: FeatureSpec, config: TokenMixingConfig) -> None:
        super().__init__()
        self.config = config
        reads = config.sequences in ("queries", "heads")
        self.event_tokens = EventTokens(spec, config) if reads and spec.histories else None
        lengths = [] if self.event_tokens is None else self.event_tokens.max_lengths
        self.tokeniser = Tokeniser(spec, config, len(lengths))
        shares = config.sequences == "heads" and "layer_networks" in config.without and lengths
        self.event_network = EventNetwork(config) if shares else None  # what all layers would make is made once
        layers: list[TokenMixingLayer] = []
        for own in config.of_layers():
            layers.append(TokenMixingLayer(own, lengths, spec.max_candidates))
            lengths = layers[-1].max_lengths
        self.layers = cast("Sequence[TokenMixingLayer]", nn.ModuleList(layers))
        self.outputs, self.max_candidates = spec.num_outputs, spec.max_candidates
        self.heads = self._heads()
        lower = range(len(layers) - 1) if config.lower_weight else ()
        self.lower_heads = nn.ModuleList(self._heads() for _ in lower)
        self.lower_logits: list[Tensor] = []
        self.ranks: TokenRanks | None = None

    def share_tokens(self, group: dist.ProcessGroup, payload: str) -> bool:
        """Let each rank of `group` have the networks of an equal part of the tokens: all of them run the model together
        from here on. False where attention reads all tokens, or the ranks do not divide those of each side."""
        configs, count = self.config.of_layers(), group.size()
        user = self.config.of_user * self.config.one_way
        if (
            self.event_tokens is not None
            or any(each.mixing == "attention" for each in configs)
            or "token_networks" in self.config.without
            or user % count
            or (self.config.num_tokens - user) % count
        ):
            return False
        self.ranks = TokenRanks(group, payload, self.config.token_dim // self.config.num_tokens)
        for module in self.modules():
            if isinstance(module, MixingBlock | FeedForward | SparseFeedForward):
                module.ranks = self.ranks
            elif isinstance(module, Router):
                module.part = self.ranks.part
        return True

    def _heads(self) -> TaskHeads:
        config = self.config
        return TaskHeads(config.token_dim, config.head_hidden, self.outputs, config.dropout)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        if self.only_vectors() and not self.config.one_way:
            pooled = means(tokens.histories, list(tokens.histories), self.config.dim)
            return torch.cat([tokens.request, *([] if pooled is None else [pooled])], dim=1).flatten(1)
        x = self.tokeniser(tokens, rows)
        events: list[Events] = [] if self.event_tokens is None else self.event_tokens(tokens.histories)
        if self.event_network is not None:
            events = [self.event_network(each) for each in events]
        ranks, mixed, of_all, sizes = self.ranks, None, rows, [[0]]
        if ranks is not None:
            x, mixed, of_all, sizes = ranks.enter(x, self.layers[0].block.mixed(x), rows)
        earlier, interval, last = x, self.config.interval, len(self.layers) - 1
        lower: list[list[Tensor]] = []
        for index, layer in enumerate(self.layers):
            x, events = layer(x, events, of_all, mixed if index == 0 else None)
            if interval and (index + 1) % interval == 0 and index < last:
                user = None if x[0] is None or earlier[0] is None else x[0] + earlier[0]
                earlier = x = user, x[1] + earlier[1]
            if self.training and index < len(self.lower_heads):
                lower.append(self._sums(x))
        if self.only_vectors() and x[0] is not None:
            vectors = rms_norm(x[0])
            return (vectors if ranks is None else torch.cat(ranks.leave([vectors], sizes[:1])[0], 1)).flatten(1)
        sums = [torch.cat(each, 1) for each in zip(*lower, self._sums(x), strict=True)]
        if ranks is not None:
            sums = [torch.stack(parts).sum(0) for parts in ranks.leave(sums, sizes)]
        total = sums[0] if len(sums) == 1 else rows.add(sums[1], sums[0])
        *lower_means, mean = (total / self.config.num_tokens).split(self.config.token_dim, 1)
        self.lower_logits = [head(each) for head, each in zip(self.lower_heads, lower_means, strict=False)]
        return self.heads(mean)

    def _sums(self, x: Sides) -> list[Tensor]:
        """Of the tokens of requests, if there are some, and of candidates."""
        return [rms_norm(side).sum(1) for side in x if side is not None]

    def take_lower(self) -> list[tuple[float, Tensor]]:
        made, self.lower_logits = self.lower_logits, []
        return [(self.config.lower_weight, logits) for logits in made]
