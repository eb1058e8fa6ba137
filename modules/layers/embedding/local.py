"""Embedding tables of one process, without TorchRec: what scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from modules.config import ManagedTable
from modules.layers.embedding.managed_local import LocalRowsOfIds
from modules.layers.embedding.tokens import (
    LookedUp,
    TokenAssembly,
    TokenEmbedding,
    Tokens,
    check_tables,
    initial_rows,
    row_dtype,
    tables_by_width,
    vendors_of,
)

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class LocalEmbedding(TokenEmbedding):
    """`FeatureEmbedding` of one process in plain PyTorch: the same parameters by name, and no TorchRec.

    On `device="meta"` tables take no memory, for weights that are loaded with `assign=True`.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        dim: int,
        device: torch.device | str = "cpu",
        table_dims: Mapping[str, int] | None = None,
        *,
        managed_tables: Mapping[str, ManagedTable] | None = None,
        table_std: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        """The arguments are those of `FeatureEmbedding`."""
        super().__init__()
        self.spec = spec
        managed = managed_tables or {}
        check_tables(spec, managed, "managed_tables", ".rows=100000")
        widths = tables_by_width(spec, dim, table_dims or {})
        plain = {width: [table for table in tables if table not in managed] for width, tables in widths.items()}
        collections = {
            width: _LocalTables(spec, {table: spec.tables[table] for table in tables}, width, device, table_std)
            for width, tables in plain.items()
            if tables
        }
        of_managed = {}
        for width, tables in widths.items():
            if rows := {table: managed[table].rows for table in tables if table in managed}:
                of_managed[width] = _LocalManagedTables(spec, rows, width, device, table_std)
        self._keep(collections, of_managed)
        self.assemble = TokenAssembly(spec, dim, table_dims, dropout)

    def forward(self, batch: RequestBatch) -> Tokens:
        if self.spec.num_vendor_tokens:
            vendors_of(batch)
        return self.assemble(self._look_up(self.spec.lookups(), batch.sparse), batch)

    def candidates(self, batch: RequestBatch) -> Tensor:
        """`Tokens.candidate` alone."""
        lookups = [(feature.name, feature.table) for feature in self.spec.candidate]
        return self.assemble.candidates(self._look_up(lookups, [batch.candidate_sparse]), batch)

    def _look_up(self, lookups: Iterable[tuple[str, str]], parts: Sequence[KeyedJaggedTensor]) -> dict[str, LookedUp]:
        asked: dict[_Tables, list[tuple[str, str, Tensor]]] = {tables: [] for tables in self._all}
        tables_of = {table: tables for tables in asked for table in tables.tables}
        ids = [feature for part in parts for feature in part.values().split(part.length_per_key())]
        for (name, table), of_feature in zip(lookups, ids, strict=True):
            asked[tables_of[table]].append((name, table, of_feature))
        found: dict[str, LookedUp] = {}
        for tables, lookups_of in asked.items():
            if lookups_of:
                names, of_tables, of_features = zip(*lookups_of, strict=True)
                found |= {
                    name: LookedUp(rows.float())
                    for name, rows in zip(names, tables(of_tables, of_features), strict=True)
                }
        return found

    @property
    def _all(self) -> list[_Tables]:
        return [*self._plain(), *cast("Iterable[_Tables]", self.managed.values())]

    def join(self, device: torch.device | str) -> None:
        """Move the tables to `device`, side by side: without gradients, all features are then looked up by one launch
        instead of one each. Parameters keep their names and become views. Ids are not checked against their table."""
        for tables in self._all:
            tables.join(device)


class _LocalTables(nn.Module):
    def __init__(
        self, spec: FeatureSpec, rows: Mapping[str, int], width: int, device: torch.device | str, std: float | None
    ) -> None:
        super().__init__()
        tables = {}
        for table, count in rows.items():
            weight = torch.empty(count, width, dtype=row_dtype(spec, table), device=device)
            initial_rows(spec, table, std or 1 / math.sqrt(width))(weight)
            tables[table] = nn.Embedding(count, width, _weight=weight)
        self.embeddings = nn.ModuleDict(tables)
        self._joined: Tensor | None = None
        self._begins: tuple[object, Tensor] | None = None  # of the last lookup, for others like it and CUDA graphs

    @property
    def tables(self) -> list[str]:
        return list(self.embeddings)

    @torch.no_grad()
    def join(self, device: torch.device | str) -> None:
        """Of tables of one dtype."""
        weights = self._weights()
        self._joined, self._begins, self._first = None, None, {}
        if len({weight.dtype for weight in weights}) == 1:
            counts = [len(weight) for weight in weights]
            self._joined = weights[0].new_empty(sum(counts), weights[0].shape[1], device=device)
            for table, rows in zip(self.tables, self._joined.split(counts), strict=True):
                self._first[table] = rows.storage_offset() // max(1, rows.shape[1])
                parameter = cast("nn.Embedding", self.embeddings[table]).weight
                parameter.data = rows.copy_(parameter)
            self._places = [weight.data_ptr() for weight in self._weights()]

    def _weights(self) -> list[Tensor]:
        return [cast("nn.Embedding", each).weight for each in self.embeddings.values()]

    def forward(self, tables: Sequence[str], ids: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rows of the ids of each table."""
        joined = self._joined
        if joined is None or torch.is_grad_enabled() or self._places != [each.data_ptr() for each in self._weights()]:
            return [self.embeddings[table](of_table) for table, of_table in zip(tables, ids, strict=True)]
        counts = [len(of_table) for of_table in ids]
        kind, last = ([*tables], counts), self._begins
        if last is None or last[0] != kind:
            begins = torch.tensor([[self._first[table] for table in tables], counts], device=joined.device)
            last = self._begins = kind, torch.repeat_interleave(*begins, output_size=sum(counts))
        return nn.functional.embedding(torch.cat([*ids]) + last[1], joined).split(counts)


class _LocalManagedTables(nn.Module):
    """Its parts are called as TorchRec's."""

    def __init__(
        self, spec: FeatureSpec, rows: Mapping[str, int], width: int, device: torch.device | str, std: float | None
    ) -> None:
        super().__init__()
        self._embedding_module = _LocalTables(spec, rows, width, device, std)
        rows_of_ids = {table: LocalRowsOfIds(count, spec.tables[table], device) for table, count in rows.items()}
        self._managed_collision_collection = nn.ModuleDict({"_managed_collision_modules": nn.ModuleDict(rows_of_ids)})

    @property
    def tables(self) -> list[str]:
        return self._embedding_module.tables

    def join(self, device: torch.device | str) -> None:
        self._embedding_module.join(device)

    def forward(self, tables: Sequence[str], ids: Sequence[Tensor]) -> Sequence[Tensor]:
        rows_of_ids = cast(nn.ModuleDict, self._managed_collision_collection["_managed_collision_modules"])
        rows = [rows_of_ids[table](of_table) for table, of_table in zip(tables, ids, strict=True)]
        return cast("Sequence[Tensor]", self._embedding_module(tables, rows))


_Tables = _LocalTables | _LocalManagedTables
