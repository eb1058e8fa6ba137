"""InterFormer (arXiv 2411.09852): feature interaction and sequence modelling that inform each other in every layer.

A layer has three parts, called arches. The Cross Arch summarises both sides, the Interaction Arch mixes the feature
tokens X with the sequence summary, the Sequence Arch transforms the sequence by weights made from the summary of X and
then applies self-attention.

docs/interformer.md lists what the paper leaves open, what is done here, and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kernels.core import dispatch
from kernels.jagged import jagged_concat, jagged_index_select
from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows, VendorTokens
from modules.config import option
from modules.core.side_stream import SideStream
from modules.layers.attention.rotary import rotation
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.block import FeedForwardConfig
from modules.layers.feed_forward.mlp import TaskHeads
from modules.layers.feed_forward.plain_head import PlainHeadConfig
from modules.layers.interaction.jagged_feature_interaction import FeatureInteractionConfig
from modules.layers.norms import add_rms_norm, rms_norm, row_norm
from modules.layers.sequence.history import HistoryEncoder
from modules.models.interformer.arches import (
    InteractionArch,
    LearnedSummary,
    SequenceArch,
    SequenceSummary,
    SequenceTokens,
    Summary,
    places_of_ends,
)
from modules.models.ranking import PlainLogits, Ranker


class InterFormerLayer(nn.Module):
    """Summaries of both sides (`summary`, `cross`: the Cross Arch), then Interaction Arch and Sequence Arch.

    `InterFormer` calls the parts, because what they read differs between the first layer and later ones; the two arches
    do not depend on each other.
    """

    def __init__(
        self,
        summary: Summary | LearnedSummary,
        cross: SequenceSummary | None,
        interaction: InteractionArch,
        sequence: SequenceArch,
    ) -> None:
        super().__init__()
        self.summary = summary
        self.cross = cross
        self.interaction = interaction
        self.sequence = sequence


class InterFormer(PlainLogits, Ranker):
    """Logits [C, tasks] from tokens.

    `sequence_context` says which tokens inform the sequence:

    - "request": the summary that becomes CLS and generates the PFFN weights is made of request tokens only, so the
      sequence stays at R rows however many candidates a request has. In the first layer it summarises the request
      tokens; in later layers the request tokens together with the CLS tokens, which carry what the sequence has added:
      the request-level counterpart of X. Candidates meet the sequence in PMA and in the Interaction Arch.
    - "candidate": the paper's form. The summary is made of all tokens X, so every candidate has a sequence of its own
      and all runs at C rows. How many events that makes is known only on the device: one host sync a step.

    Both are one code path: which rows the sequences belong to is chosen at the start, and in the second form each
    candidate has its own.

    `information_flow` "s2n" (of the sequence to the features) and "n2s" are the paper's one-way ablations, "none" its
    separate arches. Without s2n the Interaction Arch mixes features only. Without n2s learned tokens are in the place
    of their summary, as CLS and for the weights of the PFFN, which are then the same for every row. The head always
    reads both sides.

    Vendors, if there are any, inform candidates and not the sequence. In the first layer their part of the linear
    compression is computed once a vendor; the Interaction Arch, whose layers know two levels, runs over the vendors,
    each with a copy of its request's tokens. In the second form candidates have copies of theirs, as of the request's.

    With `plain_head`, further heads read what memorises least and tells most on few rows (`PlainHead`).
    """

    takes_vendors = True

    @dataclass(kw_only=True)
    class Config(
        FeedForwardConfig,
        FeatureInteractionConfig,
        PlainHeadConfig,
        SequenceSummary.Config,
        InteractionArch.Config,
        SequenceArch.Config,
    ):
        name: str = "interformer"
        table_std: float | None = 0.01  # with row_norm, rare ids then start quiet
        # request: the sequence stays at R rows | candidate: the paper's form, C rows
        sequence_context: str = option("request", choices=["request", "candidate"])
        # what informs the other in a layer: both | the sequence the features | the features the sequence | neither
        information_flow: str = option("both", choices=["both", "s2n", "n2s", "none"])

        shared: ClassVar[frozenset[str]] = frozenset(
            {"num_cls", "num_recent", "sequence_context", "jagged_interaction"}
        )
        retired: ClassVar[dict[str, Any]] = {"dhen_layers": 1, "gate": "identity", "pffn_kron_terms": 0, "dcn_rank": 32}
        moved: ClassVar[dict[str, str]] = {
            "wukong_layers": "wukong.num_layers",
            "wukong_fmb": "wukong.num_fmb",
            "wukong_lcb": "wukong.num_lcb",
            "wukong_rank": "wukong.rank",
        }

        def check_layer(self) -> None:
            if self.dim % (2 * self.num_heads):
                pairs = 2 * self.num_heads
                raise ValueError(
                    f"model.dim={self.dim} must be a multiple of 2 * model.num_heads={pairs} (rotary positions turn "
                    f"pairs), e.g. model.dim={pairs * max(1, self.dim // pairs)}"
                )
            for key, options in (("pffn_gdpa", self.pffn_gdpa), ("attention_gdpa", self.attention_gdpa)):
                if isinstance(options.activation, list) and len(options.activation) != self.num_heads:
                    works = [options.activation[0]] * self.num_heads
                    raise ValueError(
                        f"model.{key}.activation={options.activation} must be one name or model.num_heads="
                        f"{self.num_heads} of them, e.g. model.{key}.activation=[{','.join(works)}]"
                    )

        def graphs_refusal(self) -> str | None:
            if self.sequence_context == "candidate":
                return (
                    "model.sequence_context=candidate: its sizes are read from the device; use "
                    "runtime.cuda_graphs=false or model.sequence_context=request"
                )
            return super().graphs_refusal()

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        of_layers = config.of_layers()
        self.head_dims = [config.dim // layer.num_heads for layer in of_layers]
        self.num_cls, self.num_recent = config.num_cls, config.num_recent
        self.per_candidate = config.sequence_context == "candidate"
        self.interaction = config.make_interaction(spec)
        num_request = spec.num_request_tokens
        num_candidate = spec.num_candidate_tokens + self.interaction.num_tokens
        num_vendor = spec.num_vendor_tokens
        num_tokens = num_request + num_vendor + num_candidate
        if self.per_candidate:
            num_request, num_vendor = num_request + num_vendor, 0
        of_request = config.num_cls + config.num_recent
        max_candidates = 1 if self.per_candidate else spec.max_candidates
        max_length = config.num_cls + spec.max_events
        self.num_positions = spec.max_events + 1  # those of events count from 1

        def cross(
            config: SequenceSummary.Config, num_candidate: int, num_request: int = 0, num_vendor: int = 0
        ) -> SequenceSummary:
            limits = {"max_candidates": max_candidates, "max_length": max_length}
            return SequenceSummary(num_candidate, num_request, config, num_vendor=num_vendor, **limits)

        def layer(
            config: InterFormer.Config,
            num_summarised: int,
            num_candidate: int,
            num_request: int = 0,
            num_vendor: int = 0,
        ) -> InterFormerLayer:
            to_features, to_sequence = (config.information_flow in ("both", flow) for flow in ("s2n", "n2s"))
            return InterFormerLayer(
                Summary(num_summarised, config) if to_sequence else LearnedSummary(config),
                cross(config, num_candidate, num_request, num_vendor) if to_features else None,
                InteractionArch(
                    num_candidate,
                    num_request + num_vendor,
                    (of_request + config.num_pma) * to_features,
                    of_request * to_features,
                    config,
                    max_candidates=max_candidates,
                ),
                SequenceArch(config, max_length=max_length, feed_forward=config.make_feed_forward(config.dim)),
            )

        # The first layer meets request and candidate tokens apart, which lets each run at its own rows.
        summarised = num_tokens if self.per_candidate else num_request
        layers = [layer(of_layers[0], summarised, num_candidate, num_request, num_vendor)]
        later = num_tokens if self.per_candidate else num_request + config.num_cls
        layers += [layer(each, later, num_tokens) for each in of_layers[1:]]

        self.history = HistoryEncoder(spec, config.dim)
        self.layers = cast("Sequence[InterFormerLayer]", nn.ModuleList(layers))
        self.head_summary = Summary(num_tokens, config)
        self.head_cross = cross(config, num_tokens)
        candidate_width, request_width = (config.num_cls + config.num_pma) * config.dim, of_request * config.dim
        self.heads = TaskHeads(candidate_width, config.head_hidden, spec.num_outputs, config.dropout, request_width)
        self.plain_heads = config.make_plain_heads(spec)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        request, candidate = tokens.request, self.interaction(tokens, rows)
        vendor = None if tokens.vendor is None else VendorTokens.of(tokens.vendor, batch)
        first, *later = self.layers
        if self.per_candidate:
            request = rows.expand(request)
            if vendor is not None:
                request, vendor = torch.cat([request, vendor.of_candidate.expand(vendor.values)], dim=1), None
            values, offsets = self.history(tokens)
            values, offsets = jagged_index_select(values, offsets, rows.owner)
            rows = CandidateRows.identity(batch.num_candidates, values.device)
            summary = first.summary(torch.cat([request, candidate], dim=1))
            values, offsets = _prepend(summary, values, offsets)
        else:
            summary = first.summary(request)
            values, offsets = self.history(tokens, summary)
        positions = _positions(offsets, self.num_cls, values.shape[0])
        angles = {width: rotation(positions, width, self.num_positions) for width in dict.fromkeys(self.head_dims)}
        ends = places_of_ends(offsets, self.num_cls, self.num_recent)
        sequence = SequenceTokens(*add_rms_norm(values, None, ends, twice=True))
        of_vendors = None if vendor is None else dataclasses.replace(vendor, values=row_norm(vendor.values))
        crossed: Sequence[Tensor] = ()
        if first.cross is not None:
            crossed = first.cross(candidate, request, sequence, offsets, rows, of_vendors)
        above, places = request, rows
        if vendor is not None:
            above, places = vendor.below(request), vendor.of_candidate
            crossed = crossed and (vendor.of_request.expand(crossed[0]), crossed[1])
        with SideStream(candidate, above, *crossed) as work:
            x = first.interaction(candidate, above, crossed, places)
        sequence = first.sequence(summary, sequence, offsets, angles[self.head_dims[0]], ends)
        x = work.join(x)
        for layer, head_dim in zip(later, self.head_dims[1:], strict=True):
            context = x if self.per_candidate else torch.cat([request, sequence.ends[:, : self.num_cls]], dim=1)
            for_cross, normed, x = layer.interaction.normed(x)
            crossed = () if layer.cross is None else layer.cross(for_cross, None, sequence, offsets, rows)
            with SideStream(x, normed, *crossed) as work:
                x = layer.interaction(x, None, crossed, rows, normed)
            sequence = layer.sequence(layer.summary(context), sequence, offsets, angles[head_dim], ends)
            x = work.join(x)

        normed, x = rms_norm(x, dtype=dispatch.autocast_dtype(x), beside=True)
        of_request, pooled = self.head_cross(normed, None, sequence, offsets, rows)
        if self.only_vectors():
            return of_request.flatten(1)
        of_candidate = torch.cat([self.head_summary(x), pooled], dim=1)
        return self.with_plain(self.heads(of_candidate.flatten(1), of_request.flatten(1), rows), tokens, batch)

    def vectors_refusal(self) -> str | None:
        if self.per_candidate:
            return (
                "with model.sequence_context=candidate every candidate has a sequence of its own; one that was trained "
                "with model.sequence_context=request has one a request"
            )
        return None


def _prepend(summary: Tensor, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of the sequence with its summary tokens [rows, num_cls, d] in front."""
    rows, num_cls, _ = summary.shape
    summary_offsets = torch.arange(rows + 1, device=offsets.device) * num_cls
    return jagged_concat(summary.flatten(0, 1), summary_offsets, values.to(summary.dtype), offsets)


def _positions(offsets: Tensor, num_cls: int, total: int) -> Tensor:
    """[total] int64: 0 for the num_cls tokens in front of each row, then ages: 1 is the newest event."""
    index = torch.arange(total, device=offsets.device)
    counts = offsets.diff()
    start = torch.repeat_interleave(offsets[:-1], counts, output_size=total)
    end = torch.repeat_interleave(offsets[1:], counts, output_size=total)
    return torch.where(index < start + num_cls, 0, end - index)
