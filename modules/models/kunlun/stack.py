"""The sequence of an event type in Kunlun: transformer blocks, each followed by the pooling of what they made.

Shapes: R requests, C candidates, N events of the type, d the width of a token in the model, d_e that of an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from modules.batch import EventType
from modules.broadcast import CandidateRows
from modules.layers.attention.gdpa import GDPABlock, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention, head_dim
from modules.layers.attention.rotary import Rotation, from_end, rotation, time_rotation
from modules.layers.attention.target_attention import SelfAndTargetAttention
from modules.layers.embedding.tokens import JaggedSequence
from modules.layers.norms import add_rms_norm, rms_norm
from modules.layers.pooling.seed_pooling import SeedPooling
from modules.layers.sequence.history import merge_by_time
from modules.layers.sequence.masknet import MaskNet
from modules.models.interformer.arches import LinearPersonalizedFFN
from modules.models.kunlun.config import TIME_SCALE, KunlunConfig, Work, works_of


class EventTokens(NamedTuple):
    """An event type between two layers."""

    values: Tensor  # [N, d_e]
    offsets: Tensor  # [R + 1]
    rotations: dict[int, Rotation]  # by the width of heads
    summary: Tensor | None  # [R, num_tokens, d], normalised; None before the first layer that pools
    target: Tensor | None  # [C, num_target, d], normalised; None before the first layer with target attention
    normed: Tensor | None = None  # RMSNorm of the values, where their layer has computed it for its pooling

    def tensors(self) -> list[Tensor]:
        angles = [each for turned in self.rotations.values() for each in turned]
        parts = [self.values, self.offsets, *angles, self.summary, self.target, self.normed]
        return [part for part in parts if part is not None]


class EventLayer(nn.Module):
    """A transformer block on the events of a type, and the pooling after it; `work` says which parts there are.

        S = S + RMSNorm(GDPA(LN(S); X_sum) + LN(S))                    pffn
        S, T = S + SWA(Norm(S)), TargetAttention(candidates, Norm(S))  attention
        H = HSP(Norm(S))                                               pooling

    What a layer does not compute it passes on: H and T stay in the graph, and layers that read them add to their
    gradients. `width` is d, that of the model; `config` that of the event type.
    """

    def __init__(self, config: KunlunConfig, work: Work, width: int, max_length: int, max_candidates: int) -> None:
        super().__init__()
        dim, num_heads = config.dim, config.num_heads
        self.width = width
        self.dim = dim
        self.max_length = max_length
        self.head_dim = head_dim(dim, num_heads)
        self.window = config.window or None
        self.pffn: nn.Module | None = None
        if work.pffn:
            self.context = _projection(width, dim)
            self.pffn = _pffn(config, max_length)
        self.attention: nn.Module | None = None
        self.num_target = config.num_target if work.attention else 0
        limits: dict[str, Any] = {"max_candidates": max_candidates, "max_length": max_length}
        if work.attention and self.num_target:
            self.attention = SelfAndTargetAttention(dim, num_heads, self.num_target, window=self.window, **limits)
        elif work.attention:
            self.attention = JaggedSelfAttention(dim, num_heads, max_length=max_length, window=self.window)
        if self.num_target:
            self.seeds = nn.Parameter(torch.empty(self.num_target, dim))
            self.target_input, self.target_output = _projection(width, dim), _projection(dim, width)
        self.pooling = _pooling(config, width, max_length) if work.pooling else None
        self.num_tokens = config.num_tokens if work.pooling else 0
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.num_target:
            nn.init.normal_(self.seeds)

    def forward(
        self, events: EventTokens, context: Tensor | None, queries: Tensor | None, rows: CandidateRows
    ) -> EventTokens:
        """context [R, num_context, d] of the request for the PFFN, queries [C, num_target, d] of the candidates for the
        attention to them; None where the layer has no such part."""
        values, offsets, rotations, summary, target, normed = events
        pooled = normed  # what the pooling reads; `normed` is then for the next layer
        if self.pffn is not None and context is not None:
            values, pooled, normed = self._feed_forward(values, offsets, self.context(context))
        if self.attention is not None:
            normed = rms_norm(values) if normed is None else normed
            change, attended = self._attend(normed, offsets, rotations.get(self.head_dim), queries, rows)
            target = target if attended is None else attended
            change = self.dropout(change)
            if self.pooling is not None:
                values, pooled, _, normed = add_rms_norm(values, change, twice=True)
            else:
                values, normed = values + change, None
        elif normed is None and self.pooling is not None:
            values, pooled, _, normed = add_rms_norm(values, None, twice=True)
        if self.pooling is not None:
            assert pooled is not None
            summary = rms_norm(self.pooling(pooled, offsets))
        return EventTokens(values, offsets, rotations, summary, target, normed)

    def _feed_forward(self, values: Tensor, offsets: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The values, and twice their norm, for two readers."""
        if isinstance(self.pffn, GDPABlock):
            return self.pffn(values, offsets, context)
        assert self.pffn is not None
        change = self.dropout(self.pffn(rms_norm(values), offsets, context))
        values, normed, _, again = add_rms_norm(values, change, twice=True)
        return values, normed, again

    def _attend(
        self, normed: Tensor, offsets: Tensor, angles: Rotation | None, queries: Tensor | None, rows: CandidateRows
    ) -> tuple[Tensor, Tensor | None]:
        assert self.attention is not None
        if queries is None:
            return self.attention(normed, offsets, angles), None
        queries = self.seeds + self.target_input(queries)
        change, target = self.attention(queries, rows.offsets, normed, offsets, angles)
        return change, rms_norm(self.target_output(target))


class EventStack(nn.Module):
    """The layers of one event type, or of several whose events are merged by time, with what makes their tokens."""

    def __init__(
        self, events: Sequence[EventType], layers: Sequence[KunlunConfig], width: int, max_candidates: int
    ) -> None:
        super().__init__()
        self.events = list(events)
        self.config = config = layers[0]  # what is read of it is the same in all
        max_length = sum(event.max_length for event in events)
        masks = nn.ModuleList(MaskNet(len(event.fields), width, config.dim) for event in events)
        self.masks = cast("Sequence[MaskNet]", masks)
        pairs = zip(layers, works_of(layers), strict=True)
        made = nn.ModuleList(EventLayer(own, work, width, max_length, max_candidates) for own, work in pairs)
        self.layers = cast("Sequence[EventLayer]", made)
        attending = [layer.head_dim for layer in self.layers if layer.attention is not None]
        self.head_dims = list(dict.fromkeys(attending))

    def begin(self, histories: Sequence[JaggedSequence]) -> EventTokens:
        """Tokens of the events of each type, with their rotations: by how many are younger, and by their age."""
        pairs = zip(self.masks, histories, strict=True)
        merged = merge_by_time([JaggedSequence(mask(each.values), each.offsets, each.times) for mask, each in pairs])
        head_dims = () if self.config.rotation == "none" else self.head_dims
        rotations = {head_dim: self._rotation(merged, head_dim) for head_dim in head_dims}
        return EventTokens(merged.values, merged.offsets, rotations, None, None)

    def _rotation(self, sequence: JaggedSequence, head_dim: int) -> Rotation:
        positions = from_end(sequence.offsets, sequence.values.shape[0])
        if self.config.rotation == "position":
            return rotation(positions, head_dim)
        return time_rotation(positions, -sequence.times, head_dim, TIME_SCALE)


def _projection(width: int, out: int) -> nn.Module:
    """Nothing where the widths agree."""
    return nn.Identity() if width == out else nn.Linear(width, out, bias=False)


def _pffn(config: KunlunConfig, max_length: int) -> nn.Module:
    if config.pffn == "linear":
        return LinearPersonalizedFFN(config.num_context, config.dim, max_length)
    pffn = PersonalizedFFN(
        config.dim,
        config.num_heads,
        config.num_context,
        config.pffn_hidden,
        max_length=max_length,
        **vars(config.pffn_gdpa),
    )
    return GDPABlock(pffn, norm=True)


def _pooling(config: KunlunConfig, width: int, max_length: int) -> SeedPooling:
    hsp = config.pooling == "hsp"
    return SeedPooling(
        config.dim,
        config.num_heads,
        num_seeds=config.num_seeds if hsp else config.num_tokens,
        num_tokens=config.num_tokens,
        terms=config.kron_terms if hsp else 0,
        max_length=max_length,
        out_dim=width,
    )
