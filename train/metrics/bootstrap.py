"""Bootstrap intervals of NE, AUC and GAUC: of one arm, and of the gap between two arms on the same rows.

Groups (users) are resampled: rows of one user are not independent, and resampling them one by one would give too
narrow an interval. Without groups, rows are resampled. Intervals are percentiles of the resampled metric; the two arms
of a gap share every resample, so rows that are hard for both cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from train.metrics.auc import segment_auc
from train.metrics.ne import binary_entropy, log_loss

Floats = NDArray[np.float64]

ELEMENTS_AT_ONCE = 2**22  # bounds the memory of one slice of resamples


@dataclass(frozen=True)
class Interval:
    """A metric of the rows as they are, and the range of the middle of its resamples."""

    estimate: float
    low: float
    high: float


def metric_intervals(
    labels: ArrayLike,
    logits: ArrayLike,
    *,
    base_rate: float,
    group: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Intervals of one task's `ne`, `auc` and, given groups, `gauc`.

    labels [N] in {0, 1, NaN = not observed}, logits [N], group [N] integers, weights [N] (default 1); `base_rate` as in
    `normalized_entropy`. Resamples for which a metric is undefined (of one class) are left out of the percentiles; a
    metric that is undefined on the rows themselves is NaN throughout. The cost is `resamples` passes over the rows.
    """
    rows = _Rows(labels, group, weights)
    arm = _Arm(rows, logits)
    return _intervals([arm.metrics(counts, base_rate) for counts in rows.draws(resamples, seed)], confidence)


def paired_gaps(
    labels: ArrayLike,
    logits_a: ArrayLike,
    logits_b: ArrayLike,
    *,
    base_rate: float,
    group: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Intervals of arm b minus arm a on the same rows: `ne`, `auc`, `gauc` (given groups) and `ne_percent`.

    `ne_percent` is 100 (NE_b - NE_a) / NE_a, which no base rate enters. A positive `ne` and a negative `auc` mean that
    b is worse. Arguments and degenerate cases as in `metric_intervals`.
    """
    rows = _Rows(labels, group, weights)
    a, b = _Arm(rows, logits_a), _Arm(rows, logits_b)
    drawn = []
    for counts in rows.draws(resamples, seed):
        of_a, of_b = a.metrics(counts, base_rate), b.metrics(counts, base_rate)
        loss_a, loss_b = counts @ a.group_loss, counts @ b.group_loss
        with np.errstate(invalid="ignore", divide="ignore"):
            percent = 100 * (loss_b - loss_a) / loss_a
        drawn.append({name: of_b[name] - of_a[name] for name in of_a} | {"ne_percent": percent})
    return _intervals(drawn, confidence)


class _Rows:
    """The observed rows of one task and how they are resampled."""

    def __init__(self, labels: ArrayLike, group: ArrayLike | None, weights: ArrayLike | None) -> None:
        y = np.asarray(labels, dtype=np.float64)
        self.observed = ~np.isnan(y)
        self.labels = y[self.observed]
        self.weights = np.ones_like(self.labels) if weights is None else self.select(weights)
        self.grouped = group is not None
        units = np.arange(self.labels.size) if group is None else np.asarray(group)[self.observed]
        distinct, self.unit = np.unique(units, return_inverse=True)
        self.num_units = distinct.size

    def select(self, values: ArrayLike) -> Floats:
        """The observed rows of a column [N]."""
        column = np.asarray(values, dtype=np.float64)
        if column.shape != self.observed.shape:
            raise ValueError(f"a column has shape {column.shape}, expected that of the labels, {self.observed.shape}")
        return column[self.observed]

    def sum_by_unit(self, values: Floats) -> Floats:
        return np.bincount(self.unit, values, self.num_units).astype(np.float64)

    def draws(self, resamples: int, seed: int) -> Iterator[Floats]:
        """How often each unit is drawn, [b, units]: first every unit once, then `resamples` draws with replacement."""
        yield np.ones((1, self.num_units))
        if self.num_units == 0:
            return
        generator = np.random.default_rng(seed)
        at_once = max(1, ELEMENTS_AT_ONCE // self.labels.size)
        for start in range(0, resamples, at_once):
            size = min(at_once, resamples - start)
            drawn = generator.integers(0, self.num_units, (size, self.num_units))
            drawn += self.num_units * np.arange(size)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=size * self.num_units)
            yield counts.reshape(size, self.num_units).astype(np.float64)


class _Arm:
    """What it takes to recompute the metrics of one arm's logits under resampled counts."""

    def __init__(self, rows: _Rows, logits: ArrayLike) -> None:
        scores, y, w = rows.select(logits), rows.labels, rows.weights
        score_tensor, label_tensor = torch.from_numpy(scores), torch.from_numpy(y)
        self.group_loss = rows.sum_by_unit(w * log_loss(score_tensor, label_tensor).numpy())
        self.group_weight = rows.sum_by_unit(w)
        self.group_auc: tuple[Floats, Floats] | None = None
        if rows.grouped:
            # A group's AUC does not change with how often it is drawn: resampled GAUC is a ratio of two sums.
            value, weight = segment_auc(score_tensor, label_tensor, torch.from_numpy(w), torch.from_numpy(rows.unit))
            weight = torch.where(value.isnan(), 0.0, weight)
            self.group_auc = ((value.nan_to_num() * weight).numpy(), weight.numpy())
        order = np.argsort(scores, kind="stable")
        self.unit = rows.unit[order]
        self.tie_starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan) != 0)
        usable = np.nan if np.isnan(scores).any() else 1.0
        self.positive, self.negative = usable * (w * y)[order], (w * (1 - y))[order]

    def metrics(self, counts: Floats, base_rate: float) -> dict[str, Floats]:
        """Each metric [b] under `counts` [b, units]."""
        entropy = binary_entropy(base_rate) or np.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {"ne": counts @ self.group_loss / (counts @ self.group_weight) / entropy, "auc": self._auc(counts)}
            if self.group_auc is not None:
                value, weight = self.group_auc
                values["gauc"] = (counts @ value) / (counts @ weight)
        return values

    def _auc(self, counts: Floats) -> Floats:
        drawn = counts[:, self.unit]
        positive = np.add.reduceat(drawn * self.positive, self.tie_starts, axis=1)
        negative = np.add.reduceat(drawn * self.negative, self.tie_starts, axis=1)
        below = np.cumsum(negative, axis=1) - 0.5 * negative
        return (positive * below).sum(1) / (positive.sum(1) * negative.sum(1))


def _intervals(drawn: list[dict[str, Floats]], confidence: float) -> dict[str, Interval]:
    """Intervals from the metrics of successive slices of draws, of which the very first is the rows as they are."""
    result = {}
    for name in drawn[0]:
        estimate, *resampled = np.concatenate([part[name] for part in drawn])
        usable = np.array(resampled)[~np.isnan(resampled)]
        low, high = (np.nan, np.nan)
        if usable.size and not np.isnan(estimate):
            low, high = np.quantile(usable, [(1 - confidence) / 2, (1 + confidence) / 2])
        result[name] = Interval(float(estimate), float(low), float(high))
    return result
