"""Kunlun (arXiv 2602.10016): a stack of transformer blocks for each event type, and Wukong experts that mix their
summaries with the features, in every layer. docs/kunlun.md has the equations, and what is chosen where the sources are
silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from modules.batch import EventType, FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows, VendorTokens
from modules.core.side_stream import SideStream
from modules.embedding import Tokens
from modules.lce import LCE, compress_together
from modules.mlp import TaskHeads
from modules.models.kunlun.config import KunlunConfig, check_events, of_event
from modules.models.kunlun.stack import EventStack, EventTokens
from modules.models.ranking import WITHOUT_HISTORIES, RequestVectors
from modules.norms import rms_norm
from modules.wukong import WukongExperts


class KunlunLayer(nn.Module):
    """The interaction block of a layer, and what its event stacks need: context and queries.

    `context` compresses the request's tokens, from the second layer on with the summaries of all sequences, to the
    tokens from which the PFFN's weights are made. `queries` compresses X to num_target tokens for each stack with
    attention in this layer. The interaction is

        X = experts([LCE(X) | T_1 | ... | H_1 | ...])

    over the summaries H at the request's rows, which nothing copies, and all else at the candidates'.
    """

    gathered_for = ("compress_context", "compress")  # which the model calls beside forward

    def __init__(
        self,
        config: KunlunConfig,
        num_candidate: int,
        num_request: int,
        *,
        num_vendor: int,
        num_context_tokens: int,
        num_queries: int,
        num_targets: int,
        num_summaries: int,
        max_candidates: int,
    ) -> None:
        super().__init__()
        self.context = LCE(num_context_tokens, config.num_context) if num_context_tokens else None
        self.queries = LCE(num_candidate, num_queries, num_request, num_vendor) if num_queries else None
        self.summary = LCE(num_candidate, config.num_summary, num_request, num_vendor)
        self.experts = WukongExperts(
            config.num_summary + num_targets,
            config.dim,
            num_experts=config.num_experts,
            num_layers=config.expert_layers,
            num_fmb=config.expert_fmb,
            num_lcb=config.expert_lcb,
            num_request=num_summaries,
            max_candidates=max_candidates,
            rank=config.rank,
            hidden=config.interaction_hidden,
            dropout=config.dropout,
            machine=config.machine,
            num_compressed=config.num_compressed,
            attention_hidden=config.attention_hidden,
        )
        self.dim = config.dim

    def compress_context(self, request: Tensor, events: Sequence[EventTokens | None]) -> Tensor | None:
        """[R, num_context, d], normalised, of the request tokens [R, n_u, d] and the summaries before this layer; None
        where no PFFN needs it."""
        if self.context is None:
            return None
        known = [each.summary for each in events if each is not None and each.summary is not None]
        return rms_norm(self.context(torch.cat([request, *known], dim=1)))

    def compress(
        self, candidate: Tensor, request: Tensor | None, vendor: VendorTokens | None, rows: CandidateRows
    ) -> tuple[Tensor, Tensor | None]:
        """(X_sum [C, num_summary, d], queries [C, num_queries, d] or None), normalised, of candidate [C, n, d] and, in
        the first layer, request [R, n_u, d] and the vendors' tokens, all normalised."""
        layers = [self.summary] if self.queries is None else [self.summary, self.queries]
        summary, *queries = map(rms_norm, compress_together(layers, candidate, request, rows, vendor))
        return summary, queries[0] if queries else None

    def forward(self, summary: Tensor, events: Sequence[EventTokens], rows: CandidateRows) -> Tensor:
        """X_sum [C, num_summary, d] -> X [C, num_tokens, d]."""
        own = torch.cat([summary, *(each.target for each in events if each.target is not None)], dim=1)
        summaries = [each.summary for each in events if each.summary is not None]
        return self.experts(own, torch.cat(summaries, dim=1) if summaries else None, rows)


class Kunlun(RequestVectors, nn.Module):
    """Logits [C, tasks] from tokens.

    Everything about sequences but the candidates' attention to them runs at the R rows of requests: the PFFN's weights
    are made from the request's tokens and the sequences' summaries, not from candidates. Candidates meet the sequences
    in target attention and in the interaction.
    """

    Config = KunlunConfig
    takes_vendors = True

    def __init__(self, spec: FeatureSpec, config: KunlunConfig) -> None:
        super().__init__()
        check_events(config, [event.name for event in spec.histories])
        groups: list[tuple[Sequence[EventType], KunlunConfig]]
        if config.event_stacks == "own":
            groups = [([event], of_event(config, event.name)) for event in spec.histories]
        else:
            groups = [(spec.histories, config)] if spec.histories else []
        stacks = nn.ModuleList(EventStack(events, own, config.dim, spec.max_candidates) for events, own in groups)
        self.stacks = cast("Sequence[EventStack]", stacks)
        self.num_target = config.num_target

        num_summaries = sum(own.num_tokens for _, own in groups)
        num_candidate, num_request = spec.num_candidate_tokens, spec.num_request_tokens
        layers: list[KunlunLayer] = []
        for index in range(config.num_layers):
            running = [stack.layers[index] for stack in self.stacks if index < len(stack.layers)]
            targets = [any(layer.num_target for layer in stack.layers[: index + 1]) for stack in self.stacks]
            needs_context = any(layer.pffn is not None for layer in running)
            layers.append(
                KunlunLayer(
                    config,
                    layers[-1].experts.num_tokens if layers else num_candidate,
                    0 if layers else num_request,
                    num_vendor=0 if layers else spec.num_vendor_tokens,
                    num_context_tokens=needs_context * (num_request + bool(layers) * num_summaries),
                    num_queries=sum(layer.num_target for layer in running),
                    num_targets=sum(targets) * config.num_target,
                    num_summaries=num_summaries,
                    max_candidates=spec.max_candidates,
                )
            )
        self.layers = cast("Sequence[KunlunLayer]", nn.ModuleList(layers))
        self.heads = TaskHeads(
            layers[-1].experts.num_tokens * config.dim, config.head_hidden, spec.num_outputs, config.dropout
        )

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        x, request = rms_norm(tokens.candidate), rms_norm(tokens.request)
        vendor = None if tokens.vendor is None else VendorTokens.of(rms_norm(tokens.vendor), batch)
        events: list[EventTokens | None] = [None] * len(self.stacks)
        for index, layer in enumerate(self.layers):
            of_request, of_vendor = (None, None) if index else (request, vendor)
            context = layer.compress_context(request, events)
            summary, queries = layer.compress(x, of_request, of_vendor, rows)
            shares = [] if queries is None else list(queries.split(self.num_target, dim=1))  # in order of the stacks
            events = self._run(index, events, context, shares, rows, tokens)
            x = layer(summary, [each for each in events if each is not None], rows)
        if self.only_vectors():
            summaries = [each.summary for each in events if each is not None and each.summary is not None]
            return torch.cat(summaries, dim=1).flatten(1)
        return self.heads(x.flatten(1))

    def vectors_refusal(self) -> str | None:
        return None if self.stacks else WITHOUT_HISTORIES

    def _run(
        self,
        index: int,
        events: Sequence[EventTokens | None],
        context: Tensor | None,
        queries: list[Tensor],
        rows: CandidateRows,
        tokens: Tokens,
    ) -> list[EventTokens | None]:
        """The layer's blocks of all event types, side by side; types that have fewer layers stay as they are."""
        given = iter(queries)
        works, results = [], list(events)
        for lane, (stack, before) in enumerate(zip(self.stacks, events, strict=True)):
            if index >= len(stack.layers):
                continue
            block = stack.layers[index]
            query = next(given) if block.num_target else None
            histories = [tokens.histories[event.name] for event in stack.events]
            if before is None:
                read = [part for each in histories for part in (each.values, each.offsets, each.times)]
            else:
                read = before.tensors()
            with SideStream(*read, context, query, rows.offsets, lane=lane) as work:
                begun = stack.begin(histories) if before is None else before
                results[lane] = block(begun, context, query, rows)
            works.append((work, lane))
        for work, lane in works:
            done = results[lane]
            assert done is not None
            work.join_all(done.tensors())
        return results

    def aux_loss(self) -> Tensor:
        return next(self.parameters()).new_zeros(())
