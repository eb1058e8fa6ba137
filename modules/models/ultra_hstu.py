"""HSTU as a ranking model (Zhai et al., arXiv 2402.17152) with what ULTRA-HSTU adds (arXiv 2602.16986): one sequence of
a request's context, its events and its candidates.

Candidates are targets: they see context and events, and none the others, so that events run once a request and no score
depends on who else is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.tokens import place_rows
from modules.batch import EventType, FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import EventStacksConfig, TokensConfig, layer_config, option, shown
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.feed_forward.mlp import MLP, TaskHeads
from modules.layers.norms import rms_norm
from modules.layers.sequence.history import merge_by_time
from modules.layers.sequence.newest import newest, with_spare_rows
from modules.models.hstu import HSTULayerConfig
from modules.models.kunlun.config import check_events
from modules.models.ranking import RequestVectors
from modules.models.token_mixing.tokens import SideTokens


@dataclass(kw_only=True)
class UltraHSTUConfig(EventStacksConfig, HSTULayerConfig, TokensConfig):
    name: str = "ultra_hstu"
    num_heads: int = option(4, least=1)
    request_tokens: int = option(1, least=1)  # made of the request's features; they see all events, and all see them
    window: int = 0  # so many events back, and the prefix, are what an event sees; 0: all
    prefix: int = 0  # a request's first tokens, its own among them, that the window hides from none
    newest: int = 0  # events that this layer and those above go on with; 0: as many as below
    event_stacks: str = option("merged", choices=["own", "merged"])  # candidates stand in each | one for all, by time

    usual_layers: ClassVar[int] = 3
    shared: ClassVar[frozenset[str]] = frozenset({"request_tokens"})

    def of_type(self, event_type: str) -> UltraHSTUConfig:
        """The configuration of an event type's stack. ValueError that names the key for what it cannot have."""
        own = dict(self.events.get(event_type, {}))
        base = replace(self, event_stacks="merged", events={})
        if own.keys() & {"num_layers", "layers"}:
            base = replace(base, layers=None)
        if isinstance(layers := own.get("layers"), list):
            own.setdefault("num_layers", len(layers))
        return layer_config(base, own, f"model.events.{event_type}", [*self.layer_keys(), "num_layers", "layers"])

    def check(self) -> None:
        super().check()
        for name, own in {name: self.of_type(name) for name in self.events}.items():
            try:
                own.check()
            except ValueError as error:
                raise ValueError(f"model.events.{name}: {error}") from error

    def check_layer(self) -> None:
        super().check_layer()
        if self.token_dim % self.num_heads:
            raise ValueError(
                f"model.token_dim={self.token_dim} must be a multiple of model.num_heads={self.num_heads}, e.g. "
                f"model.token_dim={self.num_heads * max(1, self.token_dim // self.num_heads)}"
            )
        for name in ("window", "prefix", "newest"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0, e.g. model.{name}=256")
        if self.prefix and not self.window:
            raise ValueError(f"model.prefix={self.prefix} says nothing without a window; use e.g. model.window=256")

    def notes(self) -> list[str]:
        own = [f"{name}: {shown(changes)}" for name, changes in self.events.items()]
        return ["events run at the rows of requests, candidates behind them", *own]


class Rows(NamedTuple):
    """Rows of tokens and where in them context, events and candidates are, one part behind another."""

    places: Tensor  # [tokens] int64
    offsets: Tensor  # [rows + 1]
    num_targets: Tensor  # [rows]
    times: Tensor  # [tokens] int64 seconds, 0 at the request
    next_times: Tensor  # [tokens] of the next event, or the request

    @classmethod
    def of(cls, front: int, event_offsets: Tensor, times: Tensor, target_offsets: Tensor, num_targets: int) -> Rows:
        """`front` tokens, the events of `times` [N] and the candidates of each row."""
        index = torch.arange(event_offsets.shape[0], device=times.device)
        offsets = event_offsets + target_offsets + front * index
        of_front = (offsets[:-1, None] + torch.arange(front, device=times.device)).flatten()
        parts = [of_front]
        for own, total, before in (
            (event_offsets, times.shape[0], target_offsets[:-1]),
            (target_offsets, num_targets, event_offsets[1:]),
        ):
            row = torch.repeat_interleave(index[:-1], own.diff(), output_size=total)
            parts.append(torch.arange(total, device=times.device) + before[row] + front * (row + 1))
        places = torch.cat(parts)
        zeros = times.new_zeros(of_front.shape[0]), times.new_zeros(num_targets)
        dated = torch.empty_like(places).scatter(0, places, torch.cat([zeros[0], times, zeros[1]]))
        # The first token of the next row, which is the last event's next where there is no candidate, has 0 too.
        return cls(places, offsets, target_offsets.diff(), dated, dated.roll(-1).index_fill(0, of_front, 0))


class EventStack(nn.Module):
    """The layers of events of some types, merged by time, with the context before and the candidates behind them."""

    def __init__(self, events: Sequence[EventType], config: UltraHSTUConfig, max_candidates: int) -> None:
        super().__init__()
        width, self.front = config.token_dim, config.request_tokens
        self.names = [event.name for event in events]
        self.events = nn.ModuleList(MLP(len(event.fields) * config.dim, [width], width) for event in events)
        longest = sum(event.max_length for event in events)
        self.newest, layers = [], []
        for own in config.of_layers():
            cut = min(own.newest, longest) if own.newest else longest
            self.newest.append(cut if cut < longest else 0)
            longest = cut
            # Of a row's places, candidates stand at one behind all others.
            layers.append(
                own.layer(
                    width,
                    max_length=self.front + longest + 1,
                    contextual=self.front,
                    window=own.window or None,
                    prefix=own.prefix,
                    max_targets=max_candidates,
                )
            )
        self.layers = nn.ModuleList(layers)

    def run(
        self, front: Tensor, histories: dict[str, JaggedSequence], targets: Tensor, target_offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What context [R, front, width] and candidates [C, width] of `target_offsets` [R + 1] become."""
        events, num_rows = self._events(histories, targets, front.shape[0]), front.shape[0]
        parts = [front.flatten(0, 1), events.values.to(targets.dtype), targets]
        offsets, times = events.offsets, events.times
        rows = Rows.of(self.front, offsets, times, target_offsets, targets.shape[0])
        x = place_rows(parts, rows.places)
        for layer, count in zip(self.layers, self.newest, strict=True):
            if count:
                sizes = [x.shape[0] - times.shape[0] - targets.shape[0], times.shape[0], targets.shape[0]]
                own, values, last = x[rows.places].split(sizes)
                index, offsets = newest(offsets[: num_rows + 1], times.shape[0], count)
                times = times[index]
                own = F.pad(own[: num_rows * self.front], (0, 0, 0, num_rows * self.front))  # of spare rows
                rows = Rows.of(
                    self.front, offsets, times, with_spare_rows(target_offsets[: num_rows + 1]), targets.shape[0]
                )
                x = place_rows([own, values[index], last], rows.places)
            x = layer(x, rows.offsets, rows.times, rows.next_times, rows.num_targets)
        context = x[rows.places[: self.front * num_rows]].unflatten(0, (-1, self.front))
        return context, x[rows.places[x.shape[0] - targets.shape[0] :]]

    def _events(self, histories: dict[str, JaggedSequence], like: Tensor, num_rows: int) -> JaggedSequence:
        """The events of all types, oldest first."""
        if not self.names:
            offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=like.device)
            return JaggedSequence(like[:0], offsets, offsets[:0])
        given = [histories[name] for name in self.names]
        made = [
            JaggedSequence(mlp(each.values), each.offsets, each.times)
            for mlp, each in zip(self.events, given, strict=True)
        ]
        return merge_by_time(made)


class UltraHSTU(RequestVectors, nn.Module):
    """Logits [C, tasks] from tokens. What the stacks make of a candidate stands side by side in the head's input."""

    Config = UltraHSTUConfig

    def __init__(self, spec: FeatureSpec, config: UltraHSTUConfig) -> None:
        super().__init__()
        width, front = config.token_dim, config.request_tokens
        check_events(config.events, [event.name for event in spec.histories])
        self.request = SideTokens(spec.num_request_tokens, config.dim, front, width, None)
        self.candidate = MLP(spec.num_candidate_tokens * config.dim, [width], width)
        groups: list[tuple[Sequence[EventType], UltraHSTUConfig]] = [(spec.histories, config)]
        if config.event_stacks == "own" and spec.histories:
            groups = [([event], config.of_type(event.name)) for event in spec.histories]
        stacks = nn.ModuleList(EventStack(events, own, spec.max_candidates) for events, own in groups)
        self.stacks = cast("Sequence[EventStack]", stacks)
        self.heads = TaskHeads(width * len(stacks), config.head_hidden, spec.num_outputs, config.dropout)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]; `only_vectors`: what the request's own tokens became, side by side."""
        offsets = CandidateRows.of(batch).offsets.long()
        targets = self.candidate(rms_norm(tokens.candidate).flatten(1))
        front = self.request(rms_norm(tokens.request)).to(targets.dtype)
        made = [stack.run(front, tokens.histories, targets, offsets) for stack in self.stacks]
        contexts, candidates = zip(*made, strict=True)
        if self.only_vectors():
            return torch.cat([rms_norm(each) for each in contexts], dim=1).flatten(1)
        return self.heads(torch.cat([rms_norm(each) for each in candidates], dim=1))

    def aux_loss(self) -> Tensor:
        return next(self.parameters()).new_zeros(())
