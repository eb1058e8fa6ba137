"""One statistic over records of rows: who is counted, who asks, and the counters in between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from train.config.schema import EventsConfig, StatisticConfig
from train.data.events.read import Columns, log_files, log_times
from train.data.statistics import describe
from train.data.statistics.counters import Counters, Events, advance
from train.data.statistics.values import Prior, combined, features, hashed
from train.data.storage.rows import NEVER, Rows

PAIR = np.dtype([("key", "<u8"), ("value", "<u8")])
ALWAYS = (NEVER, np.iinfo(np.int64).max)


class Base:
    """Rows as records of what statistics read: times, labels and hashes of ids."""

    def __init__(self, config: EventsConfig) -> None:
        self.config = config
        self.columns, self.tasks = describe.columns(config), list(config.labels)
        self.record = np.dtype(
            [
                ("second", "<i8"),
                ("asked", "<i8"),  # the second of the row's request, NEVER of rows in none
                ("place", "<i4"),  # of the row among the candidates of requests
                ("observed", "?", (len(self.tasks),)),
                ("positive", "?", (len(self.tasks),)),
                ("known", "<i8", (len(self.tasks),)),  # seconds from which positive labels are known
                ("hashes", "<u8", (len(self.columns),)),
            ]
        )
        self._seen: dict[int, tuple[pa.StringArray, np.ndarray]] = {}

    def records(self, columns: Columns, order: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Of the good rows [N], or those of requests: rows `order` [C] at offsets [R + 1]."""
        records = np.zeros(len(columns.number), self.record)
        records["second"], records["asked"], records["place"] = columns.time // 1000, NEVER, -1
        first = np.repeat(order[offsets[:-1]], np.diff(offsets))
        records["asked"][order], records["place"][order] = records["second"][first], np.arange(len(order))
        records["observed"], records["positive"], records["known"] = labels(self.config, columns)
        for index, name in enumerate(self.columns):
            records["hashes"][:, index] = hashed(columns.ids[name], self._seen)
        return records if columns.good.all() else np.take(records, np.flatnonzero(columns.good))


def labels(config: EventsConfig, columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(observed, positive, second from which a positive label is known), each [N, tasks].

    Of a task whose labels come late every row counts as observed, from its own time on: were only those with a label to
    count, who has none would tell of the future.
    """
    observed, positive = ~np.isnan(columns.labels), columns.labels == 1
    known = np.repeat(columns.time[:, None] // 1000, positive.shape[1], 1)
    for task, name in enumerate(config.labels):
        if name in config.known_at:
            known[:, task] = np.maximum(known[:, task], columns.known[config.known_at[name]] // 1000)
        elif name in config.matures_after:
            known[:, task] += math.ceil(config.matures_after[name])
        observed[:, task] |= name in config.known_at or name in config.matures_after
    return observed, positive, known


@dataclass
class State:
    """Counters of a statistic: of its rows, of the positive labels of each task, and of the different ids of columns,
    with the pairs of key and id that were counted."""

    counters: list[Counters]
    pairs: list[np.ndarray]

    def of_keys(self, least: int, above: int) -> State:
        """Those from `least` to below `above`."""

        def part(keys: np.ndarray) -> slice:
            begin = np.searchsorted(keys, np.uint64(least))
            return slice(begin, len(keys) if above >= 2**64 else np.searchsorted(keys, np.uint64(above)))

        return State(
            [each.take(part(each.key)) for each in self.counters], [each[part(each["key"])] for each in self.pairs]
        )


class Group:
    """A statistic."""

    def __init__(self, base: Base, name: str, each: StatisticConfig) -> None:
        self.base, self.name, self.each, self.config = base, name, each, base.config
        self._tasks = [base.tasks.index(task) for task in each.of or ()]
        width = len(self._tasks)
        self.record = np.dtype(
            [
                ("key", "<u8"),
                ("second", "<i8"),  # NEVER of a row that is not counted
                ("asked", "<i8"),
                ("shard", "<i2"),
                ("place", "<i4"),
                ("observed", "?", (width,)),
                ("positive", "?", (width,)),
                ("known", "<i8", (width,)),
                ("values", "<u8", (len(each.distinct),)),
            ]
        )
        self.features = len(describe.features(name, each))

    def none(self) -> State:
        widths = [1 + len(self._tasks), *(1 for _ in (*self._tasks, *self.each.distinct))]
        return State([Counters.none(width) for width in widths], [np.zeros(0, PAIR) for _ in self.each.distinct])

    def records(self, base: np.ndarray, shard: int = 0) -> np.ndarray:
        """Of the base's rows, without those that lack an id."""
        own = [self.base.columns.index(name) for name in self.each.by]
        key, known = combined([base["hashes"][:, index] for index in own])
        records = np.zeros(len(base), self.record)
        records["key"], records["shard"] = key, shard
        for name in ("asked", "place"):
            records[name] = base[name]
        if self.each.log:
            records["second"] = NEVER
            known &= base["asked"] != NEVER
        else:
            records["second"] = base["second"]
            for name in ("observed", "positive", "known"):
                records[name] = base[name][:, self._tasks]
            for index, name in enumerate(self.each.distinct):
                records["values"][:, index] = base["hashes"][:, self.base.columns.index(name)]
        return records if known.all() else np.take(records, np.flatnonzero(known))

    def of_log(self) -> Iterator[np.ndarray]:
        """Entries of the log that is counted."""
        if not self.each.log:
            return
        history = self.config.histories[self.each.log]
        named = (*self.each.by, *self.each.distinct)
        names = [history.user if history.user and name == self.config.user else name for name in named]
        for rows in log_files(self.config, history, {*names}).chunks(self.config.rows_at_once):
            yield self._entries(rows, names, log_times(self.config, history, rows), history.where)

    def _entries(self, rows: Rows, names: Sequence[str], time: np.ndarray, where: Mapping[str, object]) -> np.ndarray:
        good = ~rows.bad
        for name, accepted in where.items():
            good &= rows.ids(name).isin(accepted if isinstance(accepted, list) else [accepted])
        hashes = [hashed(rows.ids(name), {}) for name in names]
        key, known = combined(hashes[: len(self.each.by)])
        records = np.zeros(len(rows), self.record)
        records["key"], records["second"], records["asked"], records["place"] = key, time // 1000, NEVER, -1
        for index, values in enumerate(hashes[len(self.each.by) :]):
            records["values"][:, index] = values
        return records[known & good]

    def sweep(
        self, records: np.ndarray, state: State, prior: Prior, between: tuple[int, int] = ALWAYS
    ) -> tuple[np.ndarray, np.ndarray, State]:
        """(records that ask, their features [Q, features], the counters after all events) of what happens from the
        first second of `between` to before the other one, and of what is asked after the former up to the latter."""
        begin, end = between

        def now(seconds: np.ndarray) -> np.ndarray:
            return (seconds != NEVER) & (seconds >= begin) & (seconds < end)

        keys, code = np.unique(
            np.concatenate([records["key"], *(each.key for each in state.counters)]), return_inverse=True
        )
        code = code[: len(records)]
        second = np.maximum(records["second"], records["asked"])
        least, most = int(second.min(initial=0)), int(second.max(initial=0))
        order = np.argsort(code * np.int64(most - least + 1) + (second - least))  # for speed, of `advance`
        records, code = np.take(records, order), code[order]  # records[order] takes ten times as long
        asking = (records["asked"] > begin) & (records["asked"] <= end)
        rows = now(records["second"])
        counted = records if rows.all() else np.take(records, np.flatnonzero(rows))
        ones = np.ones((len(counted), 1), np.int64)
        half_life = self.each.half_life
        events = [Events(code[rows], counted["second"], np.concatenate([ones, counted["observed"]], 1), half_life)]
        for task in range(len(self._tasks)):
            chosen = records["positive"][:, task] & now(records["known"][:, task])
            ones = np.ones((int(chosen.sum()), 1), np.int64)
            events.append(Events(code[chosen], records["known"][chosen, task], ones, half_life))
        pairs = []
        for index, seen in enumerate(state.pairs):
            new, known = _new_pairs(counted, index, seen)
            events.append(Events(code[rows][new], counted["second"][new], np.ones((len(new), 1), np.int64)))
            pairs.append(known)
        asks = np.take(records, np.flatnonzero(asking))
        results = advance(keys, state.counters, events, code[asking], asks["asked"])
        after = State([counters for *_, counters in results], pairs)
        return asks, self.values(asks["asked"], [(values, last) for values, last, _ in results], prior), after

    def values(self, second: np.ndarray, found: Sequence[tuple[np.ndarray, np.ndarray]], prior: Prior) -> np.ndarray:
        """[Q, features] of what the counters of a state hold, each (values, second of the last event)."""
        rates = prior.rates(second)[:, self._tasks]
        tasks = 1 + len(self._tasks)
        return features(self.each, second, found[0], found[1:tasks], [values for values, _ in found[tasks:]], rates)

    def at(self, state: State, key: np.ndarray, second: np.ndarray, prior: Prior) -> np.ndarray:
        """[Q, features] of keys at a second after all events."""
        tasks = 1 + len(self._tasks)
        lives = [self.each.half_life] * tasks + [0.0] * len(self.each.distinct)
        found = [counters.at(key, second, life) for counters, life in zip(state.counters, lives, strict=True)]
        return self.values(second, found, prior)


def _new_pairs(counted: np.ndarray, index: int, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first record, by number, of each pair of key and id that was not `seen`, all pairs that are seen then)."""
    known = np.flatnonzero(counted["values"][:, index])
    keys, values, seconds = counted["key"][known], counted["values"][known, index], counted["second"][known]
    order = np.lexsort((seconds, values, keys))
    keys, values, order = keys[order], values[order], known[order]
    first = np.append(True, (keys[1:] != keys[:-1]) | (values[1:] != values[:-1]))[: len(keys)]
    order, pairs = order[first], np.zeros(int(first.sum()), PAIR)
    pairs["key"], pairs["value"] = keys[first], values[first]
    hashes, before = (combined([each["key"], each["value"]])[0] for each in (pairs, seen))
    new = ~np.isin(hashes, before)
    seen = np.concatenate([seen, pairs[new]])
    return order[new], seen[np.lexsort((seen["value"], seen["key"]))]
