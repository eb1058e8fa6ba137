"""Packs numpy columns into a `RequestBatch`. No Python loop over rows or requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from modules.batch import UNKNOWN_ID, EventType, FeatureSpec, RequestBatch, SparseFeature, Vendors
from train.data.jagged_features import JaggedFeatures

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass
class Ids:
    """Ids of one feature: `lengths[i]` of them for row i, or exactly one a row when `lengths` is None."""

    values: np.ndarray
    lengths: np.ndarray | None = None


@dataclass
class Events:
    """The events of one type, request after request, oldest first."""

    fields: list[np.ndarray]  # one [sum T] array of ids for each field of the event type
    times: np.ndarray  # [sum T] int64 seconds
    lengths: np.ndarray  # [R]


@dataclass
class VendorColumns:
    """Features of V vendors, request after request; the candidates of a vendor are neighbours."""

    sparse: Sequence[Ids]
    dense: np.ndarray  # [V, m_v]
    counts: np.ndarray  # [R] vendors of each request
    candidates: np.ndarray  # [V] candidates of each vendor


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum lengths] int64: starts[0], starts[0] + 1, ... (lengths[0] of them), then those of starts[1], and so on."""
    ends = np.cumsum(lengths, dtype=np.int64)
    shift = np.repeat(np.asarray(starts, np.int64) - (ends - lengths), lengths)
    return shift + np.arange(shift.size)


def pack(
    spec: FeatureSpec,
    *,
    request: Sequence[Ids],
    candidate: Sequence[Ids],
    request_dense: np.ndarray,
    candidate_dense: np.ndarray,
    histories: Sequence[Events],
    request_time: np.ndarray,
    candidate_counts: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    group: np.ndarray,
    row: np.ndarray,
    vendor: VendorColumns | None = None,
    torchrec: bool = True,
) -> RequestBatch:
    """Columns in the order of `spec`'s features, candidates of a request contiguous; ids in KeyedJaggedTensors, without
    `torchrec` in `JaggedFeatures`, which scoring takes as well. `vendor`: where the spec has features of vendors.

    `weights` [C] (None: 1) are those of all tasks. Raises ValueError when an id is negative or not below the rows of
    its table: embedding kernels do not check.
    """
    num_requests, num_candidates, kind = len(request_time), len(row), _kind(torchrec)
    weight = torch.ones(num_candidates) if weights is None else _tensor(weights, torch.float32)

    def nth_candidate(index: int) -> str:
        return f"source row {row[index]}"

    def nth_request(index: int) -> str:
        return f"request {index} of the batch"

    def nth_vendor(index: int) -> str:
        return f"vendor {index} of the batch"

    for features, columns, name_row in (
        (spec.request, request, nth_request),
        (spec.vendor, vendor.sparse if vendor else [], nth_vendor),
        (spec.candidate, candidate, nth_candidate),
    ):
        for feature, ids in zip(features, columns, strict=True):
            _check_ids(feature.name, feature, spec, ids.values, ids.lengths, name_row)
    for event, events in zip(spec.histories, histories, strict=True):
        for field, values in zip(event.fields, events.fields, strict=True):
            _check_ids(event.key(field), field, spec, values, events.lengths, nth_request)
    return RequestBatch(
        request_sparse=_keyed(kind, [f.name for f in spec.request], request, num_requests),
        candidate_sparse=_keyed(kind, [f.name for f in spec.candidate], candidate, num_candidates),
        request_dense=_tensor(request_dense, torch.float32),
        candidate_dense=_tensor(candidate_dense, torch.float32),
        histories=_keyed(
            kind,
            [key for event in spec.histories for key in event.keys],
            [Ids(values, events.lengths) for events in histories for values in events.fields],
            num_requests,
        ),
        history_times=_keyed(
            kind,
            [event.name for event in spec.histories],
            [Ids(events.times, events.lengths) for events in histories],
            num_requests,
        ),
        request_time=_tensor(request_time, torch.int64),
        candidate_offsets=_offsets(candidate_counts),
        labels=_tensor(labels, torch.float32),
        weights=weight[:, None].repeat(1, len(spec.tasks)),
        group=_tensor(group, torch.int64),
        row=_tensor(row, torch.int64),
        vendors=Vendors(
            sparse=_keyed(kind, [f.name for f in spec.vendor], vendor.sparse, len(vendor.candidates)),
            dense=_tensor(vendor.dense, torch.float32),
            offsets=_offsets(vendor.counts),
            candidate_offsets=_offsets(vendor.candidates),
        )
        if vendor
        else None,
    )


def empty_batch(spec: FeatureSpec) -> RequestBatch:
    """One request of unknown ids with no history and no candidate: the step of a rank that has no rows left."""

    def unknown(features: Sequence[SparseFeature], rows: int) -> list[Ids]:
        one = np.full(rows, UNKNOWN_ID)
        return [Ids(one[:0], np.zeros(rows)) if feature.is_list else Ids(one) for feature in features]

    def no_events(event: EventType) -> Events:
        return Events([np.zeros(0)] * len(event.fields), np.zeros(0), np.zeros(1))

    none = np.zeros(0)
    return pack(
        spec,
        request=unknown(spec.request, 1),
        candidate=unknown(spec.candidate, 0),
        request_dense=np.zeros((1, len(spec.request_columns))),
        candidate_dense=np.zeros((0, len(spec.candidate_columns))),
        histories=[no_events(event) for event in spec.histories],
        request_time=np.zeros(1),
        candidate_counts=np.zeros(1),
        labels=np.zeros((0, len(spec.tasks))),
        group=none,
        row=none,
        vendor=VendorColumns(unknown(spec.vendor, 0), np.zeros((0, len(spec.vendor_columns))), np.zeros(1), none)
        if spec.num_vendor_tokens
        else None,
    )


def append_candidates(batch: RequestBatch, ids: Tensor) -> RequestBatch:
    """`batch` with one more request behind it, of unknown ids and no history, whose candidates are the rows `ids` [n].

    For candidates with one feature. They have no labels and weigh 0, so that nothing counts them by mistake.
    """
    count = ids.shape[0]

    def more(features: KeyedJaggedTensor, lengths: Sequence[int]) -> KeyedJaggedTensor:
        return _with_rows(features, [torch.tensor([length]) for length in lengths], 1)

    def rows(tensor: Tensor, added: int, value: float = 0) -> Tensor:
        return torch.cat([tensor, tensor.new_full((added, *tensor.shape[1:]), value)])

    candidates = batch.candidate_sparse
    (key,) = candidates.keys()
    return replace(
        batch,
        request_sparse=more(batch.request_sparse, [1] * len(batch.request_sparse.keys())),
        candidate_sparse=type(candidates)(
            keys=[key],
            values=torch.cat([candidates.values(), ids]),
            lengths=rows(candidates.lengths(), count, 1),
            stride=candidates.stride() + count,
        ),
        request_dense=rows(batch.request_dense, 1),
        candidate_dense=rows(batch.candidate_dense, count),
        histories=more(batch.histories, [0] * len(batch.histories.keys())),
        history_times=more(batch.history_times, [0] * len(batch.history_times.keys())),
        request_time=rows(batch.request_time, 1),
        candidate_offsets=torch.cat([batch.candidate_offsets, batch.candidate_offsets[-1:] + count]),
        labels=rows(batch.labels, count, math.nan),
        weights=rows(batch.weights, count),
        group=rows(batch.group, count),
        row=torch.cat([batch.row, batch.row[-1:].repeat(count) if batch.row.numel() else batch.row.new_zeros(count)]),
    )


def pad_events(batch: RequestBatch, spec: FeatureSpec, multiple: int) -> RequestBatch:
    """`batch` with the events of each type filled up to a multiple, so that sizes come back from batch to batch.

    The added events are unknown ids of added requests without candidates, which come after the batch's own: no
    prediction and no loss depends on them. The number of added requests is what a whole multiple of events needs, so
    it is a constant, too.
    """
    if not spec.histories:
        return batch
    added = -(-multiple // min(event.max_length for event in spec.histories))

    def rows(tensor: Tensor, value: Tensor | int = 0) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(added, *tensor.shape[1:]) + value])

    times = batch.history_times.to_dict()
    missing = []  # [added] for each event type
    for event in spec.histories:
        count = -times[event.name].values().numel() % multiple
        missing.append((count - event.max_length * torch.arange(added)).clamp(0, event.max_length))
    ids = [torch.full((added,), 0 if feature.is_list else 1) for feature in spec.request]
    fields = [counts for event, counts in zip(spec.histories, missing, strict=True) for _ in event.fields]
    vendors = batch.vendors
    return replace(
        batch,
        vendors=vendors and replace(vendors, offsets=rows(vendors.offsets, vendors.offsets[-1])),
        request_sparse=_with_rows(batch.request_sparse, ids, added),
        request_dense=rows(batch.request_dense),
        histories=_with_rows(batch.histories, fields, added),
        history_times=_with_rows(batch.history_times, missing, added),
        request_time=rows(batch.request_time),
        candidate_offsets=rows(batch.candidate_offsets, batch.candidate_offsets[-1]),
    )


def _with_rows(features: KeyedJaggedTensor, more: Sequence[Tensor], added: int) -> KeyedJaggedTensor:
    """Each key with that many unknown ids for each of the added rows, after its own ids; `more` has [added] a key."""
    parts = [(features[key], counts) for key, counts in zip(features.keys(), more, strict=True)]
    pad = nn.functional.pad
    values = [pad(part.values(), (0, int(counts.sum())), value=UNKNOWN_ID) for part, counts in parts]
    lengths = [torch.cat([part.lengths(), counts.to(part.lengths().dtype)]) for part, counts in parts]
    return type(features)(
        keys=features.keys(),
        values=torch.cat(values) if values else features.values(),
        lengths=torch.cat(lengths) if lengths else features.lengths(),
        stride=features.stride() + added,
    )


def _check_ids(
    name: str,
    feature: SparseFeature,
    spec: FeatureSpec,
    values: np.ndarray,
    lengths: np.ndarray | None,
    name_row: Callable[[int], str],
) -> None:
    rows = spec.tables[feature.table]
    if values.size == 0 or (values.min() >= 0 and values.max() < rows):
        return
    position = int(np.flatnonzero((values < 0) | (values >= rows))[0])
    owner = position if lengths is None else int(np.searchsorted(np.cumsum(lengths), position, side="right"))
    raise ValueError(
        f"id {values[position]} of feature {name!r} at {name_row(owner)} is outside table {feature.table!r}: "
        f"expected 0 to {rows - 1}"
    )


def _kind(torchrec: bool) -> type:
    if not torchrec:
        return JaggedFeatures
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # which scoring does without

    return KeyedJaggedTensor


def _keyed(kind: type, keys: list[str], columns: Sequence[Ids], stride: int) -> Any:
    lengths = [np.ones(stride) if column.lengths is None else column.lengths for column in columns]
    return kind(
        keys=keys,
        values=_concatenate([column.values for column in columns], torch.int64),
        lengths=_concatenate(lengths, torch.int32),
        stride=stride,
    )


def _concatenate(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    result = torch.empty(sum(part.size for part in parts), dtype=dtype)
    if parts:
        np.concatenate(parts, out=result.numpy(), casting="unsafe")
    return result


def _offsets(counts: np.ndarray) -> Tensor:
    return nn.functional.pad(_tensor(counts, torch.int64).cumsum(0), (1, 0))


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
