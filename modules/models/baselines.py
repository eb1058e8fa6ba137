"""Baselines on the tokens that InterFormer gets: DIN, DCNv2 and DLRM.

DCNv2 and DLRM do not model sequences: they see each history field as one more request token, the mean of its events,
and with `jagged_interaction` also as a token of each candidate, see `JaggedFeatureInteraction`.
All use SiLU, dropout in their MLPs, and a head of its own for each task.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels.ikbo import expand_rows
from kernels.jagged import (
    jagged_dense_elementwise,
    jagged_elementwise,
    jagged_index_select,
    jagged_linear,
    segment_mean,
    segment_sum,
)
from modules.batch import EventType, FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows, above_candidates
from modules.config import ModelConfig, option
from modules.core.vanilla import is_vanilla
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.feed_forward.block import FeedForwardConfig
from modules.layers.feed_forward.mlp import MLP, TaskHeads
from modules.layers.interaction.dot_cross import CrossNet, DotInteraction, products_across
from modules.layers.interaction.jagged_feature_interaction import FeatureInteractionConfig
from modules.layers.norms import rms_norm
from modules.models.ranking import Ranker

MOST_PAIRS = 4
"""Pairs of candidate and event that are held at a time, for each event of the batch."""
LEAST_PAIRS = 1 << 14
"""Pairs of which it does not pay to hold fewer."""
UNIT_HIDDEN = [64]
"""Hidden widths of an activation unit."""
BOTTOM_HIDDEN = [64]
"""Those of DLRM's bottom MLP."""


class ActivationUnit(nn.Module):
    """DIN's attention (arXiv 1706.06978): sum over events of MLP([q, k, q - k, q * k]) k, without a softmax.

    q holds, for every field of the event, the candidate's token that shares its table (item against item, category
    against category). A field that shares no table with a candidate feature is compared with the mean candidate token.
    SiLU instead of DIN's Dice, whose batch statistics would depend on which candidates share a batch.

    The first layer of the MLP, W [q, k, q - k, q * k], is (W_1 + W_3) q + (W_2 - W_3) k + W_4 (q * k): the part of q is
    computed once a candidate, that of k once an event of the request. Where a batch has more pairs of candidate and
    event than `MOST_PAIRS` for each event, they are made for some candidates at a time, and again in the backward.
    """

    def __init__(self, spec: FeatureSpec, event: EventType, dim: int) -> None:
        super().__init__()
        tables = [feature.table for feature in spec.candidate]
        self.matches = [tables.index(field.table) if field.table in tables else None for field in event.fields]
        self.width = len(event.fields) * dim
        self.score = MLP(4 * self.width, UNIT_HIDDEN, 1)

    def forward(self, candidate: Tensor, sequence: JaggedSequence, rows: CandidateRows) -> Tensor:
        """candidate [C, n_c, d], sequence values [N, fields * d] at R rows -> [C, fields * d]; no event gives zeros.

        The number of pairs of candidate and event is known only on the device: one host sync.
        """
        fallback = candidate.mean(1)
        query = torch.cat([fallback if match is None else candidate[:, match] for match in self.matches], dim=1)
        of_query, of_key = self._parts(query, sequence.values)
        events = (sequence.values, of_key, sequence.offsets)
        if torch.compiler.is_compiling():
            return self._attend(query, of_query, rows.owner, None, *events)
        ends = functional.pad(sequence.offsets.diff()[rows.owner].cumsum(0), (1, 0)).tolist()
        pieces = _pieces(ends, max(MOST_PAIRS * sequence.values.shape[0], LEAST_PAIRS))
        if len(pieces) == 1:
            return self._attend(query, of_query, rows.owner, ends[-1], *events)
        candidates = [end - begin for begin, end in pieces]
        parts = [[None] * len(pieces) if x is None else x.split(candidates) for x in (query, of_query, rows.owner)]
        totals = [ends[end] - ends[begin] for begin, end in pieces]
        attended = [
            checkpoint(self._attend, *part, total, *events, use_reentrant=False)
            for *part, total in zip(*parts, totals, strict=True)
        ]
        return torch.cat(attended)

    @property
    def layers(self) -> list[nn.Module]:
        """The MLP after its first layer and activation."""
        return list(self.score)[2:]

    def _parts(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of the first layer's result that of each query, with the bias, and of each key; None if it must be called."""
        first, *rest = self.score
        if not (is_vanilla(first, nn.Linear) and is_vanilla(rest[0], nn.SiLU)):
            return None, None
        of_query, of_key, of_difference, _ = first.weight.chunk(4, dim=1)
        return (
            functional.linear(query, of_query + of_difference, first.bias),
            functional.linear(key, of_key - of_difference),
        )

    def _attend(
        self,
        query: Tensor,
        of_query: Tensor | None,
        owner: Tensor,
        total: int | None,
        values: Tensor,
        of_key: Tensor | None,
        offsets: Tensor,
    ) -> Tensor:
        """query [c, width] of candidates with these owners [c], which have `total` pairs -> [c, width]."""
        key, ends = jagged_index_select(values, offsets, owner, total)
        products = jagged_dense_elementwise(key, ends, query, "mul")
        first, *rest = self.score
        if of_query is None or of_key is None:
            query = expand_rows(query, ends, key.shape[0])
            weight = rest[0](first(torch.cat([query, key, query - key, products], dim=1)))
        else:
            of_product = cast(nn.Linear, first).weight[:, -self.width :]
            of_pair = jagged_linear(products, ends, of_product, None, of_query)
            of_key, _ = jagged_index_select(of_key, offsets, owner, key.shape[0])
            weight = jagged_elementwise(of_pair, of_key, "add", "silu")
        for layer in self.layers:
            weight = layer(weight)
        return segment_sum(weight * key, ends)


def _pieces(ends: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Ranges of candidates, begin and end, that have at most `most` pairs together; `ends` as offsets of each one's."""
    pieces, begin, last = [], 0, len(ends) - 1
    while begin < last:
        end = max(begin + 1, bisect_right(ends, ends[begin] + most) - 1)
        pieces.append((begin, end))
        begin = end
    return pieces or [(0, 0)]


class DIN(Ranker):
    """Deep Interest Network: an activation unit for each event type, then an MLP over all tokens."""

    takes_vendors = True

    @dataclass(kw_only=True)
    class Config(ModelConfig):
        name: str = "din"
        hidden: list[int] = option([128, 64], least=1)

        retired: ClassVar[dict[str, Any]] = {"attention_hidden": UNIT_HIDDEN}

        def graphs_refusal(self) -> str | None:
            return "model=din: its sizes are read from the device; use runtime.cuda_graphs=false"

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.events = spec.histories
        units = nn.ModuleList(ActivationUnit(spec, event, dim) for event in spec.histories)
        self.units = cast("Sequence[ActivationUnit]", units)
        of_request = (spec.num_request_tokens + spec.num_vendor_tokens) * dim
        of_candidate = _num_tokens(spec) * dim - of_request
        outputs, dropout = spec.num_outputs, config.dropout
        self.heads = TaskHeads(of_candidate, config.hidden, outputs, dropout, of_request, one_weight=True)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        if self.only_vectors():
            return tokens.request.flatten(1)
        rows = CandidateRows.of(batch)
        features = [tokens.candidate.flatten(1)]
        for event, unit in zip(self.events, self.units, strict=True):
            features.append(unit(tokens.candidate, tokens.histories[event.name], rows))
        above, rows = above_candidates(tokens.request, tokens.vendor, batch, rows)
        return self.heads(torch.cat(features, dim=1), above.flatten(1), rows)


class DCNv2(Ranker):
    """DCNv2 (arXiv 2008.13535) in its parallel form: a low-rank cross network and an MLP side by side, then logits.

    `feed_forward` is a residual layer on the MLP's result: its experts are as wide as that.
    """

    takes_vendors = True

    @dataclass(kw_only=True)
    class Config(FeedForwardConfig, FeatureInteractionConfig):
        name: str = "dcnv2"
        num_layers: int = 3  # of the cross network
        rank: int = 32
        hidden: list[int] = option([128, 64], least=1)

        moved: ClassVar[dict[str, str]] = {"num_cross_layers": "num_layers"}

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        self.interaction = config.make_interaction(spec)
        width = (_num_tokens(spec) + self.interaction.num_tokens) * config.dim
        self.cross = CrossNet(width, config.num_layers, config.rank)
        self.deep = MLP(width, config.hidden, dropout=config.dropout)
        deep = config.hidden[-1] if config.hidden else width
        self.feed_forward = config.make_feed_forward(deep)
        self.heads = TaskHeads(width + deep, [], spec.num_outputs)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        request_tokens = _request_tokens(tokens)
        if self.only_vectors():
            return request_tokens.flatten(1)
        above, rows = above_candidates(request_tokens, tokens.vendor, batch, CandidateRows.of(batch))
        candidate = self.interaction(tokens, CandidateRows.of(batch))
        x, request = candidate.flatten(1), above.flatten(1)
        crossed, deep = self.cross(x, request, rows), self.deep(x, request=request, rows=rows)
        if self.feed_forward is not None:
            deep = deep + self.feed_forward(rms_norm(deep))
        return self.heads(torch.cat([crossed, deep], dim=1))


class DLRM(Ranker):
    """DLRM (arXiv 1906.00091): dense tokens pass a bottom MLP, all tokens meet in inner products, then a top MLP.

    The dense tokens of request and candidate become one token; without dense features there is no bottom MLP and the
    top MLP reads inner products alone. What is a request's alone, such as the products of its tokens with each other,
    is computed once a request.
    """

    @dataclass(kw_only=True)
    class Config(FeatureInteractionConfig):
        name: str = "dlrm"
        hidden: list[int] = option([128, 64], least=1)  # of the top MLP

        retired: ClassVar[dict[str, Any]] = {"bottom_hidden": BOTTOM_HIDDEN}
        moved: ClassVar[dict[str, str]] = {"top_hidden": "hidden"}

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        dim, dropout = config.dim, config.dropout
        self.request_dense, self.candidate_dense = bool(spec.request_dense), bool(spec.candidate_dense)
        num_dense = self.request_dense + self.candidate_dense
        self.bottom = MLP(num_dense * dim, BOTTOM_HIDDEN, dim, dropout) if num_dense else None
        # All tokens in the order of the top MLP's weights: the dense one, then the request's, then the candidate's.
        self.interaction = config.make_interaction(spec)
        made = self.interaction.num_tokens
        num_tokens = bool(num_dense) + _num_tokens(spec) + made - num_dense
        num_candidate = spec.num_candidate_tokens + made - self.candidate_dense
        candidate = list(range(num_tokens - num_candidate, num_tokens))
        if self.candidate_dense:
            candidate.insert(0, 0)
        request = [token for token in range(num_tokens) if token not in candidate]
        self.dot = DotInteraction(len(candidate))
        self.request_dot = DotInteraction(len(request)) if request else None
        order = _dlrm_order(dim, num_dense > 0, request, candidate)
        of_request = dim * (self.request_dense and not self.candidate_dense) + math.comb(len(request), 2)
        self.heads = TaskHeads(
            len(order) - of_request,
            config.hidden,
            spec.num_outputs,
            dropout,
            of_request,
            one_weight=True,
            order=torch.tensor(order, dtype=torch.int64),
        )
        self.max_candidates = spec.max_candidates

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        request = _request_tokens(tokens)
        if self.only_vectors():
            return request.flatten(1)
        candidate = self.interaction(tokens, rows)
        of_request, of_candidate = [], []
        if self.bottom is not None:
            numbers = tokens.request[:, -1] if self.request_dense else None
            if numbers is not None:
                before = tokens.request.shape[1] - 1
                request = torch.cat([request[:, :before], request[:, before + 1 :]], dim=1)
            if self.candidate_dense:
                dense = self.bottom(candidate[:, -1], request=numbers, rows=rows)
                candidate = torch.cat([dense[:, None], candidate[:, :-1]], dim=1)
                of_candidate.append(dense)
            else:
                assert numbers is not None
                dense = self.bottom(numbers)
                request = torch.cat([dense[:, None], request], dim=1)
                of_request.append(dense)
        if self.request_dot is not None:
            of_request.append(self.request_dot(request))
            of_candidate.append(products_across(candidate, request, rows, self.max_candidates))
        of_candidate.append(self.dot(candidate))
        features = torch.cat(of_request, dim=1) if self.heads.num_request else None
        return self.heads(torch.cat(of_candidate, dim=1), features, rows)


def _dlrm_order(dim: int, dense: bool, request: Sequence[int], candidate: Sequence[int]) -> list[int]:
    """Where what DLRM computes, of requests first, is in [dense token | products of all pairs of tokens i < j].

    `request` and `candidate` are the numbers of their tokens, of which 0 is the dense one if there is one.
    """
    num_tokens = len(request) + len(candidate)
    column = {pair: dim * dense + i for i, pair in enumerate(combinations(range(num_tokens), 2))}

    def own(side: Sequence[int]) -> list[int]:
        return list(range(dim)) if dense and 0 in side else []

    def pairs(side: Sequence[int]) -> list[int]:
        return [column[pair] for pair in combinations(side, 2)]

    across = [column[min(pair), max(pair)] for pair in product(candidate, request)]
    return [*own(request), *pairs(request), *own(candidate), *across, *pairs(candidate)]


def _num_tokens(spec: FeatureSpec) -> int:
    """Tokens of a candidate when each history field counts as one."""
    fields = sum(len(event.fields) for event in spec.histories)
    return spec.num_request_tokens + fields + spec.num_vendor_tokens + spec.num_candidate_tokens


def _request_tokens(tokens: Tokens) -> Tensor:
    """[R, n, d]: request tokens and the mean of each history field, zeros without events."""
    dim = tokens.request.shape[2]
    means = [segment_mean(history.values, history.offsets) for history in tokens.histories.values()]
    return torch.cat([tokens.request, *(mean.unflatten(1, (-1, dim)) for mean in means)], dim=1)
