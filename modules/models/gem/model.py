"""A model after what Meta has published about GEM (engineering blog, 2025-11-10): enhanced Wukong over features, a
pyramid of parallel modules over long histories, their summaries interleaved in every layer, and heads of domains on one
trunk. docs/gem.md says what the description leaves open, which is much, and what is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows, VendorTokens
from modules.config import option
from modules.core.side_stream import SideStream
from modules.layers.attention.cross_layer import CrossLayerAttention
from modules.layers.attention.gdpa import GDPAConfig
from modules.layers.attention.rotary import Rotation, from_end, rotation
from modules.layers.attention.target_attention import TargetAttention
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.block import FeedForwardBlock
from modules.layers.interaction.lce import LCE
from modules.layers.interaction.wukong import WukongConfig, WukongLayer
from modules.layers.norms import rms_norm
from modules.layers.sequence.history import HistoryEncoder
from modules.layers.sequence.pyramid import PyramidLevel, coarser
from modules.models.gem.heads import DomainHeads
from modules.models.ranking import WITHOUT_HISTORIES, PlainLogits, Ranker
from modules.models.summaries import SummariesConfig


@dataclass(kw_only=True)
class GEMConfig(SummariesConfig):
    name: str = "gem"
    levels: list[int] = option([32, 8])  # pieces into which coarser levels cut a history; the finest has all events
    domain_feature: str = ""  # categorical feature of the request whose value says which heads score; "": one domain

    shared: ClassVar[frozenset[str]] = frozenset({"levels", "domain_feature"})
    retired: ClassVar[dict[str, Any]] = {"cross_layer": True, "level_gdpa": vars(GDPAConfig()), **WukongConfig.retired}
    moved: ClassVar[dict[str, str]] = WukongConfig.beside

    def check_layer(self) -> None:
        if self.dim % (2 * self.num_heads):
            pairs = 2 * self.num_heads
            raise ValueError(
                f"model.dim={self.dim} must be a multiple of 2 * model.num_heads={pairs} (rotary positions turn "
                f"pairs), e.g. model.dim={pairs * max(1, self.dim // pairs)}"
            )

        if self.num_target < 1:
            raise ValueError(f"model.num_target={self.num_target} must be at least 1, e.g. model.num_target=2")

    def check(self) -> None:
        super().check()
        if min(self.levels, default=1) < 1:
            raise ValueError(f"model.levels={self.levels} must be at least 1 each, e.g. model.levels=[32,8]")

    def graphs_refusal(self) -> str | None:
        if self.domain_feature:
            return (
                f"model.domain_feature={self.domain_feature}, whose ids a graph is not given; use "
                'runtime.cuda_graphs=false or model.domain_feature=""'
            )
        return super().graphs_refusal()


class LevelTokens(NamedTuple):
    """One level of the pyramid between two layers."""

    values: Tensor  # [N, d]; of coarser levels [R * pieces, d]
    offsets: Tensor  # [R + 1]
    rotations: dict[int, Rotation]  # by the width of heads


class GEMLayer(nn.Module):
    """The parallel modules of the pyramid's levels, then the enhanced Wukong layer on their summaries and the features.

        context = Norm(LCE([request tokens | H of the layer before]))
        S_p, H_p = level p (S_p; context)                              side by side
        T = Norm(target attention(candidates, S_0))
        X' = WukongLayer([X | T | H_0 | H_1 ...])
        X' = Norm(X' + FF(X'))                                         feed_forward
        X = Norm(X' + MHA(X', X of all earlier layers))

    The first layer, which has none `before` it, gets the request's features as tokens of the request; later ones have
    them in X.
    """

    def __init__(self, config: GEMConfig, spec: FeatureSpec, num_levels: int, before: GEMLayer | None) -> None:
        super().__init__()
        first = before is None
        num_candidate = spec.num_candidate_tokens if before is None else before.num_out
        num_request = spec.num_request_tokens
        of_request, of_vendor = num_request * first, spec.num_vendor_tokens * first
        self.num_out: int = config.wukong.num_fmb + config.wukong.num_lcb
        self.num_summaries = num_levels * config.num_tokens
        self.head_dim = config.dim // config.num_heads
        self.context: LCE | None = None
        levels: list[PyramidLevel] = []
        if num_levels:
            known = 0 if before is None else before.num_summaries
            self.context = LCE(num_request + known, config.num_context)
            self.queries = LCE(num_candidate, config.num_target, of_request, of_vendor)
            self.seeds = nn.Parameter(torch.empty(config.num_target, config.dim))
            limits: dict[str, Any] = {"max_candidates": spec.max_candidates, "max_length": spec.max_events}
            self.target = TargetAttention(config.dim, config.num_heads, config.num_target, **limits)
            levels = [_level(config, spec.max_events, config.window), *(_level(config, n) for n in config.levels)]
        self.levels = cast("Sequence[PyramidLevel]", nn.ModuleList(levels))
        self.wukong = WukongLayer(
            num_candidate + config.num_target * bool(num_levels),
            config.dim,
            hidden=config.interaction_hidden,
            dropout=config.dropout,
            num_request=of_request + self.num_summaries + of_vendor,
            max_candidates=spec.max_candidates,
            block=FeedForwardBlock(config, config.dim),
            **config.wukong.layer_options(),
        )
        self.cross = None if first else CrossLayerAttention(config.dim, config.num_heads)
        self.dim = config.dim
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.levels:
            nn.init.normal_(self.seeds)

    def forward(
        self,
        x: Tensor,
        request: Tensor,
        levels: Sequence[LevelTokens],
        summaries: Sequence[Tensor],
        earlier: Sequence[Tensor],
        rows: CandidateRows,
        vendor: VendorTokens | None = None,
    ) -> tuple[Tensor, list[LevelTokens], list[Tensor]]:
        """X [C, n, d], request tokens [R, n_u, d], the levels with their summaries of the layer before, and X of all
        earlier layers, which the first one has none of -> the same three of this layer. The first one also takes the
        tokens of vendors."""
        of_request = None if earlier else request
        own, shared = [x], [] if of_request is None else [of_request]
        levels = list(levels)
        made: list[Tensor] = []
        if self.context is not None:
            context = rms_norm(self.context(torch.cat([request, *summaries], dim=1)))
            queries = self.seeds + rms_norm(self.queries(x, of_request, rows, vendor))
            levels, made, target = self._sequences(levels, context, queries, rows)
            own.append(target)
            shared += made
        given = torch.cat(shared, dim=1) if shared else None
        if given is not None and vendor is not None:
            given, rows = vendor.below(given), vendor.of_candidate
        x = self.wukong(torch.cat(own, dim=1), given, None if given is None else rows)
        if self.cross is not None:
            x = self.cross(x, torch.cat(list(earlier), dim=1))
        return x, levels, made

    def _sequences(
        self, levels: Sequence[LevelTokens], context: Tensor, queries: Tensor, rows: CandidateRows
    ) -> tuple[list[LevelTokens], list[Tensor], Tensor]:
        works, results = [], []
        for lane, (level, (values, offsets, rotations)) in enumerate(zip(self.levels, levels, strict=True)):
            angles = rotations[self.head_dim]
            with SideStream(values, offsets, *angles, context, queries, rows.offsets, lane=lane) as work:
                values, normed, summary = level(values, offsets, angles, context)
                results.append([values, summary])
                if lane == 0:
                    results[0].append(rms_norm(self.target(queries, rows.offsets, normed, offsets)))
            works.append(work)
        for work, result in zip(works, results, strict=True):
            work.join_all(result)
        after = [before._replace(values=result[0]) for before, result in zip(levels, results, strict=True)]
        return after, [result[1] for result in results], results[0][2]


def _level(config: GEMConfig, max_length: int, window: int | None = None) -> PyramidLevel:
    return PyramidLevel(
        config.dim,
        config.num_heads,
        num_context=config.num_context,
        hidden=config.pffn_hidden,
        num_tokens=config.num_tokens,
        max_length=max_length,
        window=window,
        dropout=config.dropout,
        pffn=config.pffn_gdpa,
    )


class GEM(PlainLogits, Ranker):
    """Logits [C, tasks] from tokens. Histories, of all event types merged by time, stay at the R rows of requests."""

    Config = GEMConfig
    takes_vendors = True

    def __init__(self, spec: FeatureSpec, config: GEMConfig) -> None:
        super().__init__()
        self.pieces = config.levels if spec.histories else []
        self.history = HistoryEncoder(spec, config.dim) if spec.histories else None
        num_levels = 1 + len(self.pieces) if spec.histories else 0
        layers: list[GEMLayer] = []
        for own in config.of_layers():
            layers.append(GEMLayer(own, spec, num_levels, layers[-1] if layers else None))
        self.layers = cast("Sequence[GEMLayer]", nn.ModuleList(layers))
        self.head_dims = list(dict.fromkeys(layer.head_dim for layer in layers))
        width = layers[-1].num_out * config.dim
        self.heads = DomainHeads(spec, width, config.head_hidden, config.dropout, config.domain_feature)
        self.plain_heads = config.make_plain_heads(spec)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        x, request = rms_norm(tokens.candidate), rms_norm(tokens.request)
        vendor = None if tokens.vendor is None else VendorTokens.of(rms_norm(tokens.vendor), batch)
        levels = self._levels(tokens)
        summaries: list[Tensor] = []
        earlier: list[Tensor] = []
        for layer in self.layers:
            x, levels, summaries = layer(x, request, levels, summaries, earlier, rows, None if earlier else vendor)
            earlier.append(x)
        if self.only_vectors():
            return torch.cat(summaries, dim=1).flatten(1)
        return self.with_plain(self.heads(x.flatten(1), rows, batch), tokens, batch)

    def vectors_refusal(self) -> str | None:
        return WITHOUT_HISTORIES if self.history is None else None

    def _levels(self, tokens: Tokens) -> list[LevelTokens]:
        """All events, then their means over ever longer pieces of the history."""
        if self.history is None:
            return []
        values, offsets = self.history(tokens)
        found = [(values, offsets), *(coarser(values, offsets, count) for count in self.pieces)]
        levels = []
        for each, starts in found:
            positions = from_end(starts, each.shape[0])
            levels.append(LevelTokens(each, starts, {width: rotation(positions, width) for width in self.head_dims}))
        return levels
