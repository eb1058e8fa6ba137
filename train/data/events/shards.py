"""Parts in the order of their requests, and the merge of all of them by time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from train.data.events.read import Columns
from train.data.events.spill import Fields, Part, PartFiles
from train.data.histories import History
from train.data.requests import SPLITS, Formed

SAMPLES = 32
"""Keys of each slab, from which the limits of slabs are chosen."""
KEY = np.dtype([("part", "i1"), ("time", "<i8"), ("user", "<i4")])


class Shards:
    """Requests sorted by (part, time, user), their rows as records, and the events of their histories.

    All requests of a user are in one shard. Merged, `slabs` of about `rows` rows follow each other.
    """

    def __init__(self, folder: Path, number: int, fields: Fields, events: Sequence[str]) -> None:
        folder.mkdir()
        self.number, self.candidates = number, 0
        self._folder, self._names = folder, list(events)
        lists = len(fields.items)
        self._request = np.dtype(
            [
                ("part", "i1"),
                ("time", "<i8"),
                ("user", "<i4"),
                ("count", "<i8"),
                ("begins", "<i8", (1 + lists,)),  # in the shard's records and in the items of each list
                ("ranges", "<i8", (len(events), 2)),  # starts and ends among the shard's events
            ]
        )
        self._rows = PartFiles(folder / "rows", fields.record, fields.items)
        self._earlier = PartFiles(folder / "earlier", fields.record, fields.items)
        self._sizes = np.zeros((number, 1 + lists), np.int64)  # records and items
        self._lengths = np.zeros(number, np.int64)  # requests
        self._events = np.zeros((number, len(events)), np.int64)
        self._at_once = fields.config.rows_at_once

    def add(
        self,
        shard: int,
        part: Part,
        formed: Formed,
        columns: Columns,
        histories: Mapping[str, History],
        codes: Mapping[str, np.ndarray],
    ) -> None:
        """`codes` [E, fields] of the events of each type."""
        rows = part.take(formed.order)
        first = formed.offsets[:-1]
        requests = np.zeros(len(first), self._request)
        requests["part"], requests["count"] = formed.parts, np.diff(formed.offsets)
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
        self._earlier.append(shard, part.take(formed.earlier))
        self._sizes[shard] = len(rows.records), *(len(items) for items in rows.items)
        self._lengths[shard] = len(requests)
        self.candidates += len(rows.records)

    def whole(self, shard: int) -> Part:
        return self._rows.read(shard)

    def earlier(self, shard: int) -> Part:
        """Training rows that are in histories only."""
        return self._earlier.read(shard)

    def begins(self, shard: int) -> np.ndarray:
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

    def requests_of_part(self) -> tuple[list[int], int]:
        """(how many requests are of part -1, 0, 1, and so on, how many rows those of -1 have)."""
        counts, rows = np.zeros(len(SPLITS) + 1, np.int64), 0
        for shard in range(self.number):
            requests = self._read(shard)
            counts += np.bincount(requests["part"] + 1, minlength=len(counts))
            rows += int(requests["count"][requests["part"] < 0].sum())
        return counts.tolist(), rows

    def slices(self, slab: int) -> list[tuple[int, int, int]]:
        """(shard, first row, the one after the last) of the rows of a slab."""
        found = []
        for shard in range(self.number):
            _, begins, ends = self._slice(shard, *self._edges[slab : slab + 2, shard])
            found.append((shard, int(begins[0]), int(ends[0])))
        return found

    @property
    def slabs(self) -> int:
        return len(self._edges) - 1

    def slab(self, slab: int) -> tuple[Part, np.ndarray, np.ndarray]:
        """(rows, requests, their order): shard after shard; "ranges" count the events of all shards."""
        parts, requests = [], []
        bases = np.cumsum(self._events, 0) - self._events
        for shard in range(self.number):
            found, begins, ends = self._slice(shard, *self._edges[slab : slab + 2, shard])
            found["ranges"] += bases[shard][:, None]
            parts.append(self._rows.read(shard, begins, ends))
            requests.append(found)
        merged = np.concatenate(requests)
        return Part.join(parts), merged, _order(merged)

    def place(self, candidates: int) -> int:
        """The first request of all shards before which at least so many candidates came."""
        before, first = 0, 0
        for slab in range(self.slabs):
            counts = self._counts(slab)
            offsets = before + np.append(0, np.cumsum(counts))
            if offsets[-1] >= candidates or slab == self.slabs - 1:
                return first + int(np.searchsorted(offsets, candidates))
            before, first = int(offsets[-1]), first + len(counts)
        raise AssertionError("there is at least one slab")

    def positions(self, requests: int) -> np.ndarray:
        """[shards]: how many requests of each shard are among the first of all."""
        first = 0
        for slab in range(self.slabs):
            begin, end = self._edges[slab], self._edges[slab + 1]
            size = int((end - begin).sum())
            if requests < first + size:
                whose = np.repeat(np.arange(self.number), end - begin)
                order = _order(self._merged(slab))
                return begin + np.bincount(whose[order[: requests - first]], minlength=self.number)
            first += size
        return self._lengths.copy()

    @cached_property
    def _edges(self) -> np.ndarray:
        """[slabs + 1, shards]: where the requests of each slab begin, between keys that halve, third, ... a sample."""
        slabs = -(-self.candidates // self._at_once) or 1
        every = max(1, int(self._lengths.sum()) // (slabs * SAMPLES))
        samples = np.sort(np.concatenate([_keys(self._read(shard)[::every]) for shard in range(self.number)]))
        limits = samples[np.arange(1, slabs) * len(samples) // slabs]
        edges = np.zeros((slabs + 1, self.number), np.int64)
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

    def _merged(self, slab: int) -> np.ndarray:
        begin, end = self._edges[slab], self._edges[slab + 1]
        return np.concatenate([self._read(shard, begin[shard], end[shard]) for shard in range(self.number)])

    def _counts(self, slab: int) -> np.ndarray:
        requests = self._merged(slab)
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
    return np.lexsort([requests[name] for name in ("user", "time", "part")])
