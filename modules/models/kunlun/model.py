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
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.block import FeedForwardBlock
from modules.layers.feed_forward.mlp import TaskHeads
from modules.layers.interaction.lce import LCE, compress_together
from modules.layers.interaction.wukong import WukongExperts
from modules.layers.norms import rms_norm
from modules.models.kunlun.config import KunlunConfig, check_events, stack_layers
from modules.models.kunlun.stack import EventStack, EventTokens
from modules.models.ranking import WITHOUT_HISTORIES, PlainLogits, Ranker


class KunlunLayer(nn.Module):
    """The interaction block of a layer, and what its event stacks need: context and queries.

    `context` compresses the request's tokens, from the second layer on with the summaries of all sequences, to the
    tokens from which the PFFN's weights are made. `queries` compresses X to the tokens in which candidates
    attend, some for each stack that has such attention in this layer. The interaction is

        X = experts([LCE(X) | T_1 | ... | H_1 | ...])

    over the summaries H at the request's rows, which nothing copies, and all else at the candidates', then
    `feed_forward`.
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
        queries: Sequence[int],
        num_targets: int,
        num_summaries: int,
        max_candidates: int,
    ) -> None:
        super().__init__()
        self.context = LCE(num_context_tokens, config.num_context) if num_context_tokens else None
        self.queries = LCE(num_candidate, sum(queries), num_request, num_vendor) if queries else None
        self.num_queries = list(queries)
        self.summary = LCE(num_candidate, config.num_summary, num_request, num_vendor)
        self.experts = WukongExperts(
            config.num_summary + num_targets,
            config.dim,
            num_experts=config.num_experts,
            num_request=num_summaries,
            max_candidates=max_candidates,
            hidden=config.interaction_hidden,
            dropout=config.dropout,
            **config.wukong.layer_options(),
        )
        self.block = FeedForwardBlock(config, config.dim)
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
    ) -> tuple[Tensor, list[Tensor]]:
        """(X_sum [C, num_summary, d], queries [C, n_t, d] of each stack), normalised, of candidate [C, n, d] and, in
        the first layer, request [R, n_u, d] and the vendors' tokens, all normalised."""
        layers = [self.summary] if self.queries is None else [self.summary, self.queries]
        summary, *queries = map(rms_norm, compress_together(layers, candidate, request, rows, vendor))
        return summary, list(queries[0].split(self.num_queries, dim=1)) if queries else []

    def forward(self, summary: Tensor, events: Sequence[EventTokens], rows: CandidateRows) -> Tensor:
        """X_sum [C, num_summary, d] -> X [C, num_tokens, d]."""
        own = torch.cat([summary, *(each.target for each in events if each.target is not None)], dim=1)
        summaries = [each.summary for each in events if each.summary is not None]
        return self.block(self.experts(own, torch.cat(summaries, dim=1) if summaries else None, rows))


class Kunlun(PlainLogits, Ranker):
    """Logits [C, tasks] from tokens.

    Everything about sequences but the candidates' attention to them runs at the R rows of requests: the PFFN's weights
    are made from the request's tokens and the sequences' summaries, not from candidates. Candidates meet the sequences
    in target attention and in the interaction.
    """

    Config = KunlunConfig
    takes_vendors = True

    def __init__(self, spec: FeatureSpec, config: KunlunConfig) -> None:
        super().__init__()
        check_events(config.events, [event.name for event in spec.histories])
        groups: list[tuple[Sequence[EventType], list[KunlunConfig]]]
        if config.event_stacks == "own":
            groups = [([event], stack_layers(config, event.name)) for event in spec.histories]
        else:
            groups = [(spec.histories, stack_layers(config))] if spec.histories else []
        stacks = nn.ModuleList(EventStack(events, own, config.dim, spec.max_candidates) for events, own in groups)
        self.stacks = cast("Sequence[EventStack]", stacks)

        num_candidate, num_request = spec.num_candidate_tokens, spec.num_request_tokens
        summaries, targets = [0] * len(stacks), [0] * len(stacks)  # tokens H and T of each stack so far
        layers: list[KunlunLayer] = []
        for index, own in enumerate(config.of_layers()):
            known = sum(summaries)
            running = {lane: stack.layers[index] for lane, stack in enumerate(self.stacks) if index < len(stack.layers)}
            for lane, layer in running.items():
                summaries[lane] = layer.num_tokens or summaries[lane]
                targets[lane] = layer.num_target or targets[lane]
            needs_context = any(layer.pffn is not None for layer in running.values())
            layers.append(
                KunlunLayer(
                    own,
                    layers[-1].experts.num_tokens if layers else num_candidate,
                    0 if layers else num_request,
                    num_vendor=0 if layers else spec.num_vendor_tokens,
                    num_context_tokens=needs_context * (num_request + known),
                    queries=[layer.num_target for layer in running.values() if layer.num_target],
                    num_targets=sum(targets),
                    num_summaries=sum(summaries),
                    max_candidates=spec.max_candidates,
                )
            )
        self.layers = cast("Sequence[KunlunLayer]", nn.ModuleList(layers))
        self.heads = TaskHeads(
            layers[-1].experts.num_tokens * config.dim, config.head_hidden, spec.num_outputs, config.dropout
        )
        self.plain_heads = config.make_plain_heads(spec)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        x, request = rms_norm(tokens.candidate), rms_norm(tokens.request)
        vendor = None if tokens.vendor is None else VendorTokens.of(rms_norm(tokens.vendor), batch)
        events: list[EventTokens | None] = [None] * len(self.stacks)
        for index, layer in enumerate(self.layers):
            of_request, of_vendor = (None, None) if index else (request, vendor)
            context = layer.compress_context(request, events)
            # X has a lane of its own: event stacks without queries need not wait for the interaction before them.
            with SideStream(x, request, rows.offsets, rows.owner, lane=len(self.stacks)) as work:
                summary, queries = layer.compress(x, of_request, of_vendor, rows)
            if queries:
                work.join_all(queries)
            events = self._run(index, events, context, queries, rows, tokens)
            known = [each for each in events if each is not None]
            read = [part for each in known for part in (each.summary, each.target)]
            with SideStream(summary, *read, rows.offsets, rows.owner, lane=len(self.stacks)) as work:
                x = layer(summary, known, rows)
        x = work.join(x)
        if self.only_vectors():
            summaries = [each.summary for each in events if each is not None and each.summary is not None]
            return torch.cat(summaries, dim=1).flatten(1)
        return self.with_plain(self.heads(x.flatten(1)), tokens, batch)

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
