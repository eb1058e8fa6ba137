"""From labelled rows to requests: grouping, the split by time, and which earlier events a request may see."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from train.data.batch import ranges

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Requests:
    """R requests holding C candidates, sorted by time within a split."""

    order: np.ndarray  # [C] int64: row of each candidate; a request's candidates are contiguous, oldest first
    offsets: np.ndarray  # [R + 1] int64: candidates of request r are order[offsets[r]:offsets[r + 1]]
    bounds: dict[str, tuple[int, int]]  # split -> its first request and the one after its last
    earlier: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # training rows in histories only

    @property
    def first(self) -> np.ndarray:
        """[R] int64: the row of each request's first candidate, whose time is the request's."""
        return self.order[self.offsets[:-1]]

    def rows(self, split: str) -> np.ndarray:
        """Rows of a split's candidates."""
        begin, end = self.bounds[split]
        return self.order[self.offsets[begin] : self.offsets[end]]


def group_requests(
    rows: np.ndarray,
    user: np.ndarray,
    time: np.ndarray,
    *,
    request: np.ndarray | None,
    part: np.ndarray,
    window: int,
    max_candidates: int,
    split: Sequence[float],
    split_by: str = "time",
    train_requests: str = "all",
) -> Requests:
    """Groups rows into requests and splits those by time, or by their place in their user's history.

    rows [M]: those to use; user, time, request, part [N]: codes, milliseconds, codes or None, and the index in `SPLITS`
    of rows whose file decides their split (-1: time decides). Rows of one user and one request id are one request;
    without request ids, those that start within `window` seconds of its first row. More than `max_candidates` rows
    are several requests. Splits without files of their own share the rest, oldest first, in the ratio of `split`;
    a request is never divided between splits.

    With `split_by` "last" a user's last request is of the test split, the one before it of validation, unless the
    split's share is 0; all others train, or the last of them with `train_requests` "last", whose history holds the
    rest.
    """
    keys = [time, *([] if request is None else [request]), user, part]
    order = rows[np.lexsort([key[rows] for key in keys])]
    same = np.ones(max(len(order) - 1, 0), bool)
    for key in keys[1:]:
        same &= key[order[1:]] == key[order[:-1]]
    run = np.append(0, np.cumsum(~same))[: len(order)]
    run_ends = np.append(np.flatnonzero(~same) + 1, len(order))
    sizes = np.diff(run_ends, prepend=0)
    if request is not None and sizes.max(initial=0) > max_candidates:
        logger.warning(
            "%d of %d requests have more than data.max_candidates=%d rows, up to %d, and count as several requests",
            (sizes > max_candidates).sum(),
            len(sizes),
            max_candidates,
            sizes.max(),
        )
    limit = np.minimum(run_ends[run], np.arange(len(order)) + max_candidates)
    if request is None:
        second = time[order] // 1000
        in_window = earlier_events(run, second, run, second + window + 1)[1]
        limit = np.minimum(limit, in_window)
    starts = _follow(np.append(0, run_ends[:-1]), limit, run_ends)
    lengths = np.diff(np.append(starts, len(order)))
    first = order[starts]
    parts, earlier = part[first], np.zeros(len(first), bool)
    if split_by == "last":
        parts, earlier = _held_out(user[first], time[first], split)
        earlier &= train_requests == "last"
    used = np.flatnonzero(~earlier)
    by_time = used[np.lexsort((starts[used], time[first[used]], parts[used]))]
    in_histories = order[ranges(starts[earlier], lengths[earlier])]
    order = order[ranges(starts[by_time], lengths[by_time])]
    offsets = np.append(0, np.cumsum(lengths[by_time]))
    parts = parts[by_time]
    bounds = _bounds(parts) if split_by == "last" else _split(parts, offsets, split)
    return Requests(order, offsets, bounds, in_histories)


def _held_out(user: np.ndarray, time: np.ndarray, split: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(index in `SPLITS`, whether a later training request of the user exists) of requests of these users and times."""
    order = np.lexsort((np.arange(len(user)), time, user))
    ends = np.searchsorted(user[order], user[order], side="right")
    from_end = np.empty(len(user), np.int64)
    from_end[order] = ends - 1 - np.arange(len(user))
    held = [SPLITS.index(name) for name in ("test", "valid") if split[SPLITS.index(name)] > 0]
    parts = np.zeros(len(user), np.int64)
    for place, index in enumerate(held):
        parts[from_end == place] = index
    return parts, from_end > len(held)


def _bounds(parts: np.ndarray) -> dict[str, tuple[int, int]]:
    """Where each split lies in sorted indices of splits."""
    begins = np.searchsorted(parts, np.arange(len(SPLITS)), side="left").tolist()
    ends = np.searchsorted(parts, np.arange(len(SPLITS)), side="right").tolist()
    return dict(zip(SPLITS, zip(begins, ends, strict=True), strict=True))


def earlier_events(
    owner: np.ndarray, second: np.ndarray, asked_owner: np.ndarray, asked_second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends): events starts[i]:ends[i] are all those of `asked_owner[i]` strictly before `asked_second[i]`.

    Events are sorted by (owner, second); owners are codes >= 0.
    """
    if len(owner) == 0 or len(asked_owner) == 0:
        zeros = np.zeros(len(asked_owner), np.int64)
        return zeros, zeros
    owners = int(max(owner.max(), asked_owner.max())) + 1
    base = int(min(second.min(), asked_second.min()))
    span = int(max(second.max(), asked_second.max())) - base + 1
    if owners * span >= 2**63:
        raise ValueError(f"times span {span} seconds, more than any data set does: is data.time_format right?")
    first = np.append(0, np.cumsum(np.bincount(owner, minlength=owners)))
    key = owner * np.int64(span) + (second - base)
    asked = asked_owner * np.int64(span) + (asked_second - base)
    # Sorted queries find their results in neighbouring cache lines.
    order = np.argsort(asked)
    ends = np.empty(len(asked), np.int64)
    ends[order] = np.searchsorted(key, asked[order])
    return first[asked_owner], ends


def _follow(begins: np.ndarray, next_start: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Every run's chain begin, next_start[begin], ... before the run's end, sorted. Steps all runs at once."""
    found = []
    while begins.size:
        found.append(begins)
        begins = next_start[begins]
        going = begins < ends
        begins, ends = begins[going], ends[going]
    return np.sort(np.concatenate(found))


def _split(part: np.ndarray, offsets: np.ndarray, fractions: Sequence[float]) -> dict[str, tuple[int, int]]:
    """`part` [R] is sorted: -1 first, in time order, then the splits that have files of their own."""
    free = int(np.searchsorted(part, 0))
    bounds = {}
    for index, name in enumerate(SPLITS):
        bounds[name] = (int(np.searchsorted(part, index)), int(np.searchsorted(part, index, side="right")))
    shared = [index for index, name in enumerate(SPLITS) if bounds[name][0] == bounds[name][1]]
    total, begin = sum(fractions[index] for index in shared), 0
    for index in shared:
        share = sum(fractions[i] for i in shared if i <= index) / total
        end = int(np.searchsorted(offsets[: free + 1], round(share * offsets[free])))
        bounds[SPLITS[index]] = (begin, end)
        begin = end
    return bounds
