"""OneTrans (arXiv 2510.26104): one causal sequence of a request's events and a candidate's features, in which features
have weights of their own. Events run once a request, whose keys and values all its candidates read. docs/onetrans.md
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kernels.jagged import jagged_concat, jagged_flip, segment_mean
from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import FeatureTokensConfig, option
from modules.layers.attention.token_attention import equal_offsets
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.feed_forward.mlp import MLP, SharedLinear, TaskHeads
from modules.layers.norms import rms_norm
from modules.layers.sequence.history import merge_by_time
from modules.models.onetrans.layer import OneTransLayer, Sequence, kept_lengths
from modules.models.ranking import WITHOUT_HISTORIES, Ranker
from modules.models.token_mixing.tokens import SideTokens, even_groups


@dataclass(kw_only=True)
class OneTransConfig(FeatureTokensConfig):
    name: str = "onetrans"
    num_heads: int = option(4, least=1)
    request_tokens: int = 0  # made of the request's features, newest in the sequence, once a request; 0: see above
    merge: str = option("time", choices=["time", "types"])  # by time | one event type behind another
    last_events: int = 16  # that go on from the last layer; each before has linearly more; 0: all in each
    length_multiple: int = option(32, least=1)  # to which the numbers of events are rounded up

    # Published ablations, without: weights of each token of a candidate: those of events | events that see older ones
    # only | with merge=types, a learned token between two types.
    without: list[str] = option([], choices=["own_weights", "causality", "separators"])

    usual_layers: ClassVar[int] = 4
    shared: ClassVar[frozenset[str]] = frozenset(
        {
            *("request_tokens", "merge", "without", "last_events"),
            "length_multiple",
        }
    )

    retired: ClassVar[dict[str, Any]] = {"own_weights": True, "causal": True, "separator": True}

    def check_layer(self) -> None:
        if self.token_dim % self.num_heads:
            raise ValueError(
                f"model.token_dim={self.token_dim} must be a multiple of model.num_heads={self.num_heads}, e.g. "
                f"model.token_dim={self.num_heads * max(1, self.token_dim // self.num_heads)}"
            )

    def check(self) -> None:
        super().check()
        if self.tokens == "groups" and not self.request_tokens and self.num_tokens < 2:
            raise ValueError(
                "model.tokens=groups needs a token of the request's features and one of the candidate's; use e.g. "
                "model.num_tokens=2 or model.request_tokens=1"
            )
        if "separators" in self.without and self.merge == "time":
            raise ValueError(
                "model.without=[separators] takes nothing out of model.merge=time; use model.merge=types, or leave "
                "it out"
            )

    def notes(self) -> list[str]:
        of_request = f"events and {self.request_tokens} tokens of features" if self.request_tokens else "events"
        return [f"{of_request} run at the rows of requests, {self.num_tokens} tokens at those of candidates"]


class EventSequence(nn.Module):
    """The events of all types as one sequence of a request, newest first: an MLP of each type, whose output's bias
    tells it apart. Types stand in the order of the data, the last one newest, where time does not merge them."""

    def __init__(self, spec: FeatureSpec, config: OneTransConfig) -> None:
        super().__init__()
        self.names, width = [event.name for event in spec.histories], config.token_dim
        self.by_time = config.merge == "time"
        sizes = [len(event.fields) * config.dim for event in spec.histories]
        self.mlps = nn.ModuleList(MLP(size, [width], width) for size in sizes)
        parts = max(0, len(sizes) - 1) if not self.by_time and "separators" not in config.without else 0
        self.separators = nn.Parameter(torch.empty(parts, width)) if parts else None
        self.max_length = spec.max_events + parts
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.separators is not None:
            nn.init.normal_(self.separators)

    def forward(self, tokens: Tokens) -> Sequence:
        given = [tokens.histories[name] for name in self.names]
        made = [
            JaggedSequence(mlp(each.values), each.offsets, each.times)
            for mlp, each in zip(self.mlps, given, strict=True)
        ]
        if self.by_time:
            made = [merge_by_time(made)]
        last, *others = [(jagged_flip(each.values, each.offsets), each.offsets) for each in reversed(made)]
        values, offsets = last
        for place, (before, before_offsets) in enumerate(others):
            if self.separators is not None:
                count = offsets.shape[0] - 1
                between = self.separators[place].to(values.dtype).expand(count, -1)
                values, offsets = jagged_concat(values, offsets, between, equal_offsets(count, 1, offsets))
            values, offsets = jagged_concat(values, offsets, before, before_offsets)
        return Sequence(values, offsets)


class CandidateTokens(nn.Module):
    """T tokens of each candidate, of its features and, unless these stand in the sequence, of the request's."""

    def __init__(self, spec: FeatureSpec, config: OneTransConfig) -> None:
        super().__init__()
        self.num_tokens, dim, width = config.num_tokens, config.dim, config.token_dim
        of_request = 0 if config.request_tokens else spec.num_request_tokens
        self.linear: SharedLinear | None = None
        self.sides = nn.ModuleList()
        if config.tokens == "split":
            shapes = spec.num_candidate_tokens * dim, of_request * dim
            self.linear = SharedLinear(*shapes, self.num_tokens * width)
        else:
            counts = [self.num_tokens // 2 if of_request else 0]
            counts.append(self.num_tokens - counts[0])
            self.sides = nn.ModuleList(
                SideTokens(features, dim, count, width, even_groups(features, count))
                for features, count in zip((of_request, spec.num_candidate_tokens), counts, strict=True)
                if count
            )
        self.of_request = bool(of_request)

    def forward(self, candidate: Tensor, request: Tensor, rows: CandidateRows) -> Tensor:
        if self.linear is not None:
            shared = (request.flatten(1), rows) if self.of_request else ()
            return self.linear(candidate.flatten(1), *shared).unflatten(1, (self.num_tokens, -1))
        *user, item = self.sides
        return torch.cat([*(rows.expand(side(request)) for side in user), item(candidate)], dim=1)


class OneTrans(Ranker):
    """Logits [C, tasks] from tokens."""

    Config = OneTransConfig

    def __init__(self, spec: FeatureSpec, config: OneTransConfig) -> None:
        super().__init__()
        dim, count = config.token_dim, config.request_tokens
        self.events = EventSequence(spec, config) if spec.histories else None
        self.request: SideTokens | None = None
        if count:
            features = spec.num_request_tokens
            groups = even_groups(features, count) if config.tokens == "groups" else None
            self.request = SideTokens(features, config.dim, count, dim, groups)
        self.candidate = CandidateTokens(spec, config)
        own = config.of_layers()
        longest = 0 if self.events is None else self.events.max_length
        kept = [count + n for n in kept_lengths(longest, config.last_events, len(own), config.length_multiple)]
        layers = [
            OneTransLayer(
                dim,
                layer.num_heads,
                config.num_tokens,
                length=before,
                kept=after,
                max_candidates=spec.max_candidates,
                own_weights="own_weights" not in config.without,
                causal="causality" not in config.without,
                hidden=int(layer.expansion * dim),
                dropout=layer.dropout,
            )
            for layer, before, after in zip(own, [count + longest, *kept[:-1]], [*kept[:-1], 0], strict=True)
        ]
        self.layers = cast("Several[OneTransLayer]", nn.ModuleList(layers))
        self.heads = TaskHeads(config.num_tokens * dim, config.head_hidden, spec.num_outputs, config.dropout)
        self.dim = dim

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        request = rms_norm(tokens.request)
        x = self.candidate(rms_norm(tokens.candidate), request, rows)
        sequence = self._sequence(tokens, request, rows)
        read = sequence
        for layer in self.layers:
            read = sequence
            sequence, x = layer(sequence, x, rows)
        if self.only_vectors():
            return segment_mean(rms_norm(read.values), read.offsets)[: request.shape[0]]
        return self.heads(rms_norm(x).flatten(1))

    def _sequence(self, tokens: Tokens, request: Tensor, rows: CandidateRows) -> Sequence:
        """The events, and in front of them, newest, the tokens of the request."""
        count = request.shape[0]
        if self.events is None:
            sequence = Sequence(request.new_empty(0, self.dim), equal_offsets(count, 0, rows.offsets))
        else:
            sequence = self.events(tokens)
        if self.request is None:
            return sequence
        own = self.request(request)
        offsets = equal_offsets(count, own.shape[1], sequence.offsets)
        own = own.flatten(0, 1)
        return Sequence(*jagged_concat(own, offsets, sequence.values.to(own.dtype), sequence.offsets))

    def vectors_refusal(self) -> str | None:
        if self.events is None and self.request is None:
            return f"{WITHOUT_HISTORIES}, or use model.request_tokens=1"
        return None
