"""The last stage of preparation, common to all sources: rows, requests and histories to the columns of a cache folder.

The columns of the file set are held in memory while they are prepared: ids as 4 bytes each, numbers as 8, lists as 4 an
item. Training then reads memory-mapped files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modules.batch import FeatureSpec, SparseFeature
from train.config.schema import DataConfig
from train.data import mapping, store
from train.data.columns import Coded, CodedLists
from train.data.files import Table
from train.data.histories import History
from train.data.numeric import scaled
from train.data.requests import Requests
from train.data.vocabulary import Hashing, Occurrences, Vocabulary


@dataclass
class Dense:
    """Standardised numeric features and, for each, the mean and standard deviation that were used."""

    request: np.ndarray  # [R, m_u] float32
    candidate: np.ndarray  # [C, m_c] float32
    statistics: dict[str, dict[str, float]]
    missing: dict[str, float] = field(default_factory=dict)  # share of the training rows without a number, by column


def standardise(
    values: np.ndarray, training: np.ndarray, earlier: dict[str, float] | None = None
) -> tuple[np.ndarray, dict[str, float]]:
    """(values - mean) / standard deviation over `training`; a missing value (NaN) becomes 0, which is the mean.

    `earlier`: mean and std of another run, which are used in their place.
    """
    sample = values[training]
    sample = sample[~np.isnan(sample)]
    mean = float(sample.mean()) if sample.size else 0.0
    # The deviation of a constant column is a rounding error of the mean, and another number would become 1e16.
    std = float(sample.std()) if sample.size and sample.min() < sample.max() else 0.0
    used = earlier or {"mean": mean, "std": std}
    return scaled(values, used), used


def write(
    folder: Path,
    config: DataConfig,
    spec: FeatureSpec,
    table: Table,
    requests: Requests,
    *,
    user: np.ndarray,
    time: np.ndarray,
    columns: Mapping[str, Coded | CodedLists],
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    dense: Dense,
    histories: Mapping[str, History],
    earlier: mapping.Mapping | None = None,
    new_ids: bool = True,
    real_labels: Sequence[str] = (),
) -> None:
    """Write the prepared form.

    user (codes), time (milliseconds), weights [N] (None: 1) and labels [N, tasks] belong to rows; `columns` has every
    sparse feature and every field of events that are rows, by name. The sizes in `spec.tables` are set here, from
    training ids. Ids of an `earlier` run keep their rows; without `new_ids` no others get one.
    """
    training = np.zeros(len(table.number), bool)
    training[requests.rows("train")] = True
    training[requests.earlier] = True
    if not training.any():
        raise ValueError(f"the training split is empty: data.split={list(config.split)} of {len(requests.order)} rows")
    if config.id_map == "hash":
        ids: Hashing | Vocabulary = Hashing(config.hash_rows)
    else:
        occurrences = _training_ids(spec, columns, histories, training, requests.bounds["train"])
        ids = Vocabulary(
            occurrences, _min_counts(config, spec, new_ids), earlier.ids if earlier else None, config.oov_rows
        )
        ids.save(folder / mapping.FOLDER)
    spec = dataclasses.replace(spec, tables={name: ids.size(name) for name in spec.tables})
    first, order = requests.first, requests.order
    arrays: dict[str, np.ndarray] = {
        "request_time": time[first] // 1000,
        "user": user[first].astype(np.int64),
        "candidate_offsets": requests.offsets,
        "row": table.number[order],
        "labels": labels[order].astype(np.float32),
        "request_dense": dense.request,
        "candidate_dense": dense.candidate,
    }
    if weights is not None:
        arrays["weights"] = weights[order].astype(np.float32)
    for side, features, rows in (("request", spec.request, first), ("candidate", spec.candidate, order)):
        single = np.zeros((len(rows), sum(not feature.is_list for feature in features)), np.int32)
        taken = 0
        for feature in features:
            column = columns[feature.name].take(rows)
            if isinstance(column, CodedLists):
                arrays[f"{side}_list.{feature.name}.ids"] = ids.ids(feature.table, column)
                arrays[f"{side}_list.{feature.name}.offsets"] = column.offsets
            else:
                single[:, taken] = ids.ids(feature.table, column)
                taken += 1
        arrays[f"{side}_ids"] = single
    for event in spec.histories:
        history, name = histories[event.name], f"history.{event.name}"
        fields = [_field(history, field, columns) for field in event.fields]
        mapped = [ids.ids(field.table, column) for field, column in zip(event.fields, fields, strict=True)]
        arrays[f"{name}.ids"] = np.stack(mapped, 1)
        arrays[f"{name}.times"] = history.times
        arrays[f"{name}.starts"], arrays[f"{name}.ends"] = history.starts, history.ends
    meta: dict[str, Any] = {
        "spec": dataclasses.asdict(spec),
        "bounds": requests.bounds,
        "label_rates": earlier.label_rates
        if earlier and not new_ids
        else _label_rates(spec, labels[training], None if weights is None else weights[training]),
        "label_bounds": _label_bounds(spec, labels[np.append(requests.order, requests.earlier)], real_labels),
        "numeric": dense.statistics,
        "missing": dense.missing | _unobserved(spec, labels[training]),
        "fingerprint": _fingerprint(spec, ids, dense),
        "oov_rows": config.oov_rows,
        "extends": earlier.fingerprint if earlier else None,
        "files": table.files,
        "first_row": table.first_row,
    }
    store.save(folder, arrays, meta)


def _min_counts(config: DataConfig, spec: FeatureSpec, new_ids: bool) -> dict[str, float]:
    """How often an id must occur in training to get a row, by table."""
    if stray := sorted(set(config.table_min_count) - set(spec.tables)):
        raise ValueError(f"data.table_min_count names {stray}, which are no tables; there are {sorted(spec.tables)}")
    counts = {table: config.table_min_count.get(table, config.min_count) for table in spec.tables}
    return {table: count if new_ids else math.inf for table, count in counts.items()}


def _fingerprint(spec: FeatureSpec, ids: Hashing | Vocabulary, dense: Dense) -> str:
    """Of everything that decides which row an id of a feature becomes and how numbers are scaled."""
    # Six digits: sums round differently on other processors.
    names = ("mean", "std", "fill")
    scales = [(name, *(f"{used[key]:.6g}" for key in names if key in used)) for name, used in dense.statistics.items()]
    text = json.dumps([list(spec.lookups()), ids.digest(), scales])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _field(history: History, field: SparseFeature, columns: Mapping[str, Coded | CodedLists]) -> Coded:
    if history.rows is None:
        return history.fields[field.name]
    column = columns[field.name]
    assert isinstance(column, Coded)
    return column.take(history.rows)


def _training_ids(
    spec: FeatureSpec,
    columns: Mapping[str, Coded | CodedLists],
    histories: Mapping[str, History],
    training: np.ndarray,
    bounds: tuple[int, int],
) -> Iterator[Occurrences]:
    """Ids of training rows, and those of other events that training requests see. No row is counted twice."""
    counted = set()
    row_fields = [f for e in spec.histories if histories[e.name].rows is not None for f in e.fields]
    for feature in (*spec.request, *spec.candidate, *row_fields):
        if (feature.table, feature.name) not in counted:
            counted.add((feature.table, feature.name))
            column = columns[feature.name]
            lengths = np.diff(column.offsets) if isinstance(column, CodedLists) else 1
            yield feature.table, column, np.repeat(training, lengths)
    for event in spec.histories:
        history = histories[event.name]
        if history.rows is None:
            seen = history.seen(*bounds)
            for field in event.fields:
                yield field.table, history.fields[field.name], seen


def _unobserved(spec: FeatureSpec, labels: np.ndarray) -> dict[str, float]:
    """Share of rows [N, tasks] whose label was not observed, by task."""
    return dict(zip(spec.tasks, np.isnan(labels).mean(0).tolist(), strict=True))


def _label_bounds(
    spec: FeatureSpec, labels: np.ndarray, real_labels: Sequence[str]
) -> dict[str, tuple[float, float, bool]]:
    """(least, most, whether all are whole) of the observed labels [N, tasks] of these tasks."""
    bounds = {}
    for task, column in zip(spec.tasks, labels.T, strict=True):
        observed = column[~np.isnan(column)]
        if task in real_labels and observed.size:
            whole = bool((observed == np.round(observed)).all())
            bounds[task] = float(observed.min()), float(observed.max()), whole
    return bounds


def _label_rates(spec: FeatureSpec, labels: np.ndarray, weights: np.ndarray | None) -> dict[str, float]:
    rates = {}
    for task, column in zip(spec.tasks, labels.T, strict=True):
        observed = ~np.isnan(column) if weights is None else ~np.isnan(column) & (weights > 0)
        if not observed.any():
            raise ValueError(f"task {task!r} has no observed label in the training split")
        rates[task] = float(np.average(column[observed], weights=None if weights is None else weights[observed]))
    return rates
