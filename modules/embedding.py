"""From ids to tokens: one TorchRec EmbeddingCollection for all features, and the assembly of its rows into tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from kernels.jagged import segment_mean
from modules.batch import FeatureSpec, RequestBatch, SparseFeature


@dataclass
class JaggedSequence:
    """Behaviour tokens of every request, oldest first. Row r is `values[offsets[r]:offsets[r + 1]]`."""

    values: Tensor  # [sum T, width]
    offsets: Tensor  # [R + 1] int64
    times: Tensor  # [sum T] int64 seconds, counted from the time of the request: an event an hour ago is at -3600


@dataclass
class Tokens:
    """What a model mixes: tokens of width d of requests and of candidates, and one jagged sequence an event type.

    A sequence's width is (number of fields) * d: the aligned fields of an event stand side by side.
    """

    request: Tensor  # [R, n_request, d]
    candidate: Tensor  # [C, n_candidate, d]
    histories: dict[str, JaggedSequence]


class FeatureEmbedding(nn.Module):
    """Looks up every id of a batch and assembles tokens.

    One collection serves request, candidate and history features together, so a table can be shared by all of them.
    TorchRec's have one width: tables of another one, by `table_dims`, are in a further collection for each width.
    Lists are pooled after the lookup rather than in an EmbeddingBagCollection: a table cannot be shared between two
    collections, and unpooled lookups can be sharded every way on every device. Build on `device="meta"` and let
    DistributedModelParallel materialise the shards; no process then ever holds a whole table.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        dim: int,
        device: torch.device | str = "meta",
        table_dims: Mapping[str, int] | None = None,
        *,
        table_std: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        """`table_std`: standard deviation of the initial rows, 1 / sqrt(their width) if None; `dropout`: of looked-up
        elements."""
        super().__init__()
        table_dims = table_dims or {}
        if unknown := sorted(table_dims.keys() - spec.tables.keys()):
            tables = sorted(spec.tables)
            raise ValueError(
                f"model.table_dims names {unknown[0]!r}; the tables are {', '.join(tables)}, e.g. "
                f"+model.table_dims.{tables[0]}=16"
            )
        features: dict[str, list[str]] = {}
        for name, table in spec.lookups():
            if "." in table:
                raise ValueError(
                    f"table {table!r} has a dot, which separates the parts of a parameter's name; rename it, "
                    f"e.g. +data.tables={{{table}: {table.replace('.', '_')}}}"
                )
            features.setdefault(table, []).append(name)
        widths: dict[int, list[EmbeddingConfig]] = {}
        for table, names in features.items():
            width = table_dims.get(table, dim)
            config = EmbeddingConfig(
                name=table,
                num_embeddings=spec.tables[table],
                embedding_dim=width,
                feature_names=names,
                init_fn=partial(nn.init.normal_, std=table_std or 1 / math.sqrt(width)),
            )
            widths.setdefault(width, []).append(config)
        collections = {
            width: EmbeddingCollection(tables=tables, device=torch.device(device)) for width, tables in widths.items()
        }
        self.collection = collections.pop(dim if dim in collections else next(iter(collections)))
        self.further = nn.ModuleDict({str(width): collection for width, collection in collections.items()})
        self.union = _Union()
        self.assemble = TokenAssembly(spec, dim, table_dims, dropout)

    @property
    def collections(self) -> list[EmbeddingCollection]:
        """One for each width of tables."""
        return [self.collection, *cast("Iterable[EmbeddingCollection]", self.further.values())]

    def forward(self, batch: RequestBatch) -> Tokens:
        embedded = self.collection(batch.lookup)
        if self.further:
            embedded = self.union(embedded, *(collection(batch.lookup) for collection in self.further.values()))
        return self.assemble(embedded, batch)


class _Union(nn.Module):
    """One dictionary of all. As a module: the train pipeline, which traces to the lookups, need not look into it."""

    def forward(self, *parts: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {name: rows for part in parts for name, rows in part.items()}


class TokenAssembly(nn.Module):
    """Stacks looked-up rows into tokens; all dense features of a side become one token by a single linear layer.

    Rows of tables of another width, by `table_dims`, become tokens by a matrix of their table.
    InterFormer makes one dense token of all scalars; here each side has its own, so that request tokens stay at R rows.
    Data without request features (Criteo) still has requests: they all look like one learned token.
    The train loop hooks this module's input: it is where gradients of the tables can be inspected before the fused
    optimiser applies them.
    """

    def __init__(
        self, spec: FeatureSpec, dim: int, table_dims: Mapping[str, int] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = nn.Dropout(dropout)
        self.request_dense = nn.Linear(len(spec.request_dense), dim) if spec.request_dense else None
        self.candidate_dense = nn.Linear(len(spec.candidate_dense), dim) if spec.candidate_dense else None
        narrow = {table: width for table, width in (table_dims or {}).items() if width != dim}
        self.projections = nn.ModuleDict({table: nn.Linear(width, dim, bias=False) for table, width in narrow.items()})
        for projection in self.projections.parameters():
            nn.init.normal_(projection, std=1 / math.sqrt(dim))  # tokens are then as long as those of other tables
        featureless = not (spec.request or spec.request_dense)
        self.any_request = nn.Parameter(torch.randn(dim) / math.sqrt(dim)) if featureless else None

    def forward(self, embedded: dict[str, JaggedTensor], batch: RequestBatch) -> Tokens:
        request = self._side(embedded, batch.request_sparse.lengths(), self.spec.request, batch.num_requests)
        candidate = self._side(embedded, batch.candidate_sparse.lengths(), self.spec.candidate, batch.num_candidates)
        if self.request_dense is not None:
            request.append(self.request_dense(batch.request_dense))
        if self.any_request is not None:
            request.append(self.any_request.expand(batch.num_requests, -1))
        if self.candidate_dense is not None:
            candidate.append(self.candidate_dense(batch.candidate_dense))
        return Tokens(torch.stack(request, 1), torch.stack(candidate, 1), self._histories(embedded, batch))

    def _side(
        self, embedded: dict[str, JaggedTensor], lengths: Tensor, features: Sequence[SparseFeature], num_rows: int
    ) -> list[Tensor]:
        lengths = lengths.view(len(features), num_rows)
        tokens = []
        for index, feature in enumerate(features):
            rows = embedded[feature.name].values()
            if feature.is_list:
                rows = segment_mean(rows, nn.functional.pad(lengths[index].cumsum(0), (1, 0)))
            tokens.append(self._projected(rows, feature.table))
        return tokens

    def _projected(self, rows: Tensor, table: str) -> Tensor:
        """Rows of a table, [N, its width] -> [N, dim]."""
        rows = self.projections[table](rows).to(rows.dtype) if table in self.projections else rows
        return self.dropout(rows) if self.dropout.p else rows

    def _histories(self, embedded: dict[str, JaggedTensor], batch: RequestBatch) -> dict[str, JaggedSequence]:
        if not self.spec.histories:
            return {}
        lengths = batch.histories.lengths().view(-1, batch.num_requests)
        values, offsets, key = {}, {}, 0
        for event in self.spec.histories:
            fields = [self._projected(embedded[event.key(field)].values(), field.table) for field in event.fields]
            values[event.name] = torch.cat(fields, dim=-1)
            offsets[event.name] = nn.functional.pad(lengths[key].cumsum(0), (1, 0))
            key += len(event.fields)
        now = batch.request_time.repeat(len(self.spec.histories))
        counts, times = batch.history_times.lengths(), batch.history_times.values()
        times = times - torch.repeat_interleave(now, counts, output_size=times.shape[0])
        times = times.split([rows.shape[0] for rows in values.values()])
        return {
            event: JaggedSequence(values[event], offsets[event], time)
            for event, time in zip(values, times, strict=True)
        }
