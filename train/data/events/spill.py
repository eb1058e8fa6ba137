"""Rows on the disk: records of fixed size, and the items of their lists one after another in files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from train.config.schema import EventsConfig
from train.data.batch import ranges
from train.data.events.names import categorical, known_columns, lists, numeric, vectors
from train.data.events.read import Columns, Log
from train.data.features.columns import Coded, CodedLists

ListName = tuple[str, str]
"""("", feature), (event type, field) or (event type, "") for the times of its events."""


class Dictionary:
    """The distinct ids of a column, in the order in which they first appear."""

    def __init__(self) -> None:
        self.values = pa.array([], pa.string())

    def codes(self, column: Coded | CodedLists) -> np.ndarray:
        """The column's codes, as codes into all ids that this has seen."""
        found = pc.index_in(column.values, value_set=self.values)
        new = found.is_null().to_numpy(zero_copy_only=False)
        place = np.where(new, len(self.values) + np.cumsum(new) - 1, found.fill_null(0).to_numpy())
        self.values = pa.concat_arrays([self.values, column.values.filter(pa.array(new))])
        return np.append(place, -1).astype(np.int32)[column.codes]


@dataclass
class Partition:
    """N records and, for each list column, the items of all of them."""

    records: np.ndarray  # [N] structured; "lengths" [N, lists] are the items of each record
    items: list[np.ndarray]

    def take(self, rows: np.ndarray) -> Partition:
        items = []
        for index, values in enumerate(self.items):
            lengths = self.records["lengths"][:, index]
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            items.append(values[ranges(starts[rows], lengths[rows])])
        return Partition(np.take(self.records, rows), items)

    def append_to(self, folder: Path, name: str) -> None:
        for file, values in zip(_files(folder, name, len(self.items)), (self.records, *self.items), strict=True):
            with file.open("ab") as out:
                values.tofile(out)

    @staticmethod
    def join(partitions: Sequence[Partition]) -> Partition:
        items = [np.concatenate(each) for each in zip(*(each.items for each in partitions), strict=True)]
        return Partition(np.concatenate([each.records for each in partitions]), items)


class PartitionFiles:
    """Partitions of one type in a folder."""

    def __init__(self, folder: Path, record: np.dtype, items: Sequence[np.dtype]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._types = folder, (record, *items)

    def append(self, number: int, partition: Partition) -> None:
        partition.append_to(self.folder, str(number))

    def read(self, number: int, begins: np.ndarray | None = None, ends: np.ndarray | None = None) -> Partition:
        """All of a partition, or the records begins[0]:ends[0] with the items begins[i]:ends[i] of their lists."""
        records, *items = (
            _read(file, dtype, 0 if begins is None else begins[index], None if ends is None else ends[index])
            for index, (file, dtype) in enumerate(
                zip(_files(self.folder, str(number), len(self._types) - 1), self._types, strict=True)
            )
        )
        return Partition(records, items)

    def remove(self, number: int) -> None:
        for file in _files(self.folder, str(number), len(self._types) - 1):
            file.unlink(missing_ok=True)


def _files(folder: Path, name: str, lists: int) -> list[Path]:
    return [folder / f"{name}.records", *(folder / f"{name}.items{index}" for index in range(lists))]


def _read(file: Path, dtype: np.dtype, begin: int, end: int | None) -> np.ndarray:
    if not file.exists():
        return np.zeros(0, dtype)
    return np.fromfile(file, dtype, -1 if end is None else end - begin, offset=begin * dtype.itemsize)


class Fields:
    """`Columns` as a `Partition` and back, with codes into one dictionary a column."""

    def __init__(self, config: EventsConfig) -> None:
        histories = config.histories.items()
        self.ids, self.numeric, self.config = categorical(config), numeric(config), config
        self.vectors = {name: each.width for name, each in vectors(config).items()}
        self.lists: list[ListName] = [("", name) for name in lists(config)]
        self.lists += [(name, field) for name, history in histories if history.lists for field in history.fields]
        self.timed = [(name, "") for name, history in histories if history.times]
        self.rows = [name for name, history in histories if not (history.lists or history.files)]
        self.known = known_columns(config)
        self.users, self.requests, self.vendors = Dictionary(), Dictionary(), Dictionary()
        names: list[str | ListName] = [*self.ids, *self.lists]
        self.dictionaries = {name: Dictionary() for name in names}
        self.record = np.dtype(
            [
                ("number", "<i8"),
                ("user", "<i4"),
                ("request", "<i4"),
                ("vendor", "<i4", (int(config.vendor is not None),)),
                ("time", "<i8"),
                ("split", "i1"),
                ("labels", "<f8", (len(config.labels),)),
                ("weight", "<f8", (int(config.weight is not None),)),
                ("ids", "<i4", (len(self.ids),)),
                ("numeric", "<f8", (len(self.numeric),)),
                ("vectors", "<f4", (sum(self.vectors.values()),)),
                ("known", "<i8", (len(self.known),)),
                ("chosen", "?", (len(self.rows),)),
                ("lengths", "<i4", (len(self.lists) + len(self.timed),)),
            ]
        )
        self.items = [np.dtype("<i4")] * len(self.lists) + [np.dtype("<i8")] * len(self.timed)

    def pack(self, columns: Columns) -> Partition:
        """The good rows."""
        records = np.zeros(len(columns.number), self.record)
        records["number"], records["time"], records["split"] = columns.number, columns.time, columns.split
        records["user"] = self.users.codes(columns.user) if self.config.user else columns.user.codes
        records["request"] = self.requests.codes(columns.request) if columns.request else -1
        if columns.vendor is not None:
            records["vendor"][:, 0] = self.vendors.codes(columns.vendor)
        records["labels"] = columns.labels
        if columns.weights is not None:
            records["weight"][:, 0] = columns.weights
        for index, name in enumerate(self.ids):
            records["ids"][:, index] = self.dictionaries[name].codes(columns.ids[name])
        for index, name in enumerate(self.numeric):
            records["numeric"][:, index] = columns.numeric[name]
        if self.vectors:
            records["vectors"] = np.concatenate([columns.vectors[name] for name in self.vectors], 1)
        for index, name in enumerate(self.known):
            records["known"][:, index] = columns.known[name]
        for index, name in enumerate(self.rows):
            records["chosen"][:, index] = columns.chosen[name]
        items = []
        for index, (event, name) in enumerate(self.lists):
            column = columns.fields[event][name] if event else columns.lists[name]
            records["lengths"][:, index] = np.diff(column.offsets)
            items.append(self.dictionaries[event, name].codes(column))
        for index, (event, _) in enumerate(self.timed, len(self.lists)):
            values, offsets = columns.times[event]
            records["lengths"][:, index] = np.diff(offsets)
            items.append(values)
        partition = Partition(records, items)
        return partition if columns.good.all() else partition.take(np.flatnonzero(columns.good))

    def unpack(self, partition: Partition) -> Columns:
        records = partition.records
        lists: dict[str, CodedLists] = {}
        fields: dict[str, dict[str, CodedLists]] = {event: {} for event, _ in self.lists if event}
        times = {}
        for index, ((event, name), items) in enumerate(zip([*self.lists, *self.timed], partition.items, strict=True)):
            offsets = np.append(0, np.cumsum(records["lengths"][:, index], dtype=np.int64))
            if index >= len(self.lists):
                times[event] = items, offsets
            else:
                target = fields[event] if event else lists
                target[name] = CodedLists(items, offsets, self.dictionaries[event, name].values)
        return Columns(
            number=_column(records, "number"),
            user=Coded(_column(records, "user"), self.users.values),
            time=_column(records, "time"),
            request=Coded(_column(records, "request"), self.requests.values) if self.config.request else None,
            vendor=Coded(_column(records, "vendor")[:, 0], self.vendors.values) if self.config.vendor else None,
            split=_column(records, "split"),
            labels=_column(records, "labels"),
            weights=_column(records, "weight")[:, 0] if self.config.weight else None,
            numeric={name: records["numeric"][:, index].copy() for index, name in enumerate(self.numeric)},
            vectors=self._vectors(records),
            ids={
                name: Coded(records["ids"][:, index].copy(), self.dictionaries[name].values)
                for index, name in enumerate(self.ids)
            },
            lists=lists,
            chosen={name: records["chosen"][:, index].copy() for index, name in enumerate(self.rows)},
            fields=fields,
            times=times,
            good=np.ones(len(records), bool),
            known={name: records["known"][:, index].copy() for index, name in enumerate(self.known)},
        )

    def _vectors(self, records: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(self.vectors.values()), dtype=np.int64)[:-1]
        parts = np.split(records["vectors"], ends, 1) if self.vectors else []
        return {name: part.copy() for name, part in zip(self.vectors, parts, strict=True)}


class LogFields:
    """`Log` as a `Partition` and back: entries of users that have labelled rows."""

    def __init__(self, names: Sequence[str]) -> None:
        self.dictionaries = {name: Dictionary() for name in names}
        self.record = np.dtype(
            [("owner", "<i4"), ("time", "<i8"), ("ids", "<i4", (len(names),)), ("lengths", "<i4", (0,))]
        )

    def pack(self, log: Log) -> Partition:
        records = np.zeros(len(log.owner), self.record)
        records["owner"], records["time"] = log.owner, log.time
        for index, (name, dictionary) in enumerate(self.dictionaries.items()):
            records["ids"][:, index] = dictionary.codes(log.fields[name])
        return Partition(records[log.events[log.owner[log.events] >= 0]], [])

    def unpack(self, partition: Partition) -> Log:
        records = partition.records
        fields = {
            name: Coded(records["ids"][:, index].copy(), dictionary.values)
            for index, (name, dictionary) in enumerate(self.dictionaries.items())
        }
        return Log(_column(records, "owner"), _column(records, "time"), fields, np.arange(len(records)))


def _column(records: np.ndarray, name: str) -> np.ndarray:
    return np.ascontiguousarray(records[name])
