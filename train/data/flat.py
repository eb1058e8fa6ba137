"""Requests as one matrix of numbers, a row for each candidate, for models of tables such as gradient-boosted trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import UNKNOWN_ID, FeatureSpec, RequestBatch, SparseFeature, owners

MOST_COLUMNS = 64
"""Rows of the largest table of a list feature that becomes a column of 0 and 1 for each id."""


class FlatFeatures:
    """The columns that a spec's features become.

    Numbers and vectors are as they are in batches. An id of a feature has its count in training,
    and is a category if its table is not too large; a list has its length, and columns of 0
    and 1 if its table is small. An event type has its number of events and the time since the newest; where a field of
    it has the table of a candidate's or vendor's id, also the number of events with that id and the time since the
    newest of them. Times are ln(1 + seconds). NaN is missing.
    """

    def __init__(self, spec: FeatureSpec, training: Iterable[RequestBatch], most_categories: int) -> None:
        """`training`: all of its batches, whose ids are counted; ids of tables of up to `most_categories` rows are
        categories."""
        self.spec = spec
        single = [feature for feature in spec.of_rows if not feature.is_list]
        self.categories = {  # and their numbers of rows
            feature.name: spec.tables[feature.table]
            for feature in single
            if spec.tables[feature.table] <= most_categories
        }
        self._counts = {feature.name: np.zeros(spec.tables[feature.table], np.int64) for feature in single}
        self.names: list[str] = []
        for batch in training:
            for side, features, rows in self._sides(batch):
                for feature in features:
                    if not feature.is_list:
                        ids = side[feature.name].values().numpy()[rows]
                        self._counts[feature.name] += np.bincount(ids, minlength=len(self._counts[feature.name]))
            self.names = self.names or [name for name, _ in self._columns(batch)]

    def rows(self, batch: RequestBatch) -> np.ndarray:
        """[C, columns] float32."""
        return np.stack([values for _, values in self._columns(batch)], axis=1, dtype=np.float32)

    def _sides(self, batch: RequestBatch) -> Iterator[tuple[KeyedJaggedTensor, Sequence[SparseFeature], np.ndarray]]:
        """(features, their description, [C] the row of each candidate) of requests, vendors and candidates."""
        yield batch.request_sparse, self.spec.request, batch.owner.numpy()
        if batch.vendors is not None:
            whose = owners(batch.vendors.candidate_offsets, batch.num_candidates)
            yield batch.vendors.sparse, self.spec.vendor, whose.numpy()
        yield batch.candidate_sparse, self.spec.candidate, np.arange(batch.num_candidates)

    def _columns(self, batch: RequestBatch) -> Iterator[tuple[str, np.ndarray]]:
        spec, owner = self.spec, batch.owner.numpy()
        compared: list[tuple[SparseFeature, np.ndarray]] = []
        dense = {id(batch.request_sparse): (spec.request_columns, batch.request_dense.numpy())}
        dense[id(batch.candidate_sparse)] = (spec.candidate_columns, batch.candidate_dense.numpy())
        if batch.vendors is not None:
            dense[id(batch.vendors.sparse)] = (spec.vendor_columns, batch.vendors.dense.numpy())
        for side, features, rows in self._sides(batch):
            names, numbers = dense[id(side)]
            yield from zip(names, numbers[rows].T, strict=True)
            for feature in features:
                ids, lengths = side[feature.name].values().numpy(), side[feature.name].lengths().numpy()
                if feature.is_list:
                    yield from self._list(feature, ids, lengths, rows)
                    continue
                ids = ids[rows]
                if side is not batch.request_sparse:
                    compared.append((feature, ids))
                yield f"{feature.name} rows", self._counts[feature.name][ids]
                if feature.name in self.categories:
                    yield feature.name, np.where(ids == UNKNOWN_ID, np.nan, ids)
        now = batch.request_time.numpy()
        for event in spec.histories:
            times, lengths = (part.numpy() for part in _parts(batch.history_times, event.name))
            ends = np.cumsum(lengths)
            newest = np.where(lengths > 0, np.append(times, 0)[ends - 1], now + 1)
            yield f"{event.name} events", lengths[owner]
            yield f"{event.name} since", _since(now, newest)[owner]
            whose = np.repeat(np.arange(len(lengths)), lengths)
            for field in event.fields:
                events = batch.histories[event.key(field)].values().numpy()
                for feature, ids in compared:
                    if feature.table == field.table:
                        size = spec.tables[field.table]
                        count, last = _matches(whose * size + events, times, owner * size + ids)
                        known = (ids != UNKNOWN_ID) & (count > 0)
                        name = f"{event.key(field)} = {feature.name}"
                        yield name, np.where(known, count, 0)
                        yield f"{name} since", _since(now[owner], np.where(known, last, now[owner] + 1))

    def _list(
        self, feature: SparseFeature, ids: np.ndarray, lengths: np.ndarray, rows: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{feature.name} length", lengths[rows]
        size = self.spec.tables[feature.table]
        if size <= MOST_COLUMNS:
            has = np.zeros((len(lengths), size), bool)
            has[np.repeat(np.arange(len(lengths)), lengths), ids] = True
            yield from ((f"{feature.name} {one}", has[rows, one]) for one in range(size))


def _parts(features: KeyedJaggedTensor, key: str) -> tuple:
    return features[key].values(), features[key].lengths()


def _matches(events: np.ndarray, times: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(number of `events` that equal each of `wanted`, time of the last one); events of one key are oldest first."""
    order = np.argsort(events, kind="stable")
    begin, end = (np.searchsorted(events[order], wanted, side) for side in ("left", "right"))
    return end - begin, np.append(times[order], 0)[end - 1]


def _since(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """ln(1 + seconds); NaN where `then` is not before `now`."""
    return np.where(then <= now, np.log1p(np.maximum(now - then, 0)), np.nan)
