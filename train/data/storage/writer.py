"""Writes the columns of a cache folder request after request, so that they need not be in memory together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from modules.batch import EventType, FeatureSpec, SparseFeature
from train.data.features.columns import Coded, CodedLists
from train.data.storage import store

Sparse = Mapping[str, Coded | CodedLists]


class RowsOfIds(Protocol):
    """`Vocabulary` or `Hashing`."""

    def rows(self, table: str, values: pa.StringArray) -> np.ndarray: ...


@dataclass
class VendorBlock:
    """The vendors of a block's requests."""

    counts: np.ndarray  # [R] vendors of each request
    candidates: np.ndarray  # [V] candidates of each vendor
    sparse: Sparse  # by feature
    dense: np.ndarray  # [V, m_v]


@dataclass
class Block:
    """R consecutive requests with their C candidates, in the order that they are numbered in."""

    time: np.ndarray  # [R] int64 milliseconds
    user: np.ndarray  # [R]
    counts: np.ndarray  # [R] candidates of each request
    row: np.ndarray  # [C]
    labels: np.ndarray  # [C, tasks]
    weights: np.ndarray | None  # [C]
    request: Sparse  # by feature
    candidate: Sparse
    request_dense: np.ndarray  # [R, m_u]
    candidate_dense: np.ndarray  # [C, m_c]
    events: Mapping[str, tuple[np.ndarray, np.ndarray]]  # event type -> (starts, ends) [R] among its events
    vendor: VendorBlock | None = None


class Writer:
    """Appends blocks of requests, and events, to the arrays that `train.data.source.PreparedSource` reads."""

    def __init__(self, folder: Path, spec: FeatureSpec, ids: RowsOfIds) -> None:
        self._spec, self._ids = spec, ids
        self._arrays: dict[str, _Array] = {}
        self._folder = folder
        self._rows: dict[tuple[str, int], tuple[pa.StringArray, np.ndarray]] = {}
        self._append("candidate_offsets", np.zeros(1, np.int64))
        self._candidates = 0
        self._vendors = 0
        if spec.num_vendor_tokens:
            self._append("vendor_offsets", np.zeros(1, np.int64))
            self._append("vendor_candidate_offsets", np.zeros(1, np.int64))
        self._items: dict[str, int] = {}

    def add(self, block: Block) -> None:
        if block.vendor is not None:
            self._add_vendors(block.vendor)
        self._append("request_time", block.time // 1000)
        self._append("user", block.user.astype(np.int64))
        self._append("candidate_offsets", self._candidates + np.cumsum(block.counts))
        self._candidates += len(block.row)
        self._append("row", block.row)
        self._append("labels", block.labels.astype(np.float32))
        self._append("request_dense", block.request_dense.astype(np.float32))
        self._append("candidate_dense", block.candidate_dense.astype(np.float32))
        if block.weights is not None:
            self._append("weights", block.weights.astype(np.float32))
        self._features("request", self._spec.request, block.request, len(block.time))
        self._features("candidate", self._spec.candidate, block.candidate, len(block.row))
        for name, (starts, ends) in block.events.items():
            self._append(f"history.{name}.starts", starts)
            self._append(f"history.{name}.ends", ends)

    def _add_vendors(self, block: VendorBlock) -> None:
        """Before the block's candidates are counted."""
        self._append("vendor_offsets", self._vendors + np.cumsum(block.counts))
        self._append("vendor_candidate_offsets", self._candidates + np.cumsum(block.candidates))
        self._append("vendor_dense", block.dense.astype(np.float32))
        self._features("vendor", self._spec.vendor, block.sparse, len(block.candidates))
        self._vendors += len(block.candidates)

    def events(self, event: EventType, fields: Sequence[Coded], times: np.ndarray) -> None:
        """Events of a type, behind those that it has. times [E]: seconds."""
        mapped = [self._map(field.table, column) for field, column in zip(event.fields, fields, strict=True)]
        self._append(f"history.{event.name}.ids", np.stack(mapped, 1))
        self._append(f"history.{event.name}.times", times)

    def close(self) -> None:
        for array in self._arrays.values():
            array.close()

    def _features(self, side: str, features: Sequence[SparseFeature], columns: Sparse, rows: int) -> None:
        single = np.zeros((rows, sum(not feature.is_list for feature in features)), np.int32)
        taken = 0
        for feature in features:
            column = columns[feature.name]
            ids = self._map(feature.table, column)
            if isinstance(column, CodedLists):
                name = f"{side}_list.{feature.name}"
                if name not in self._items:
                    self._items[name] = 0
                    self._append(f"{name}.offsets", np.zeros(1, np.int64))
                self._append(f"{name}.ids", ids)
                self._append(f"{name}.offsets", self._items[name] + column.offsets[1:])
                self._items[name] += len(ids)
            else:
                single[:, taken] = ids
                taken += 1
        self._append(f"{side}_ids", single)

    def _map(self, table: str, column: Coded | CodedLists) -> np.ndarray:
        """Rows of a column's ids. Columns of several blocks share their values, which are looked up once."""
        key = table, id(column.values)
        if key not in self._rows:
            self._rows[key] = column.values, self._ids.rows(table, column.values)  # kept, so that no other has its id()
        return self._rows[key][1][column.codes]

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._arrays:
            self._arrays[name] = _Array(store.array_file(self._folder, name), values)
        self._arrays[name].append(values)


class _Array:
    """A .npy file that grows."""

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self._file = path.open("wb")
        self._header: Callable[[int], None] = lambda length: np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(like.dtype),
                "fortran_order": False,
                "shape": (length, *like.shape[1:]),
            },
        )
        self._dtype, self._length = like.dtype, 0
        self._header(0)  # NumPy leaves room for a longer first axis

    def append(self, values: np.ndarray) -> None:
        np.ascontiguousarray(values, self._dtype).tofile(self._file)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._header(self._length)
        self._file.close()
