"""Partitions in the order of their requests, and the merge of all of them by time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from train.data.events.read import Columns
from train.data.events.spill import Fields, Partition, PartitionFiles
from train.data.histories import History
from train.data.requests import SPLITS, Formed

SAMPLES = 32
"""Keys of each run, from which the limits of runs are chosen."""
KEY = np.dtype([("split", "i1"), ("time", "<i8"), ("user", "<i4")])


class Shards:
    """Requests sorted by (split, time, user), their rows as records, and the events of their histories.

    All requests of a user are in one shard. Merged, `runs` of about `rows` rows follow each other.
    """

    def __init__(self, folder: Path, number: int, fields: Fields, events: Sequence[str]) -> None:
        folder.mkdir()
        self.number, self.candidates = number, 0
        self._folder, self._names = folder, list(events)
        lists = len(fields.items)
        self._request = np.dtype(
            [
                ("split", "i1"),
                ("time", "<i8"),
                ("user", "<i4"),
                ("count", "<i8"),
                ("begins", "<i8", (1 + lists,)),  # in the shard's records and in the items of each list
                ("ranges", "<i8", (len(events), 2)),  # starts and ends among the shard's events
            ]
        )
        self._rows = PartitionFiles(folder / "rows", fields.record, fields.items)
        self._earlier = PartitionFiles(folder / "earlier", fields.record, fields.items)
        self._sizes = np.zeros((number, 1 + lists), np.int64)  # records and items
        self._lengths = np.zeros(number, np.int64)  # requests
        self._events = np.zeros((number, len(events)), np.int64)
        self._at_once = fields.config.rows_at_once

    def add(
        self,
        shard: int,
        partition: Partition,
        formed: Formed,
        columns: Columns,
        histories: Mapping[str, History],
        codes: Mapping[str, np.ndarray],
    ) -> None:
        """`codes` [E, fields] of the events of each type."""
        rows = partition.take(formed.order)
        first = formed.offsets[:-1]
        requests = np.zeros(len(first), self._request)
        requests["split"], requests["count"] = formed.splits, np.diff(formed.offsets)
        requests["time"], requests["user"] = rows.records["time"][first], rows.records["user"][first]
        requests["begins"][:, 0] = first
        lengths = rows.records["lengths"]
        requests["begins"][:, 1:] = (np.cumsum(lengths, 0, dtype=np.int64) - lengths)[first]
        for index, name in enumerate(self._names):
            history = histories[name]
            requests["ranges"][:, index] = np.stack([history.starts, history.ends], 1)
            np.save(self._folder / f"codes{index}.{shard}.npy", codes[name])
            np.save(self._folder / f"times{index}.{shard}.npy", history.times)
            self._events[shard, index] = len(history.times)
        requests.tofile(self._file(shard))
        self._rows.append(shard, rows)
        self._earlier.append(shard, partition.take(formed.earlier))
        self._sizes[shard] = len(rows.records), *(len(items) for items in rows.items)
        self._lengths[shard] = len(requests)
        self.candidates += len(rows.records)

    def whole(self, shard: int) -> Partition:
        return self._rows.read(shard)

    def earlier(self, shard: int) -> Partition:
        """Training rows that are in histories only."""
        return self._earlier.read(shard)

    def first_rows(self, shard: int) -> np.ndarray:
        """[requests + 1] int64: the first row of each, and the number of rows."""
        return np.append(self._read(shard)["begins"][:, 0], self._sizes[shard, 0])

    def ranges(self, shard: int, event: str) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends) of each request among the shard's events."""
        found = self._read(shard)["ranges"][:, self._names.index(event)]
        return found[:, 0], found[:, 1]

    def events(self, shard: int, event: str) -> tuple[np.ndarray, np.ndarray]:
        """(codes [E, fields], times [E] in seconds)."""
        index = self._names.index(event)
        codes, times = (np.load(self._folder / f"{name}{index}.{shard}.npy") for name in ("codes", "times"))
        return codes, times

    def requests_of_split(self) -> tuple[list[int], int]:
        """(how many requests are of split -1, 0, 1, and so on, how many rows those of -1 have)."""
        counts, rows = np.zeros(len(SPLITS) + 1, np.int64), 0
        for shard in range(self.number):
            requests = self._read(shard)
            counts += np.bincount(requests["split"] + 1, minlength=len(counts))
            rows += int(requests["count"][requests["split"] < 0].sum())
        return counts.tolist(), rows

    def slices(self, run: int) -> list[tuple[int, int, int]]:
        """(shard, first row, the one after the last) of the rows of a run."""
        found = []
        for shard in range(self.number):
            _, begins, ends = self._slice(shard, *self._edges[run : run + 2, shard])
            found.append((shard, int(begins[0]), int(ends[0])))
        return found

    @property
    def runs(self) -> int:
        return len(self._edges) - 1

    def rows_of(self, run: int) -> tuple[Partition, np.ndarray, np.ndarray]:
        """(rows, requests, their order): shard after shard; "ranges" count the events of all shards."""
        partitions, requests = [], []
        bases = np.cumsum(self._events, 0) - self._events
        for shard in range(self.number):
            found, begins, ends = self._slice(shard, *self._edges[run : run + 2, shard])
            found["ranges"] += bases[shard][:, None]
            partitions.append(self._rows.read(shard, begins, ends))
            requests.append(found)
        merged = np.concatenate(requests)
        return Partition.join(partitions), merged, _order(merged)

    def request_after(self, candidates: int) -> int:
        """The first request of all shards before which at least so many candidates came."""
        before, first = 0, 0
        for run in range(self.runs):
            counts = self._counts(run)
            offsets = before + np.append(0, np.cumsum(counts))
            if offsets[-1] >= candidates or run == self.runs - 1:
                return first + int(np.searchsorted(offsets, candidates))
            before, first = int(offsets[-1]), first + len(counts)
        raise AssertionError("there is at least one run")

    def positions(self, requests: int) -> np.ndarray:
        """[shards]: how many requests of each shard are among the first of all."""
        first = 0
        for run in range(self.runs):
            begin, end = self._edges[run], self._edges[run + 1]
            size = int((end - begin).sum())
            if requests < first + size:
                whose = np.repeat(np.arange(self.number), end - begin)
                order = _order(self._merged(run))
                return begin + np.bincount(whose[order[: requests - first]], minlength=self.number)
            first += size
        return self._lengths.copy()

    @cached_property
    def _edges(self) -> np.ndarray:
        """[runs + 1, shards]: where the requests of each run begin, between keys that halve, third, ... a sample."""
        runs = -(-self.candidates // self._at_once) or 1
        every = max(1, int(self._lengths.sum()) // (runs * SAMPLES))
        samples = np.sort(np.concatenate([_keys(self._read(shard)[::every]) for shard in range(self.number)]))
        limits = samples[np.arange(1, runs) * len(samples) // runs]
        edges = np.zeros((runs + 1, self.number), np.int64)
        for shard in range(self.number):
            keys = _keys(self._read(shard))
            found = [bisect_left(range(len(keys)), limit.item(), key=lambda i: keys[i].item()) for limit in limits]
            edges[1:, shard] = [*found, len(keys)]
        return edges

    def _slice(self, shard: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(requests begin:end, where their rows and items begin, where those end)."""
        more = min(end + 1, self._lengths[shard])
        found = self._read(shard, begin, more)
        begins = found["begins"][0] if len(found) else self._sizes[shard]
        ends = found["begins"][end - begin] if more > end else self._sizes[shard]
        return found[: end - begin], begins, ends

    def _merged(self, run: int) -> np.ndarray:
        begin, end = self._edges[run], self._edges[run + 1]
        return np.concatenate([self._read(shard, begin[shard], end[shard]) for shard in range(self.number)])

    def _counts(self, run: int) -> np.ndarray:
        requests = self._merged(run)
        return requests["count"][_order(requests)]

    def _read(self, shard: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        count = -1 if end is None else int(end - begin)
        return np.fromfile(self._file(shard), self._request, count, offset=int(begin) * self._request.itemsize)

    def _file(self, shard: int) -> Path:
        return self._folder / f"{shard}.requests"


def _keys(requests: np.ndarray) -> np.ndarray:
    """A copy: fields of an array would hold all of it in memory."""
    keys = np.zeros(len(requests), KEY)
    for name in KEY.fields or ():
        keys[name] = requests[name]
    return keys


def _order(requests: np.ndarray) -> np.ndarray:
    """Those of a user stay in the order that they have."""
    return np.lexsort([requests[name] for name in ("user", "time", "split")])
