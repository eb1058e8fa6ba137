"""`RequestBatch`, the one structure that every model takes, and `FeatureSpec`, which says what is in it.

R requests (a user at a moment) have C candidates (the things scored for them). The classical impression batch, one
candidate a request, is C = R. Data may have a level between the two: V vendors (advertisers, shops, hotels), each with
candidates of one request. `train.data.batch` packs rows into a batch.

TorchRec is imported where a batch is looked up in its collections: scoring, which does not, needs no TorchRec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modules import packing

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

UNKNOWN_ID = 0
"""Row of every table that missing ids map to, and unseen ones unless a source has rows for them; others start at 1."""


@dataclass(frozen=True)
class SparseFeature:
    """A categorical feature: exactly one id a row, or any number of them when `is_list` (mean-pooled to one token)."""

    name: str
    table: str
    is_list: bool = False


@dataclass(frozen=True)
class VectorFeature:
    """`width` numbers that are one feature, e.g. the embedding of a text, and become one token."""

    name: str
    width: int

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of its numbers, in their order."""
        return tuple(f"{self.name}[{index}]" for index in range(self.width))


@dataclass(frozen=True)
class VectorTable:
    """A table whose rows are vectors from files, by id; ids without one have rows of zeros."""

    width: int  # of its rows: a multiple of 4, filled up with zeros
    dtype: str = "float32"
    frozen: bool = True  # the rows do not learn, only what makes tokens of them


@dataclass(frozen=True)
class EventType:
    """A kind of behaviour (click, like, ...): position-aligned `fields`, of which the newest `max_length` are kept."""

    name: str
    fields: tuple[SparseFeature, ...]
    max_length: int

    def key(self, field: SparseFeature) -> str:
        """Name of a field of this event type in `RequestBatch.histories`."""
        return f"{self.name}.{field.name}"

    @property
    def keys(self) -> list[str]:
        return [self.key(field) for field in self.fields]


@dataclass(frozen=True)
class FeatureSpec:
    """What a data source offers and a model is built for. `tables` maps a table's name to its number of rows."""

    tables: dict[str, int]
    request: tuple[SparseFeature, ...]
    candidate: tuple[SparseFeature, ...]
    histories: tuple[EventType, ...]
    request_dense: tuple[str, ...]
    candidate_dense: tuple[str, ...]
    tasks: tuple[str, ...]
    max_candidates: int  # of one request, in any batch: a constant that attention over a request's candidates needs
    outputs: tuple[int, ...] = ()  # logits of a candidate for each task; none given: one each
    vendor: tuple[SparseFeature, ...] = ()
    vendor_dense: tuple[str, ...] = ()
    request_vectors: tuple[VectorFeature, ...] = ()
    candidate_vectors: tuple[VectorFeature, ...] = ()
    vendor_vectors: tuple[VectorFeature, ...] = ()
    vector_tables: dict[str, VectorTable] = dataclasses.field(default_factory=dict)  # of `tables`, by name

    def __post_init__(self) -> None:
        names = [name for name, _ in self.lookups()]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"feature names must be unique over request, vendor, candidate and histories; repeated: {repeated}"
            )
        unknown = sorted({table for _, table in self.lookups()} - set(self.tables))
        if unknown:
            raise ValueError(f"features refer to undeclared tables: {unknown}; declared: {sorted(self.tables)}")
        if not self.tasks:
            raise ValueError("a feature spec needs at least one task, e.g. tasks=('click',)")
        if self.max_candidates < 1:
            raise ValueError(f"max_candidates must be at least 1, got {self.max_candidates}")

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> FeatureSpec:
        """The inverse of `dataclasses.asdict`, also after JSON."""

        def features(items: Sequence[Mapping[str, Any]]) -> tuple[SparseFeature, ...]:
            return tuple(SparseFeature(**item) for item in items)

        return cls(
            tables=dict(saved["tables"]),
            request=features(saved["request"]),
            candidate=features(saved["candidate"]),
            histories=tuple(
                EventType(item["name"], features(item["fields"]), item["max_length"]) for item in saved["histories"]
            ),
            request_dense=tuple(saved["request_dense"]),
            candidate_dense=tuple(saved["candidate_dense"]),
            tasks=tuple(saved["tasks"]),
            max_candidates=saved["max_candidates"],
            outputs=tuple(saved.get("outputs", ())),
            vendor=features(saved.get("vendor", ())),
            vendor_dense=tuple(saved.get("vendor_dense", ())),
            request_vectors=tuple(VectorFeature(**item) for item in saved.get("request_vectors", ())),
            candidate_vectors=tuple(VectorFeature(**item) for item in saved.get("candidate_vectors", ())),
            vendor_vectors=tuple(VectorFeature(**item) for item in saved.get("vendor_vectors", ())),
            vector_tables={name: VectorTable(**item) for name, item in saved.get("vector_tables", {}).items()},
        )

    def lookups(self) -> Iterator[tuple[str, str]]:
        """(feature name, table) of every lookup, in the order of `RequestBatch.lookup`'s keys."""
        for feature in self.of_rows:
            yield feature.name, feature.table
        for event in self.histories:
            for field in event.fields:
                yield event.key(field), field.table

    @property
    def of_rows(self) -> tuple[SparseFeature, ...]:
        """All but the fields of histories."""
        return (*self.request, *self.vendor, *self.candidate)

    @property
    def num_outputs(self) -> int:
        """Logits of a candidate, over all tasks: more than tasks where one tells several classes apart."""
        return sum(self.outputs) if self.outputs else len(self.tasks)

    @property
    def request_columns(self) -> tuple[str, ...]:
        """Of `RequestBatch.request_dense`: the dense features, then the numbers of each vector."""
        return (*self.request_dense, *(name for vector in self.request_vectors for name in vector.columns))

    @property
    def vendor_columns(self) -> tuple[str, ...]:
        """Of `Vendors.dense`."""
        return (*self.vendor_dense, *(name for vector in self.vendor_vectors for name in vector.columns))

    @property
    def candidate_columns(self) -> tuple[str, ...]:
        """Of `RequestBatch.candidate_dense`."""
        return (*self.candidate_dense, *(name for vector in self.candidate_vectors for name in vector.columns))

    @property
    def num_request_tokens(self) -> int:
        """One token a feature; all dense features of a side make one token together. Never 0, see TokenAssembly."""
        return max(1, len(self.request) + len(self.request_vectors) + bool(self.request_dense))

    @property
    def num_vendor_tokens(self) -> int:
        """0: requests have candidates, and no vendors between."""
        return len(self.vendor) + len(self.vendor_vectors) + bool(self.vendor_dense)

    @property
    def num_candidate_tokens(self) -> int:
        return len(self.candidate) + len(self.candidate_vectors) + bool(self.candidate_dense)

    @property
    def max_events(self) -> int:
        """Longest history of a request, over all event types together."""
        return sum(event.max_length for event in self.histories)


@dataclass
class Vendors:
    """V vendors between requests and candidates; a vendor of two requests is two of these.

    Those of request r are `offsets[r]:offsets[r + 1]`, the candidates of vendor v `candidate_offsets[v]:
    candidate_offsets[v + 1]`, so `candidate_offsets[offsets]` are the offsets of the requests' candidates. Requests
    without vendors and vendors without candidates are allowed.
    """

    sparse: KeyedJaggedTensor  # keys: spec.vendor, stride V
    dense: Tensor  # [V, m_v] float32, columns: spec.vendor_columns
    offsets: Tensor  # [R + 1] int64
    candidate_offsets: Tensor  # [V + 1] int64

    @property
    def num_vendors(self) -> int:
        return self.dense.shape[0]


@dataclass
class RequestBatch:
    """R requests with their C candidates, jagged histories and labels.

    Batches that are scored may hold `train.data.jagged_features.JaggedFeatures` in place of KeyedJaggedTensors.
    `candidate_offsets` is non-decreasing and starts at 0; requests without candidates are allowed. Histories are oldest
    first and strictly before `request_time`. A label of NaN was not observed.
    """

    request_sparse: KeyedJaggedTensor  # keys: spec.request, stride R
    candidate_sparse: KeyedJaggedTensor  # keys: spec.candidate, stride C
    request_dense: Tensor  # [R, m_u] float32, columns: spec.request_columns
    candidate_dense: Tensor  # [C, m_c] float32, columns: spec.candidate_columns
    histories: KeyedJaggedTensor  # keys: event.field, stride R
    history_times: KeyedJaggedTensor  # keys: event, stride R; values int64 seconds
    request_time: Tensor  # [R] int64 seconds
    candidate_offsets: Tensor  # [R + 1] int64
    labels: Tensor  # [C, tasks] float32
    weights: Tensor  # [C, tasks] float32
    group: Tensor  # [C] int64, the user that GAUC groups by
    row: Tensor  # [C] int64, the candidate's row in its source, for predictions and error messages
    vendors: Vendors | None = None  # where the spec has features of vendors

    @property
    def num_requests(self) -> int:
        return self.request_time.shape[0]

    @property
    def num_candidates(self) -> int:
        return self.labels.shape[0]

    @property
    def owner(self) -> Tensor:
        """[C] int64: the request of each candidate. Needs no host sync."""
        return owners(self.candidate_offsets, self.num_candidates)

    @property
    def sparse(self) -> list[KeyedJaggedTensor]:
        """The ids of all parts, in the order of `FeatureSpec.lookups`."""
        vendors = [] if self.vendors is None else [self.vendors.sparse]
        return [self.request_sparse, *vendors, self.candidate_sparse, self.histories]

    @cached_property
    def lookup(self) -> KeyedJaggedTensor:
        """Every id of the batch as one KeyedJaggedTensor over R, in the order of `FeatureSpec.lookups`.

        A request's candidates are contiguous, so the ids of a candidate feature are also a jagged list per request, and
        so are those of vendors. One stride for all features means one embedding collection, one all-to-all, and tables
        that request, candidate and history features share.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        requests, parts = self.num_requests, self.sparse
        lengths = [self.request_sparse.lengths()]
        if self.vendors is not None:
            lengths.append(_per_request(self.vendors.sparse, self.vendors.num_vendors, self.vendors.offsets))
        lengths.append(_per_request(self.candidate_sparse, self.num_candidates, self.candidate_offsets))
        lengths.append(self.histories.lengths())
        counts = [part.length_per_key_or_none() for part in parts]
        return KeyedJaggedTensor(
            keys=[key for part in parts for key in part.keys()],
            values=torch.cat([part.values() for part in parts]),
            lengths=torch.cat(lengths),
            stride=requests,
            # Without it, whoever needs these numbers later would wait for the device.
            length_per_key=None if None in counts else [count for part in counts if part for count in part],
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> RequestBatch:
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RequestBatch:
        return self._moved(Tensor.pin_memory)

    def packed(self) -> RequestBatch:
        """The same batch in one piece of memory, which goes between processes and to a device as one tensor."""
        return _of_parts(packing.packed(self._parts()))

    def __reduce__(self) -> tuple[Callable[..., RequestBatch], tuple[object, ...]]:
        return _unpickled, packing.reduced(self._parts())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> RequestBatch:
        return _of_parts(packing.moved(self._parts(), move))

    def _parts(self) -> list[Any]:
        """The fields, those of the vendors last."""
        parts = [getattr(self, f.name) for f in fields(self) if f.name != "vendors"]
        return parts + [getattr(self.vendors, f.name) for f in fields(Vendors) if self.vendors is not None]

    def _tensors(self) -> list[Tensor]:
        return packing.tensors_of(self._parts())

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._parts():
            part.record_stream(stream)

    def expand(self) -> RequestBatch:
        """The same candidates, each with a copy of its request, and of its vendor: the batch that a broadcasting model
        would train on."""
        owner, vendors = self.owner, self.vendors
        own = torch.arange(self.num_candidates + 1, device=owner.device)
        if vendors is not None:
            whose = owners(vendors.candidate_offsets, self.num_candidates)
            vendors = Vendors(select_rows(vendors.sparse, whose), vendors.dense[whose], own, own)
        return RequestBatch(
            request_sparse=select_rows(self.request_sparse, owner),
            candidate_sparse=self.candidate_sparse,
            request_dense=self.request_dense[owner],
            candidate_dense=self.candidate_dense,
            histories=select_rows(self.histories, owner),
            history_times=select_rows(self.history_times, owner),
            request_time=self.request_time[owner],
            candidate_offsets=own,
            labels=self.labels,
            weights=self.weights,
            group=self.group,
            row=self.row,
            vendors=vendors,
        )


def owners(offsets: Tensor, total: int) -> Tensor:
    """[total] int64: the row of each value, those of row r being `offsets[r]:offsets[r + 1]`. Needs no host sync."""
    counts = offsets.diff()
    rows = torch.arange(counts.shape[0], device=counts.device)
    return torch.repeat_interleave(rows, counts, output_size=total)


def _per_request(features: KeyedJaggedTensor, rows: int, offsets: Tensor) -> Tensor:
    """Ids of each request for each key, [keys * R], where features have rows of which request r has a range."""
    lengths = features.lengths().view(len(features.keys()), rows)
    ends = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    return ends[:, offsets].diff(dim=1).to(lengths.dtype).flatten()


def _of_parts(parts: Sequence[Any]) -> RequestBatch:
    """The inverse of `RequestBatch._parts`."""
    own = len(fields(RequestBatch)) - 1
    batch = RequestBatch(*parts[:own])
    if parts[own:]:
        batch.vendors = Vendors(*parts[own:])
    return batch


def _unpickled(*reduced: Any) -> RequestBatch:
    return _of_parts(packing.assembled(*reduced))


def with_candidates(batch: RequestBatch, count: int) -> RequestBatch:
    """A batch of one request with `count` candidates: its own, repeated as often as needed."""
    rows = torch.arange(count, device=batch.row.device) % batch.num_candidates
    names = ("candidate_dense", "labels", "weights", "group", "row")
    return replace(
        batch,
        vendors=None if batch.vendors is None else _vendors_of(batch.vendors, rows, batch.num_candidates),
        candidate_sparse=select_rows(batch.candidate_sparse, rows),
        candidate_offsets=torch.tensor([0, count], device=rows.device),
        **{name: getattr(batch, name)[rows] for name in names},
    )


def _vendors_of(vendors: Vendors, rows: Tensor, num_candidates: int) -> Vendors:
    """Those of the given candidates of one request; each run of them is a vendor, and so is each repetition."""
    whose = owners(vendors.candidate_offsets, num_candidates)[rows]
    begins = torch.nn.functional.pad((whose.diff() != 0) | (rows.diff() < 0), (1, 0), value=True).nonzero().squeeze(1)
    chosen = whose[begins]
    return Vendors(
        sparse=select_rows(vendors.sparse, chosen),
        dense=vendors.dense[chosen],
        offsets=torch.tensor([0, len(chosen)], device=rows.device),
        candidate_offsets=torch.nn.functional.pad(begins, (0, 1), value=len(rows)),
    )


def select_rows(features: KeyedJaggedTensor, rows: Tensor) -> KeyedJaggedTensor:
    """The given rows of every key, in order and with repetition."""
    num_keys, num_rows = len(features.keys()), features.stride()
    key = torch.arange(num_keys, device=rows.device).repeat_interleave(rows.numel())
    source = key * num_rows + rows.repeat(num_keys)
    lengths = features.lengths()[source]
    starts = features.offsets()[source]
    total = int(lengths.sum())
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths, output_size=total)
    values = features.values()[torch.arange(total, device=rows.device) + shift]
    return type(features)(keys=features.keys(), values=values, lengths=lengths, stride=rows.numel())
