"""Statistics of labelled rows: of all in memory, or part by part through the disk. Both make the same numbers.

A statistic needs all rows of a key, and histories all rows of a user, so rows are dealt once more, by key; statistics
come one after another, so that the disk holds the records of one. A part that does not fit, since half of the rows are
of one country, is divided again, by time: counters are carried from piece to piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from train.config.schema import DataConfig, EventsConfig
from train.data.events.read import Columns
from train.data.features import mapping
from train.data.requests import Formed, Requests
from train.data.statistics import describe, store
from train.data.statistics.groups import ALWAYS, Base, Group, State
from train.data.statistics.values import Prior
from train.data.storage.rows import NEVER

log = logging.getLogger(__name__)

MOST_PARTS = 1024
SAMPLES = 4096
"""Records of a part, by which it is divided by time."""


def settled(config: EventsConfig) -> EventsConfig:
    """With statistics by name in place of `auto`: those of the run of `data.vocabulary_of`, if there is one."""
    if config.statistics == "auto" and config.vocabulary_of:
        return replace(config, statistics=mapping.about(Path(config.vocabulary_of)).get("statistics", {}))
    described = {name: asdict(each) for name, each in describe.statistics(config).items()}
    return replace(config, statistics=described)


def uncounted(data: DataConfig) -> bool:
    """Whether candidates have numbers or vectors and nothing has statistics."""
    if not isinstance(data, EventsConfig) or settled(data).statistics:
        return False
    return bool(data.candidate_numeric or data.candidate_vectors)


class Statistics:
    """All statistics of a configuration, and the counters that they begin with: none, or those of an earlier run."""

    def __init__(self, config: EventsConfig, folder: Path) -> None:
        """`folder`: where the counters after all rows are written."""
        self.base = Base(config)
        self.groups = [Group(self.base, name, each) for name, each in describe.statistics(config).items()]
        self.names = list(describe.all_features(config))
        self.prior = Prior(self.base.tasks)
        self._earlier = Path(config.vocabulary_of) / mapping.COUNTERS if config.vocabulary_of else None
        self._folder = folder / mapping.COUNTERS
        self._until = NEVER
        if self.groups:
            self._folder.mkdir()
            if self._earlier:
                self.prior = store.read_prior(self._earlier, self.base.tasks)
                self._until = self.prior.newest()

    def whole(self, columns: Columns, requests: Requests) -> dict[str, np.ndarray]:
        """[N] float32 by feature, NaN of rows in no request and of what is not known."""
        values = {name: np.full(len(columns.number), np.nan, np.float32) for name in self.names}
        if self.groups:
            base = self.base.records(columns, requests.order, requests.offsets)
            self.see(base)
            features = iter(self.names)
            for number, group in enumerate(self.groups):
                records = np.concatenate([group.records(base), *group.of_log()])
                asks, found, state = group.sweep(records, self.earlier(number), self.prior)
                self.close(number, state)
                for column in found.T:
                    values[next(features)][requests.order[asks["place"]]] = column
            self.done()
        return values

    def see(self, base: np.ndarray) -> None:
        """Count the labels of rows, before any statistic of theirs is computed."""
        first = int(base["second"].min(initial=self._until))
        if first < self._until:
            log.warning(
                "data.statistics: rows from %s on come after those until %s, which data.vocabulary_of has counted: "
                "their numbers lack these, and rows that both have count twice; give each row once, in time order",
                *(np.datetime64(second, "s") for second in (first, self._until)),
            )
            self._until = NEVER  # said once
        self.prior.add(base["second"], base["known"], base["observed"], base["positive"])

    def earlier(self, number: int) -> State:
        group = self.groups[number]
        if self._earlier is None or group.each.log:  # a log is given whole, with what an earlier run has counted
            return group.none()
        return store.read(self._earlier, number, group)

    def close(self, number: int, state: State) -> None:
        store.write(self._folder, number, state)

    def done(self) -> None:
        store.write_prior(self._folder, self.prior)


class Spilled:
    """Statistics of rows on the disk."""

    def __init__(self, config: EventsConfig, folder: Path, work: Path, shards: int) -> None:
        """`folder`: as of `Statistics`; `work`: an empty folder for records."""
        self.all, self.shards = Statistics(config, folder), shards
        self._work, self._at_once = work, config.rows_at_once
        self._rows = np.zeros(shards, np.int64)  # in requests
        self._counted = 0
        work.mkdir()

    def add(self, shard: int, columns: Columns, formed: Formed) -> None:
        """The rows of a shard."""
        if not self.all.groups:
            return
        base = self.all.base.records(columns, formed.order, formed.offsets)
        self.all.see(base)
        base.tofile(self._work / f"{shard}.base")
        self._rows[shard] = len(formed.order)
        self._counted += len(base)

    def run(self) -> None:
        """Once all shards have come."""
        for number, group in enumerate(self.all.groups):
            parts = min(-(-self._counted // self._at_once), MOST_PARTS)
            sizes = self._deal(group, parts)
            limits = [-(-index * 2**32 // parts) << 32 for index in range(parts + 1)]
            earlier = self.all.earlier(number)
            for part, size in enumerate(sizes):
                state = earlier.of_keys(limits[part], limits[part + 1])
                for records, between in self._pieces(group, part, size):
                    asks, found, state = group.sweep(records, state, self.all.prior, between)
                    self._keep(number, asks, found)
                self.all.close(number, state)
        if self.all.groups:
            self.all.done()
        for shard in range(self.shards):
            self._gather(shard)

    def of(self, shard: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """[rows, features] float32 of candidates begin:end of a shard."""
        width = len(self.all.names)
        count = (self._rows[shard] if end is None else end) - begin
        if not width or not count:
            return np.zeros((count, width), np.float32)
        found = np.fromfile(self._file(shard), np.float32, count * width, offset=begin * width * 4)
        return found.reshape(count, width)

    def named(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """By feature."""
        return {name: values[:, index] for index, name in enumerate(self.all.names)}

    def _deal(self, group: Group, parts: int) -> list[int]:
        """Deal the records of a statistic by key; how many each part has."""
        sizes = [0] * parts
        for records in self._records(group):
            whose = ((records["key"] >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)).astype(np.int16)
            self._append(records, whose, sizes, "part")
        return sizes

    def _records(self, group: Group) -> Iterator[np.ndarray]:
        for shard in range(self.shards):
            yield group.records(np.fromfile(self._work / f"{shard}.base", self.all.base.record), shard)
        yield from group.of_log()

    def _append(self, records: np.ndarray, whose: np.ndarray, sizes: list[int], name: str) -> None:
        records = np.take(records, np.argsort(whose, kind="stable"))
        ends = np.cumsum(np.bincount(whose, minlength=len(sizes)))
        for index, (begin, end) in enumerate(zip(np.append(0, ends[:-1]), ends, strict=True)):
            with (self._work / f"{index}.{name}").open("ab") as file:
                records[begin:end].tofile(file)
            sizes[index] += int(end - begin)

    def _pieces(self, group: Group, part: int, size: int) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
        """The records of a part with the seconds that each takes, all at once or divided by time."""
        file, record = self._work / f"{part}.part", group.record
        if size <= self._at_once * 5 // 4:  # parts are not equal to the record
            records = np.fromfile(file, record)
            file.unlink()
            yield records, ALWAYS
            return

        def chunks() -> Iterator[np.ndarray]:
            for begin in range(0, size, self._at_once):
                yield np.fromfile(file, record, self._at_once, offset=begin * record.itemsize)

        number = -(-size // self._at_once)
        every = max(size // SAMPLES, 1)
        sample = np.sort(np.concatenate([np.maximum(each["second"], each["asked"])[::every] for each in chunks()]))
        cuts = np.unique(sample[np.arange(1, number) * len(sample) // number])
        sizes = [0] * (len(cuts) + 1)
        for each in chunks():
            asked = np.where(each["asked"] == NEVER, NEVER, each["asked"] - 1)
            happens = [
                np.where(seconds == NEVER, -1, np.searchsorted(cuts, seconds, side="right"))
                for seconds in (each["second"], asked, *each["known"].T)
            ]
            for piece in range(len(sizes)):
                chosen = each[np.logical_or.reduce([place == piece for place in happens])]
                self._append(chosen, np.zeros(len(chosen), np.int16), sizes[piece : piece + 1], f"{piece}.piece")
        file.unlink()
        limits = [ALWAYS[0], *cuts.tolist(), ALWAYS[1]]
        for piece in range(len(sizes)):
            file = self._work / f"0.{piece}.piece"
            records = np.fromfile(file, record)
            file.unlink()
            yield records, (limits[piece], limits[piece + 1])

    def _keep(self, number: int, asks: np.ndarray, found: np.ndarray) -> None:
        results = np.zeros(len(asks), self._result(number))
        results["place"], results["values"] = asks["place"], found
        results = np.take(results, np.argsort(asks["shard"], kind="stable"))
        ends = np.cumsum(np.bincount(asks["shard"], minlength=self.shards))
        for shard, (begin, end) in enumerate(zip(np.append(0, ends[:-1]), ends, strict=True)):
            with (self._work / f"{shard}.{number}.results").open("ab") as file:
                results[begin:end].tofile(file)

    def _gather(self, shard: int) -> None:
        """The results of a shard, in the order of its candidates."""
        values = np.full((self._rows[shard], len(self.all.names)), np.nan, np.float32)
        begin = 0
        for number, group in enumerate(self.all.groups):
            file = self._work / f"{shard}.{number}.results"
            results = np.fromfile(file, self._result(number))
            values[results["place"], begin : begin + group.features] = results["values"]
            begin += group.features
            file.unlink()
        (self._work / f"{shard}.base").unlink(missing_ok=True)
        values.tofile(self._file(shard))

    def _result(self, number: int) -> np.dtype:
        return np.dtype([("place", "<i4"), ("values", "<f4", (self.all.groups[number].features,))])

    def _file(self, shard: int) -> Path:
        return self._work / f"{shard}.values"
