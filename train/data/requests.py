"""From labelled rows to requests: grouping, the split by time, and which earlier events a request may see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from train.data.batch import ranges

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
IN_WINDOW = 8
"""Rows that a request of a window has at most, where the configuration does not say."""


@dataclass(frozen=True)
class Requests:
    """R requests holding C candidates, sorted by time within a split."""

    # [C] int64: row of each candidate; a request's are contiguous, oldest first, and so are a vendor's if there are any
    order: np.ndarray
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
    split_of: np.ndarray,
    window: int,
    max_candidates: int | None,
    split: Sequence[float],
    held_out: Sequence[int] | None = None,
    train_requests: str = "all",
) -> Requests:
    """Requests of rows, split by time, or with `held_out` by their place in their user's history.

    rows [M]: those to use; user, time, request, split_of [N]: codes, milliseconds, codes or None, and the index in
    `SPLITS` of rows whose file decides their split (-1: time decides). Rows of one user and one request id are one
    request; without request ids, those that start within `window` seconds of its first row. More than `max_candidates`
    rows are several requests (None: no limit). Splits without files of their own share the rest, oldest first, in the
    ratio of `split`; a request is never divided between splits.

    `held_out`: indices in `SPLITS` of what a user's last request is of, the one before it, and so on; all others train,
    or the last of them with `train_requests` "last", whose history holds the rest. Of a file that decides the split a
    user's last request is of it, and the others are in histories only.
    """
    formed = form_requests(
        rows,
        user,
        time,
        request=request,
        split_of=split_of,
        window=window,
        max_candidates=max_candidates,
        held_out=held_out,
        train_requests=train_requests,
    )
    warn_of_long([np.bincount(formed.sizes)], max_candidates)
    splits, offsets = formed.splits, formed.offsets
    counts = np.bincount(splits + 1, minlength=len(SPLITS) + 1).tolist()
    free = int(offsets[counts[0]])
    fractions = split if held_out is None else None
    bounds = split_bounds(counts, free, lambda candidates: int(np.searchsorted(offsets, candidates)), fractions)
    return Requests(formed.order, offsets, bounds, formed.earlier)


@dataclass(frozen=True)
class Formed:
    """Requests sorted by their split's index (-1: time decides it), then time, then user."""

    order: np.ndarray  # [C], as in `Requests`
    offsets: np.ndarray  # [R + 1]
    splits: np.ndarray  # [R]
    earlier: np.ndarray
    sizes: np.ndarray  # rows of each request id, of which more than max_candidates became several requests


def form_requests(
    rows: np.ndarray,
    user: np.ndarray,
    time: np.ndarray,
    *,
    request: np.ndarray | None,
    split_of: np.ndarray,
    window: int,
    max_candidates: int | None,
    held_out: Sequence[int] | None,
    train_requests: str,
) -> Formed:
    """`group_requests` before the split; it needs all rows of its users, but not all users."""
    keys = [time, *([] if request is None else [request]), user, split_of]
    order = rows[np.lexsort([key[rows] for key in keys])]
    same = np.ones(max(len(order) - 1, 0), bool)
    for key in keys[1:]:
        same &= key[order[1:]] == key[order[:-1]]
    run = np.append(0, np.cumsum(~same))[: len(order)]
    run_ends = np.append(np.flatnonzero(~same) + 1, len(order))[: len(order)]
    sizes = np.diff(run_ends, prepend=0)
    limit = run_ends[run]
    if max_candidates is not None:
        limit = np.minimum(limit, np.arange(len(order)) + max_candidates)
    if request is None:
        second = time[order] // 1000
        in_window = earlier_events(run, second, run, second + window + 1)[1]
        limit = np.minimum(limit, in_window)
    starts = _follow(run_ends - sizes, limit, run_ends)
    lengths = np.diff(np.append(starts, len(order)))
    first = order[starts]
    splits, unused = split_of[first], np.zeros(len(first), bool)
    if held_out is not None:
        splits, unused = _hold_out(user[first], time[first], splits, held_out)
        unused &= (splits > 0) | (train_requests == "last")
    used, earlier = np.flatnonzero(~unused), unused & (splits == 0)
    by_time = used[np.lexsort((starts[used], time[first[used]], splits[used]))]
    in_histories = order[ranges(starts[earlier], lengths[earlier])]
    order = order[ranges(starts[by_time], lengths[by_time])]
    offsets = np.append(0, np.cumsum(lengths[by_time]))
    return Formed(order, offsets, splits[by_time], in_histories, np.zeros(0, np.int64) if request is None else sizes)


def sorted_by_vendor(order: np.ndarray, offsets: np.ndarray, vendor: np.ndarray) -> np.ndarray:
    """Rows `order` [C] of requests at offsets [R + 1], those of a request and vendor next to each other.

    vendor [N]: codes. Vendors stand in the order of their first candidates, so that a request's first row stays first.
    """
    request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    key = request * (np.int64(vendor.max(initial=0)) + 1) + vendor[order]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return order[np.argsort(first[group], kind="stable")]


def vendor_runs(vendor: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(vendors of each request [R], candidates of each vendor [V]): runs of equal `vendor` [C] codes in a request.

    counts [R]: candidates of each request.
    """
    request = np.repeat(np.arange(len(counts)), counts)
    begins = np.ones(len(vendor), bool)
    begins[1:] = (vendor[1:] != vendor[:-1]) | (request[1:] != request[:-1])
    candidates = np.diff(np.append(np.flatnonzero(begins), len(vendor)))
    return np.bincount(request[begins], minlength=len(counts)), candidates


def rounded(most: int) -> int:
    """A power of two that is at least `most`: the model's constant where no bound is given. Neighbouring days, and
    thus what is compiled for them, then mostly have the same."""
    return 1 << max(most - 1, 0).bit_length()


def warn_of_long(sizes: Iterable[np.ndarray], max_candidates: int | None) -> None:
    """sizes: for each n how many request ids have n rows, in any number of parts."""
    parts = list(sizes)
    most = max((len(part) for part in parts), default=0) - 1
    if max_candidates is not None and most > max_candidates:
        logger.warning(
            "%d of %d requests have more than data.max_candidates=%d rows, up to %d, and count as several requests",
            sum(part[max_candidates + 1 :].sum() for part in parts),
            sum(part.sum() for part in parts),
            max_candidates,
            most,
        )


def _hold_out(
    user: np.ndarray, time: np.ndarray, split_of: np.ndarray, held: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(index in `SPLITS`, whether a later request of the user is of the same split) of requests.

    split_of: the split that a request's file decides; `held` are those of the last requests of files that decide none.
    """
    order = np.lexsort((np.arange(len(user)), time, user, split_of))
    group = user[order] * np.int64(len(SPLITS) + 1) + split_of[order]
    ends = np.append(np.flatnonzero(np.diff(group)) + 1, len(group))
    from_end = np.empty(len(user), np.int64)
    from_end[order] = np.repeat(ends, np.diff(ends, prepend=0)) - 1 - np.arange(len(user))
    splits = np.maximum(split_of, 0)
    trains = splits == 0
    for place, index in enumerate(held):
        splits[trains & (from_end == place)] = index
    return splits, from_end > np.where(trains, len(held), 0)


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
    return np.sort(np.concatenate(found)) if found else begins


def split_bounds(
    counts: Sequence[int], free: int, place: Callable[[int], int], fractions: Sequence[float] | None
) -> dict[str, tuple[int, int]]:
    """First request of each split and the one after its last.

    counts: requests whose split time decides, then those of each split's own files, which follow them in this order.
    The former have `free` candidates; `place` gives the first request before which at least so many came. Without
    `fractions` time decides of none.
    """
    ends = np.cumsum(counts).tolist()
    bounds = {name: (ends[index], ends[index + 1]) for index, name in enumerate(SPLITS)}
    if fractions is None:
        return bounds
    shared = [index for index, name in enumerate(SPLITS) if bounds[name][0] == bounds[name][1]]
    total, begin = sum(fractions[index] for index in shared), 0
    for index in shared:
        share = sum(fractions[i] for i in shared if i <= index) / total
        end = min(place(round(share * free)), counts[0])
        bounds[SPLITS[index]] = (begin, end)
        begin = end
    return bounds
