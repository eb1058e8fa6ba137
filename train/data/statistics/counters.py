"""Counters by key, moved on in time: what they hold strictly before any moment, and after all events.

Sums of events are whole numbers. With a half-life, time is divided into slots of an eighth of it; an event counts
2^(-slots/8), and what slots before the present one hold is carried on in their order. So every value is the same to the
bit wherever events are cut into parts, as long as a part holds all events of its keys between two moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.storage.rows import NEVER

SLOTS = 8
"""Of a half-life."""
FORGOTTEN = 60 * SLOTS
"""Slots after which an event counts nothing."""
POWERS = np.append(2.0 ** (-np.arange(FORGOTTEN) / SLOTS), 0.0)


@dataclass
class Counters:
    """K keys with w counters each, after their last event."""

    key: np.ndarray  # [K] uint64, rising
    last: np.ndarray  # [K] int64 second of the last event
    count: np.ndarray  # [K, w] int64: sums of events, with a half-life those of the last event's slot
    carry: np.ndarray  # [K, w] float64: what earlier slots hold in the last event's slot

    @staticmethod
    def none(width: int) -> Counters:
        counts = np.zeros((0, width), np.int64)
        return Counters(np.zeros(0, np.uint64), np.zeros(0, np.int64), counts, counts.astype(np.float64))

    def take(self, rows: slice | np.ndarray) -> Counters:
        return Counters(*(values[rows] for values in (self.key, self.last, self.count, self.carry)))

    def at(self, key: np.ndarray, second: np.ndarray, half_life: float) -> tuple[np.ndarray, np.ndarray]:
        """(values [Q, w] of keys at a second after all events, second of the last event or NEVER)."""
        if not len(self.key):
            return np.zeros((len(key), self.count.shape[1])), np.full(len(key), NEVER)
        place = np.searchsorted(self.key, key).clip(max=len(self.key) - 1)
        found = self.key[place] == key
        gap = _slot(second, half_life) - _slot(self.last[place], half_life)
        values = (self.carry[place] + self.count[place]) * POWERS[gap.clip(0, FORGOTTEN)][:, None]
        return np.where(found[:, None], values, 0.0), np.where(found, self.last[place], NEVER)


@dataclass
class Events:
    """E events of keys. weights [E, w]: what each adds to each of w counters."""

    code: np.ndarray  # [E] of the key among all
    second: np.ndarray
    weights: np.ndarray
    half_life: float = 0.0


def advance(
    keys: np.ndarray, counters: list[Counters], events: list[Events], code: np.ndarray, asked: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, Counters]]:
    """For each of the counters with its events: (values [Q, w] and seconds of the last event [Q] or NEVER, both of
    events strictly before what is asked; the counters after all events).

    keys, rising, are all there are. code, asked [Q]: keys and seconds. What is sorted by key and second already, or
    nearly so, is fast.
    """
    seconds = [asked, *(each.second for each in events), *(each.last for each in counters)]
    least = min((int(each.min()) for each in seconds if len(each)), default=0)
    span = max((int(each.max()) for each in seconds if len(each)), default=0) - least + 1
    if len(keys) * span >= 2**63:
        raise ValueError(f"times span {span} seconds, more than any data set does: is data.time_format right?")
    wanted = code * np.int64(span) + (asked - least)
    return [
        _advance(keys, before, new, code, asked, wanted, least, span)
        for before, new in zip(counters, events, strict=True)
    ]


def _advance(
    keys: np.ndarray,
    before: Counters,
    new: Events,
    asked_code: np.ndarray,
    asked: np.ndarray,
    wanted: np.ndarray,
    least: int,
    span: int,
) -> tuple[np.ndarray, np.ndarray, Counters]:
    code = np.concatenate([np.searchsorted(keys, before.key), new.code])
    second = np.concatenate([before.last, new.second])
    weights = np.concatenate([before.count, new.weights])
    keyed = code * np.int64(span) + (second - least)
    sorting = np.argsort(keyed, kind="stable")  # which takes what is in order as it is
    keyed, code, second, weights = keyed[sorting], code[sorting], second[sorting], weights[sorting]
    ends = np.searchsorted(keyed, wanted)
    first = np.append(0, np.cumsum(np.bincount(code, minlength=len(keys))))
    some = ends > first[asked_code]
    runs = _Runs(code, _slot(second, new.half_life), weights, before.carry, sorting)
    values = np.zeros((len(ends), weights.shape[1]))
    values[some] = runs.before(ends[some], _slot(asked[some], new.half_life))
    last = np.append(second, NEVER)[np.where(some, ends - 1, -1)]
    return values, last, runs.counters(keys, second)


class _Runs:
    """Sorted events, those of one key and slot together."""

    def __init__(
        self, code: np.ndarray, slot: np.ndarray, weights: np.ndarray, carried: np.ndarray, sorting: np.ndarray
    ) -> None:
        """`carried` belongs to the first events before `sorting`, which are earlier counters."""
        self.totals = np.append(np.zeros((1, weights.shape[1]), np.int64), np.cumsum(weights, 0), 0)
        new_key = np.append(True, code[1:] != code[:-1])[: len(code)]
        begins = new_key | np.append(True, slot[1:] != slot[:-1])[: len(code)]
        self.starts = np.flatnonzero(begins)
        self.of = np.cumsum(begins) - 1
        self.code, self.slot = code[self.starts], slot[self.starts]
        ends = np.append(self.starts[1:], len(code)).astype(np.int64)
        self.sums = self.totals[ends] - self.totals[self.starts]
        self.carry = np.zeros(self.sums.shape)
        earlier = np.flatnonzero(sorting < len(carried))
        self.carry[self.of[earlier]] = carried[sorting[earlier]]
        self._carry_on(np.flatnonzero(new_key[self.starts]))

    def _carry_on(self, first: np.ndarray) -> None:
        """The runs of all keys, which begin at `first`, step by step."""
        lengths = np.diff(np.append(first, len(self.starts)))
        order = np.argsort(-lengths, kind="stable")
        first, lengths = first[order], -lengths[order]
        for step in range(1, -int(lengths.min(initial=0))):
            run = first[: np.searchsorted(lengths, -step)] + step
            gap = (self.slot[run] - self.slot[run - 1]).clip(max=FORGOTTEN)
            self.carry[run] += (self.carry[run - 1] + self.sums[run - 1]) * POWERS[gap][:, None]

    def before(self, ends: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Values in a slot after the first events of a key, of which `ends` (above 0) is the one after the last."""
        run = self.of[ends - 1]
        counted = self.totals[ends] - self.totals[self.starts[run]]
        return (self.carry[run] + counted) * POWERS[(slot - self.slot[run]).clip(0, FORGOTTEN)][:, None]

    def counters(self, keys: np.ndarray, second: np.ndarray) -> Counters:
        final = np.flatnonzero(np.append(self.code[1:] != self.code[:-1], True)[: len(self.code)])
        last = np.append(self.starts[1:], len(second))[final] - 1
        return Counters(keys[self.code[final]], second[last], self.sums[final], self.carry[final])


def _slot(second: np.ndarray, half_life: float) -> np.ndarray:
    """[N] int64, 0 without a half-life."""
    if not half_life:
        return np.zeros(len(second), np.int64)
    return np.floor(second * (SLOTS / half_life)).astype(np.int64)
