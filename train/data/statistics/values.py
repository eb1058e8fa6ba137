"""From counters to the numbers of features, the same for prepared rows and for a request that is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from train.config.schema import StatisticConfig
from train.data.features.columns import Coded
from train.data.features.vocabulary import GOLDEN, hash_texts, splitmix64
from train.data.storage.rows import NEVER

HOUR = 3600
LEAST = 1e-6
"""A rate is between it and 1 - it."""


@dataclass
class Prior:
    """How many labels of each task were known, and were 1, by the hour: rates of all rows before an hour."""

    tasks: Sequence[str]
    hours: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 2), np.int64))  # [hours, tasks, (known, 1)]

    def add(self, second: np.ndarray, known: np.ndarray, observed: np.ndarray, positive: np.ndarray) -> None:
        """second [N], known [N, tasks]: when a row and its positive labels are known; observed, positive [N, tasks]."""
        sides = [(np.broadcast_to(second[:, None], known.shape), observed), (known, positive)]
        found, sums = [self.hours], [self.counts.reshape(len(self.hours), len(self.tasks), 2)]
        for side, (seconds, chosen) in enumerate(sides):
            for task in range(len(self.tasks)):
                hours, counts = np.unique(seconds[chosen[:, task], task] // HOUR, return_counts=True)
                added = np.zeros((len(hours), len(self.tasks), 2), np.int64)
                added[:, task, side] = counts
                found.append(hours)
                sums.append(added)
        self.hours, place = np.unique(np.concatenate(found), return_inverse=True)
        self.counts = np.zeros((len(self.hours), len(self.tasks), 2), np.int64)
        np.add.at(self.counts, place, np.concatenate(sums))

    def newest(self) -> int:
        """The second in which the newest hour with a labelled row begins, NEVER without rows."""
        hours = self.hours[self.counts[:, :, 0].any(1)]
        return int(hours.max()) * HOUR if len(hours) else NEVER

    def rates(self, second: np.ndarray) -> np.ndarray:
        """[Q, tasks] of the rows of all hours before those of these seconds; NaN where there were none."""
        totals = np.append(np.zeros((1, len(self.tasks), 2)), np.cumsum(self.counts, 0), 0)
        known, positive = np.moveaxis(totals[np.searchsorted(self.hours, second // HOUR)], -1, 0)
        return np.divide(positive, known, out=np.full(known.shape, np.nan), where=known > 0)


def hashed(column: Coded, seen: dict[int, tuple[pa.StringArray, np.ndarray]]) -> np.ndarray:
    """[N] uint64 of a column's ids, 0 where one is missing; `seen` keeps what was made of a column's values."""
    if id(column.values) not in seen:
        seen[id(column.values)] = column.values, np.append(hash_texts(column.values) | np.uint64(1), np.uint64(0))
    return seen[id(column.values)][1][column.codes]


def combined(hashes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(keys [N] uint64 of ids in several columns, whether none of these is missing)."""
    key, known = np.zeros(len(hashes[0]), np.uint64), np.ones(len(hashes[0]), bool)
    for each in hashes:
        key = splitmix64((key ^ each) + GOLDEN)
        known &= each != 0
    return key, known


def features(
    each: StatisticConfig,
    second: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray],
    positives: Sequence[tuple[np.ndarray, np.ndarray]],
    distinct: Sequence[np.ndarray],
    prior: np.ndarray,
) -> np.ndarray:
    """[Q, features] float32 in the order of `describe.features`, before they are scaled; NaN where nothing is known.

    rows: (count and observed labels of each task [Q, 1 + tasks], second of the last); positives: (count [Q, 1], second
    of the last) of each task; distinct: [Q, 1] each; prior [Q, tasks]: `Prior.rates`.
    """
    counts, last = rows
    columns = [counts[:, 0]] if "count" in each.kinds else []
    if "rate" in each.kinds:
        for task, (positive, _) in enumerate(positives):
            ones, known, usual = positive[:, 0], counts[:, 1 + task], prior[:, task]
            added = np.where(np.isnan(usual), 0.0, each.smoothing)
            total, ones = known + added, ones + added * np.nan_to_num(usual)
            rate = np.divide(ones, total, out=np.full(len(total), np.nan), where=total > 0).clip(LEAST, 1 - LEAST)
            columns.append(np.log(rate / (1 - rate)))
    if "recency" in each.kinds:
        lasts = (last, *(seconds for _, seconds in positives))
        columns += [np.where(seconds == NEVER, np.nan, np.maximum(second - seconds, 0)) for seconds in lasts]
    columns += [values[:, 0] for values in distinct]
    return np.stack(columns, 1).astype(np.float32) if columns else np.zeros((len(second), 0), np.float32)
