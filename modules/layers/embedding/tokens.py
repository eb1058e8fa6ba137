"""From ids to tokens: one TorchRec EmbeddingCollection for all features, and the assembly of its rows into tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from kernels.jagged import segment_mean
from modules.batch import FeatureSpec, RequestBatch, SparseFeature, Vendors
from modules.config import ManagedTable, ModelConfig

if TYPE_CHECKING:
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass
class JaggedSequence:
    """Behaviour tokens of every request, oldest first. Row r is `values[offsets[r]:offsets[r + 1]]`."""

    values: Tensor  # [sum T, width]
    offsets: Tensor  # [R + 1] int64
    times: Tensor  # [sum T] int64 seconds, counted from the time of the request: an event an hour ago is at -3600

    def rows(self, first: int, end: int) -> JaggedSequence:
        """The sequence of one request that owns values first:end."""
        return JaggedSequence(self.values[first:end], self.offsets.new_tensor([0, end - first]), self.times[first:end])


@dataclass
class Tokens:
    """What a model mixes: tokens of width d of requests, candidates and vendors, and one jagged sequence an event type.

    A sequence's width is (number of fields) * d: the aligned fields of an event stand side by side.
    """

    request: Tensor  # [R, n_request, d]
    candidate: Tensor  # [C, n_candidate, d]
    histories: dict[str, JaggedSequence]
    vendor: Tensor | None = None  # [V, n_vendor, d], where the data has features of vendors


class TokenEmbedding(nn.Module):
    """A collection of tables for each width, by the names that checkpoints have, and one of managed tables for each."""

    @classmethod
    def of(cls, spec: FeatureSpec, config: ModelConfig, device: torch.device | str) -> Self:
        """What a model with this configuration reads."""
        return cls(
            spec,
            config.dim,
            device,
            config.table_dims,
            managed_tables=config.managed_tables,
            table_std=config.table_std,
            dropout=config.embedding_dropout,
        )

    def _keep(self, collections: Mapping[int, nn.Module], managed: Mapping[int, nn.Module]) -> None:
        """By width."""
        first, *others = collections or [0]
        self.collection = collections.get(first)
        self.further = nn.ModuleDict({str(width): collections[width] for width in others})
        self.managed = nn.ModuleDict({str(width): each for width, each in managed.items()})

    def _plain(self) -> list[Any]:
        """Without managed tables."""
        return [*([] if self.collection is None else [self.collection]), *self.further.values()]


class FeatureEmbedding(TokenEmbedding):
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
        managed_tables: Mapping[str, ManagedTable] | None = None,
        table_std: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        """`table_std`: standard deviation of the initial rows, 1 / sqrt(their width) if None; `dropout`: of looked-up
        elements."""
        super().__init__()
        # Scoring, which has `LocalEmbedding`, needs no TorchRec.
        from torchrec.modules.embedding_configs import EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingCollection
        from torchrec.streamable import Pipelineable
        from torchrec.types import DataType

        Pipelineable.register(RequestBatch)
        features: dict[str, list[str]] = {}
        for name, table in spec.lookups():
            features.setdefault(table, []).append(name)
        managed = managed_tables or {}
        check_tables(spec, managed, "managed_tables", ".rows=100000")
        configs = {
            width: [
                EmbeddingConfig(
                    name=table,
                    num_embeddings=managed[table].rows if table in managed else spec.tables[table],
                    embedding_dim=width,
                    feature_names=features[table],
                    data_type=DataType.FP16 if row_dtype(spec, table) is torch.float16 else DataType.FP32,
                    init_fn=initial_rows(spec, table, table_std or 1 / math.sqrt(width)),
                )
                for table in tables
            ]
            for width, tables in tables_by_width(spec, dim, table_dims or {}).items()
        }
        plain = {width: [table for table in tables if table.name not in managed] for width, tables in configs.items()}
        collections = {
            width: EmbeddingCollection(tables=tables, device=torch.device(device))
            for width, tables in plain.items()
            if tables
        }
        of_managed = {}
        if managed:
            from modules.layers.embedding.managed import managed_collection

            for width, tables in configs.items():
                if chosen := [table for table in tables if table.name in managed]:
                    of_managed[width] = managed_collection(chosen, managed, spec.tables, str(device))
        self._keep(collections, of_managed)
        self.union = _Union()
        self.assemble = TokenAssembly(spec, dim, table_dims, dropout)

    @property
    def collections(self) -> list[EmbeddingCollection]:
        """One for each width of tables, and one more where there are managed ones."""
        return [*self._plain(), *(cast(Any, each)._embedding_module for each in self.managed.values())]

    def forward(self, batch: RequestBatch) -> Tokens:
        return self.assemble(self.look_up(batch.lookup), batch)

    def look_up(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of ids by feature, whose keys are those of `FeatureSpec.lookups`. On several ranks all call it."""
        parts = [collection(ids) for collection in self._plain()]
        parts += [collection(ids)[0] for collection in self.managed.values()]
        return self.union(*parts) if len(parts) > 1 else parts[0]


def initial_rows(spec: FeatureSpec, table: str, std: float) -> Callable[[Tensor], Tensor]:
    """How the rows of a table begin; those that files give are written over it."""
    return nn.init.zeros_ if table in spec.vector_tables else partial(nn.init.normal_, std=std)


def row_dtype(spec: FeatureSpec, table: str) -> torch.dtype:
    return getattr(torch, spec.vector_tables[table].dtype) if table in spec.vector_tables else torch.float32


def tables_by_width(spec: FeatureSpec, dim: int, table_dims: Mapping[str, int]) -> dict[int, list[str]]:
    """Tables that are looked up by the width of their rows, `dim` first. ValueError for those that cannot be."""
    check_tables(spec, table_dims, "table_dims", "=16")
    widths: dict[int, list[str]] = {}
    for table in dict.fromkeys(table for _, table in spec.lookups()):
        if table != table_name(table):
            raise ValueError(
                f"table {table!r} cannot be called so: a dot separates the parts of a parameter's name, and names of "
                f"attributes of nn.ModuleDict are taken; rename it, e.g. +data.tables={{{table}: {table_name(table)}}}"
            )
        own = spec.vector_tables[table].width if table in spec.vector_tables else table_dims.get(table, dim)
        widths.setdefault(own, []).append(table)
    return {width: widths[width] for width in sorted(widths, key=lambda width: width != dim)}


def table_name(name: str) -> str:
    """A name that a table of these ids can have: tables are parts of an `nn.ModuleDict`, whose attributes are taken."""
    name = name.replace(".", "_") or "_"
    while hasattr(_PARTS, name):
        name += "_"
    return name


_PARTS = nn.ModuleDict()


def check_tables(spec: FeatureSpec, named: Mapping[str, object], key: str, value: str) -> None:
    """ValueError for a table that the data does not have, or whose rows it gives."""
    if given := sorted(named.keys() & spec.vector_tables.keys()):
        raise ValueError(
            f"model.{key}.{given[0]}={named[given[0]]}: the rows of this table are vectors from files, of "
            f"width {spec.vector_tables[given[0]].width}; leave it out"
        )
    if unknown := sorted(named.keys() - spec.tables.keys()):
        tables = sorted(spec.tables)
        raise ValueError(
            f"model.{key} names {unknown[0]!r}; the tables are {', '.join(tables)}, e.g. "
            f"+model.{key}.{tables[0]}{value}"
        )


def vendors_of(batch: RequestBatch) -> Vendors:
    if batch.vendors is None:
        raise ValueError("the model was built for data with vendors; the batch has none")
    return batch.vendors


@dataclass
class LookedUp:
    """What token assembly reads of a JaggedTensor."""

    rows: Tensor

    def values(self) -> Tensor:
        return self.rows


class _Union(nn.Module):
    """One dictionary of all. As a module: the train pipeline, which traces to the lookups, need not look into it."""

    def forward(self, *parts: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {name: rows for part in parts for name, rows in part.items()}


class TokenAssembly(nn.Module):
    """Stacks looked-up rows into tokens; all dense features of a side become one token by a single linear layer.

    Rows may be in bfloat16: those of histories stay so, tokens of requests, candidates and vendors are float32.

    A vector becomes a token by a linear layer of its own.
    Rows of tables of another width, by `table_dims`, become tokens by a matrix of their table, and vectors from files
    (`FeatureSpec.vector_tables`) by a linear layer of theirs, whose bias alone is the token of ids without a vector.
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
        self.vendor_dense = nn.Linear(len(spec.vendor_dense), dim) if spec.vendor_dense else None
        self.request_vectors = nn.ModuleList(nn.Linear(vector.width, dim) for vector in spec.request_vectors)
        self.candidate_vectors = nn.ModuleList(nn.Linear(vector.width, dim) for vector in spec.candidate_vectors)
        self.vendor_vectors = nn.ModuleList(nn.Linear(vector.width, dim) for vector in spec.vendor_vectors)
        narrow = {table: width for table, width in (table_dims or {}).items() if width != dim}
        self.projections = nn.ModuleDict({table: nn.Linear(width, dim, bias=False) for table, width in narrow.items()})
        for projection in self.projections.parameters():
            nn.init.normal_(projection, std=1 / math.sqrt(dim))  # tokens are then as long as those of other tables
        for table, given in spec.vector_tables.items():
            self.projections[table] = layer = nn.Linear(given.width, dim)
            nn.init.normal_(layer.weight, std=1 / math.sqrt(given.width * dim))  # likewise, of standardised vectors
            nn.init.zeros_(layer.bias)
        featureless = not (spec.request or spec.request_columns)
        self.any_request = nn.Parameter(torch.randn(dim) / math.sqrt(dim)) if featureless else None

    def forward(self, embedded: Mapping[str, JaggedTensor | LookedUp], batch: RequestBatch) -> Tokens:
        request = self._side(embedded, batch.request_sparse.lengths(), self.spec.request, batch.num_requests)
        request += _vector_tokens(self.request_vectors, batch.request_dense)
        if self.request_dense is not None:
            request.append(self.request_dense(batch.request_dense[:, : len(self.spec.request_dense)]))
        if self.any_request is not None:
            request.append(self.any_request.expand(batch.num_requests, -1))
        tokens = Tokens(_stacked(request), self.candidates(embedded, batch), self._histories(embedded, batch))
        if self.spec.num_vendor_tokens:
            tokens.vendor = self._vendor(embedded, vendors_of(batch))
        return tokens

    def candidates(self, embedded: Mapping[str, JaggedTensor | LookedUp], batch: RequestBatch) -> Tensor:
        """[C, n_candidate, d]"""
        tokens = self._side(embedded, batch.candidate_sparse.lengths(), self.spec.candidate, batch.num_candidates)
        tokens += _vector_tokens(self.candidate_vectors, batch.candidate_dense)
        if self.candidate_dense is not None:
            tokens.append(self.candidate_dense(batch.candidate_dense[:, : len(self.spec.candidate_dense)]))
        return _stacked(tokens)

    def _vendor(self, embedded: Mapping[str, JaggedTensor | LookedUp], vendors: Vendors) -> Tensor:
        tokens = self._side(embedded, vendors.sparse.lengths(), self.spec.vendor, vendors.num_vendors)
        tokens += _vector_tokens(self.vendor_vectors, vendors.dense)
        if self.vendor_dense is not None:
            tokens.append(self.vendor_dense(vendors.dense[:, : len(self.spec.vendor_dense)]))
        return _stacked(tokens)

    def _side(
        self,
        embedded: Mapping[str, JaggedTensor | LookedUp],
        lengths: Tensor,
        features: Sequence[SparseFeature],
        num_rows: int,
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

    def _histories(
        self, embedded: Mapping[str, JaggedTensor | LookedUp], batch: RequestBatch
    ) -> dict[str, JaggedSequence]:
        if not self.spec.histories:
            return {}
        values = {}
        for event in self.spec.histories:
            fields = [self._projected(embedded[event.key(field)].values(), field.table) for field in event.fields]
            values[event.name] = torch.cat(fields, dim=-1)
        now = batch.request_time.repeat(len(self.spec.histories))
        counts, times = batch.history_times.lengths(), batch.history_times.values()
        offsets = _offsets(counts.view(-1, batch.num_requests))
        times = times - torch.repeat_interleave(now, counts, output_size=times.shape[0])
        times = times.split([rows.shape[0] for rows in values.values()])
        return {
            event: JaggedSequence(rows, of_event, time)
            for (event, rows), of_event, time in zip(values.items(), offsets, times, strict=True)
        }


def _offsets(lengths: Tensor) -> list[Tensor]:
    """Of the rows of lengths [E, R], each [R + 1]. Rows begin at multiples of 16 bytes, as kernels like them."""
    count = lengths.shape[1] + 1
    padded = nn.functional.pad(lengths.cumsum(1), (1, -count % 4))
    return [row[:count] for row in padded.unbind()]


def _stacked(tokens: list[Tensor]) -> Tensor:
    """Tokens [N, d] side by side, [N, n, d], in at least float32: sums of layers are added to them."""
    stacked = torch.stack(tokens, 1)
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32))


def _vector_tokens(projections: nn.ModuleList, dense: Tensor) -> list[Tensor]:
    """A token [N, dim] of each vector; together they are the last columns of `dense`."""
    widths = [cast("nn.Linear", projection).in_features for projection in projections]
    vectors = dense[:, dense.shape[1] - sum(widths) :].split(widths, 1) if widths else ()
    return [projection(vector) for projection, vector in zip(projections, vectors, strict=True)]
