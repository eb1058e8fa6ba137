"""Baselines on the tokens that InterFormer gets: DIN, DCNv2 and DLRM.

DCNv2 and DLRM do not model sequences: they see each history field as one more request token, the mean of its events.
All use SiLU, dropout in their MLPs, and a head of its own for each task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.ikbo import expand_rows
from kernels.jagged import jagged_dense_elementwise, jagged_index_select, jagged_linear, segment_mean, segment_sum
from modules.batch import EventType, FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.config import ModelConfig, option
from modules.embedding import JaggedSequence, Tokens
from modules.interaction import CrossNet, DotInteraction
from modules.mlp import MLP, TaskHeads
from modules.plain import is_plain


class ActivationUnit(nn.Module):
    """DIN's attention (arXiv 1706.06978): sum over events of MLP([q, k, q - k, q * k]) k, without a softmax.

    q holds, for every field of the event, the candidate's token that shares its table (item against item, category
    against category). A field that shares no table with a candidate feature is compared with the mean candidate token.
    SiLU instead of DIN's Dice, whose batch statistics would depend on which candidates share a batch.

    The first layer of the MLP, W [q, k, q - k, q * k], is (W_1 + W_3) q + (W_2 - W_3) k + W_4 (q * k): the part of q is
    computed once a candidate and added to those of its events, and q is copied to none of them.
    """

    def __init__(self, spec: FeatureSpec, event: EventType, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        tables = [feature.table for feature in spec.candidate]
        self.matches = [tables.index(field.table) if field.table in tables else None for field in event.fields]
        self.width = len(event.fields) * dim
        self.score = MLP(4 * self.width, hidden, 1)

    def forward(self, candidate: Tensor, sequence: JaggedSequence, rows: CandidateRows) -> Tensor:
        """candidate [C, n_c, d], sequence values [N, fields * d] at R rows -> [C, fields * d]; no event gives zeros.

        The number of pairs of candidate and event is known only on the device: one host sync.
        """
        fallback = candidate.mean(1)
        query = torch.cat([fallback if match is None else candidate[:, match] for match in self.matches], dim=1)
        key, offsets = jagged_index_select(sequence.values, sequence.offsets, rows.owner)
        weight = self._first(query, key, offsets)
        for layer in self.layers:
            weight = layer(weight)
        return segment_sum(weight * key, offsets)

    @property
    def layers(self) -> list[nn.Module]:
        """The MLP after its first layer and activation."""
        return list(self.score)[2:]

    def _first(self, query: Tensor, key: Tensor, offsets: Tensor) -> Tensor:
        """The first layer of the MLP: query [C, width], key [pairs, width] of rows `offsets` -> [pairs, hidden]."""
        first, *rest = self.score
        product = jagged_dense_elementwise(key, offsets, query, "mul")
        if not (is_plain(first, nn.Linear) and all(is_plain(layer, nn.SiLU) for layer in rest[:1])):
            query = expand_rows(query, offsets, key.shape[0])
            hidden = first(torch.cat([query, key, query - key, product], dim=1))
            return rest[0](hidden) if rest else hidden
        of_query, of_key, of_difference, of_product = first.weight.chunk(4, dim=1)
        return jagged_linear(
            torch.cat([key, product], dim=1),
            offsets,
            torch.cat([of_key - of_difference, of_product], dim=1),
            first.bias,
            functional.linear(query, of_query + of_difference),
            "silu" if rest else "none",
        )


class _Baseline(nn.Module):
    def aux_loss(self) -> Tensor:
        return next(self.parameters()).new_zeros(())


class DIN(_Baseline):
    """Deep Interest Network: an activation unit for each event type, then an MLP over all tokens."""

    @dataclass(kw_only=True)
    class Config(ModelConfig):
        name: str = "din"
        attention_hidden: list[int] = option([64], least=1)
        hidden: list[int] = option([128, 64], least=1)

        def graphs_refusal(self) -> str | None:
            return "model=din: its sizes are read from the device; use runtime.cuda_graphs=false"

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.events = spec.histories
        units = nn.ModuleList(ActivationUnit(spec, event, dim, config.attention_hidden) for event in spec.histories)
        self.units = cast("Sequence[ActivationUnit]", units)
        self.heads = TaskHeads(_num_tokens(spec) * dim, config.hidden, spec.num_outputs, config.dropout)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        rows = CandidateRows.of(batch)
        features = [rows.expand(tokens.request).flatten(1), tokens.candidate.flatten(1)]
        for event, unit in zip(self.events, self.units, strict=True):
            features.append(unit(tokens.candidate, tokens.histories[event.name], rows))
        return self.heads(torch.cat(features, dim=1))


class DCNv2(_Baseline):
    """DCNv2 (arXiv 2008.13535) in its parallel form: a low-rank cross network and an MLP side by side, then logits."""

    @dataclass(kw_only=True)
    class Config(ModelConfig):
        name: str = "dcnv2"
        num_cross_layers: int = 3
        rank: int = 32
        hidden: list[int] = option([128, 64], least=1)

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        width = _num_tokens(spec) * config.dim
        self.cross = CrossNet(width, config.num_cross_layers, config.rank)
        self.deep = MLP(width, config.hidden, dropout=config.dropout)
        self.heads = TaskHeads(width + (config.hidden[-1] if config.hidden else width), [], spec.num_outputs)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        x = _all_tokens(tokens, batch).flatten(1)
        return self.heads(torch.cat([self.cross(x), self.deep(x)], dim=1))


class DLRM(_Baseline):
    """DLRM (arXiv 1906.00091): dense tokens pass a bottom MLP, all tokens meet in inner products, then a top MLP.

    The dense tokens of request and candidate become one token; without dense features there is no bottom MLP and the
    top MLP reads inner products alone.
    """

    dense: Tensor
    sparse: Tensor

    @dataclass(kw_only=True)
    class Config(ModelConfig):
        name: str = "dlrm"
        bottom_hidden: list[int] = option([64], least=1)
        top_hidden: list[int] = option([128, 64], least=1)

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        dim, dropout = config.dim, config.dropout
        num_tokens = _num_tokens(spec)
        dense = [spec.num_request_tokens - 1] * bool(spec.request_dense) + [num_tokens - 1] * bool(spec.candidate_dense)
        sparse = [index for index in range(num_tokens) if index not in dense]
        self.register_buffer("dense", torch.tensor(dense, dtype=torch.int64), persistent=False)
        self.register_buffer("sparse", torch.tensor(sparse, dtype=torch.int64), persistent=False)
        self.bottom = MLP(len(dense) * dim, config.bottom_hidden, dim, dropout) if dense else None
        self.dot = DotInteraction(len(sparse) + bool(dense))
        self.heads = TaskHeads(self.dot.num_pairs + dim * bool(dense), config.top_hidden, spec.num_outputs, dropout)
        self.dim = dim

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        x = _all_tokens(tokens, batch)
        sparse = x.index_select(1, self.sparse)
        if self.bottom is None:
            return self.heads(self.dot(sparse))
        dense = self.bottom(x.index_select(1, self.dense).flatten(1))
        pairs = self.dot(torch.cat([dense[:, None], sparse], dim=1))
        return self.heads(torch.cat([dense, pairs], dim=1))


def _num_tokens(spec: FeatureSpec) -> int:
    """Tokens of a candidate when each history field counts as one."""
    fields = sum(len(event.fields) for event in spec.histories)
    return spec.num_request_tokens + fields + spec.num_candidate_tokens


def _all_tokens(tokens: Tokens, batch: RequestBatch) -> Tensor:
    """[C, n, d]: request tokens, the mean of each history field (zeros without events), candidate tokens."""
    dim = tokens.request.shape[2]
    means = [segment_mean(history.values, history.offsets) for history in tokens.histories.values()]
    shared = torch.cat([tokens.request, *(mean.unflatten(1, (-1, dim)) for mean in means)], dim=1)
    return torch.cat([CandidateRows.of(batch).expand(shared), tokens.candidate], dim=1)
