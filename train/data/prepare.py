"""The last stage of preparation, common to all sources: rows, requests and histories to the columns of a cache folder.

`write` has the columns of all rows in memory: ids as 4 bytes each, numbers as 8, lists as 4 an item.
`train.data.events.streamed` has not, and ends in the same parts. Training then reads memory-mapped files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modules.batch import FeatureSpec, SparseFeature
from train.config.schema import DataConfig, EventsConfig
from train.data.features import mapping
from train.data.features.columns import Coded, CodedLists
from train.data.features.exact import ExactSum, Moments
from train.data.features.numeric import INDICATOR, before_scaling, scaled
from train.data.features.transforms import texts_as_ids
from train.data.features.vocabulary import Hashing, Occurrences, Vocabulary, first_row, occurrences
from train.data.histories import History
from train.data.requests import Requests
from train.data.storage import store
from train.data.storage.files import Table
from train.data.storage.writer import Block, VendorBlock, Writer
from train.data.vector_tables import VectorFiles

logger = logging.getLogger(__name__)


@dataclass
class Dense:
    """Standardised numeric features and, for each, the mean and standard deviation that were used."""

    request: np.ndarray  # [R, m_u] float32
    candidate: np.ndarray  # [C, m_c] float32
    statistics: dict[str, dict[str, float]]
    vendor: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [V, m_v] float32
    missing: dict[str, float] = field(default_factory=dict)  # share of the training rows without a number, by column


def standardise(values: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """(values - mean) / standard deviation over `training`; a missing value (NaN) becomes 0, which is the mean."""
    moments = Moments()
    moments.add(np.asarray(values[training], np.float64))
    used = {"mean": moments.mean(), "std": moments.std()}
    return scaled(values, used), used


class Labels:
    """What is known of the labels of all rows: training rates, unobserved shares and bounds."""

    def __init__(self, spec: FeatureSpec, real: Sequence[str]) -> None:
        self.spec, self.real = spec, real
        self._rows = 0
        self._unobserved = np.zeros(len(spec.tasks), np.int64)
        self._sums = [(ExactSum(), ExactSum()) for _ in spec.tasks]  # of weighted labels, of weights
        self._bounds: dict[str, tuple[float, float, bool]] = {}

    def train(self, labels: np.ndarray, weights: np.ndarray | None) -> None:
        """Labels [N, tasks] and weights [N] of training rows."""
        self._rows += len(labels)
        weights = np.ones(len(labels)) if weights is None else weights
        for task, column in enumerate(labels.T):
            observed = ~np.isnan(column)
            self._unobserved[task] += np.count_nonzero(~observed)
            total, weight = self._sums[task]
            total.add(column[observed] * weights[observed])
            weight.add(weights[observed])

    def see(self, labels: np.ndarray) -> None:
        """Labels [N, tasks] of any rows."""
        for task, column in zip(self.spec.tasks, labels.T, strict=True):
            observed = column[~np.isnan(column)]
            if task in self.real and observed.size:
                least, most, whole = self._bounds.get(task, (math.inf, -math.inf, True))
                whole = whole and bool((observed == np.round(observed)).all())
                self._bounds[task] = min(least, float(observed.min())), max(most, float(observed.max())), whole

    def rates(self, earlier: Mapping[str, float]) -> dict[str, float]:
        """Of the training rows. A task that has labels of one class only, or none, keeps the rate of an `earlier` run;
        without one it has the rate 0 if it has no label. Raises ValueError if no task has one."""
        if not any(weight.value() for _, weight in self._sums):
            raise ValueError(f"no task of {list(self.spec.tasks)} has an observed label in the training split")
        rates = {}
        for task, (total, weight) in zip(self.spec.tasks, self._sums, strict=True):
            rate = float(total.value() / weight.value()) if weight.value() else 0.0
            lacks = rate in (0, 1) if task not in self.real else not weight.value()
            rates[task] = earlier.get(task, rate) if lacks else rate
        return rates

    def unobserved(self) -> dict[str, float]:
        """Share of training rows whose label was not observed, by task."""
        return dict(zip(self.spec.tasks, (self._unobserved / max(self._rows, 1)).tolist(), strict=True))

    def bounds(self) -> dict[str, tuple[float, float, bool]]:
        """(least, most, whether all are whole) of the observed labels of tasks that have real numbers."""
        return self._bounds


def make_ids(
    folder: Path,
    config: DataConfig,
    spec: FeatureSpec,
    training: Iterable[Occurrences],
    earlier: mapping.Mapping | None,
    new_ids: bool,
    vectors: VectorFiles | None = None,
) -> tuple[Hashing | Vocabulary, FeatureSpec]:
    """Rows for the ids that occur in training, or have one of `vectors`, saved, and the spec with the sizes of the
    tables. The rows of tables of `vectors` are written, too."""
    counts, known = _min_counts(config, spec, new_ids), earlier.ids if earlier else None
    counted, given = list(training), list[Occurrences]()
    if vectors is not None:
        given = list(vectors.occurrences())
        vectors.report(counted)
    if config.id_map == "hash":
        ids: Hashing | Vocabulary = Hashing(config.hash_rows, Vocabulary(given, counts, known))
    else:
        learned = [each for each in counted if each[0] not in spec.vector_tables]
        ids = Vocabulary([*learned, *given], counts, known, config.oov_rows)
    ids.save(folder / mapping.FOLDER)
    if vectors is not None:
        vectors.write(folder, ids)
    return ids, dataclasses.replace(spec, tables={name: ids.size(name) for name in spec.tables})


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
    vendors: tuple[np.ndarray, np.ndarray] | None = None,
    earlier: mapping.Mapping | None = None,
    new_ids: bool = True,
    real_labels: Sequence[str] = (),
    vectors: VectorFiles | None = None,
) -> None:
    """Write the prepared form.

    user (codes), time (milliseconds), weights [N] (None: 1) and labels [N, tasks] belong to rows; `columns` has every
    sparse feature and every field of events that are rows, by name; `vendors` are the `vendor_runs` of the candidates,
    if there are any. The sizes in `spec.tables` are set here, from training ids. Ids of an `earlier` run keep their
    rows; without `new_ids` no others get one.
    """
    training = np.zeros(len(table.number), bool)
    training[requests.rows("train")] = True
    training[requests.earlier] = True
    if not training.any():
        raise ValueError(empty_training(config, len(requests.order)))
    counted = _training_ids(spec, columns, histories, training, requests.bounds["train"])
    ids, spec = make_ids(folder, config, spec, counted, earlier, new_ids, vectors)
    known = Labels(spec, real_labels)
    known.train(labels[training], None if weights is None else weights[training])
    known.see(labels[np.append(requests.order, requests.earlier)])
    first, order = requests.first, requests.order
    vendor = None
    if vendors is not None:
        begins = order[np.cumsum(vendors[1]) - vendors[1]]
        sparse = {feature.name: columns[feature.name].take(begins) for feature in spec.vendor}
        vendor = VendorBlock(*vendors, sparse=sparse, dense=dense.vendor)
    writer = Writer(folder, spec, ids)
    writer.add(
        Block(
            time=time[first],
            user=user[first],
            counts=np.diff(requests.offsets),
            row=table.number[order],
            labels=labels[order],
            weights=None if weights is None else weights[order],
            request={feature.name: columns[feature.name].take(first) for feature in spec.request},
            candidate={feature.name: columns[feature.name].take(order) for feature in spec.candidate},
            request_dense=dense.request,
            candidate_dense=dense.candidate,
            events={name: (history.starts, history.ends) for name, history in histories.items()},
            vendor=vendor,
        )
    )
    for event in spec.histories:
        history = histories[event.name]
        writer.events(event, [history_field(history, field, columns) for field in event.fields], history.times)
    writer.close()
    save_meta(folder, config, spec, table, requests.bounds, ids, known, dense, earlier, new_ids, vectors)


def save_meta(
    folder: Path,
    config: DataConfig,
    spec: FeatureSpec,
    table: Table,
    bounds: Mapping[str, tuple[int, int]],
    ids: Hashing | Vocabulary,
    labels: Labels,
    dense: Dense,
    earlier: mapping.Mapping | None,
    new_ids: bool,
    vectors: VectorFiles | None = None,
) -> None:
    transforms, digests = config.transformed(), vectors.digests if vectors else {}
    statistics = dense.statistics | (vectors.statistics if vectors else {})
    rates = earlier.label_rates if earlier else {}
    meta: dict[str, Any] = {
        "spec": dataclasses.asdict(spec),
        "bounds": bounds,
        "label_rates": rates if earlier and not new_ids else labels.rates(rates),
        "label_bounds": labels.bounds(),
        "numeric": statistics,
        "missing": dense.missing | labels.unobserved(),
        "fingerprint": _fingerprint(spec, ids, statistics, transforms, digests),
        "transforms": transforms,
        "vectors": digests,
        "statistics": config.counted(),
        "display": _display(config, spec, ids, statistics),
        "oov_rows": config.oov_rows,
        "extends": earlier.fingerprint if earlier else None,
        "files": table.files,
        "first_row": table.first_row,
    }
    store.save_meta(folder, meta)


def _display(
    config: DataConfig, spec: FeatureSpec, ids: Hashing | Vocabulary, statistics: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The fixed values of `data.display` as a batch has them: rows of tables, and scaled numbers."""
    if not isinstance(config, EventsConfig):
        return {}
    given, fixed = config.display, dict[str, float]()
    for feature in spec.of_rows:
        if feature.name in given:
            value = given[feature.name]
            fixed[feature.name] = row = int(ids.ids(feature.table, texts_as_ids([value]))[0])
            if value is not None and row < first_row(config.oov_rows) and config.id_map == "vocabulary":
                told = "no id of the training rows: it has the row of unknown ids, which none of them trains"
                logger.warning("data.display.%s=%s is %s", feature.name, value, told)
    for name in set(given) - set(fixed):
        numbers = before_scaling(np.array([given[name]], np.float64), None, name in config.log_numeric)
        fixed[name] = float(scaled(numbers, statistics[name])[0])
        fixed[name + INDICATOR] = 0.0
    return fixed


def empty_training(config: DataConfig, rows: int) -> str:
    return f"the training split is empty: data.split={list(config.split)} of {rows} rows"


def _min_counts(config: DataConfig, spec: FeatureSpec, new_ids: bool) -> dict[str, float]:
    """How often an id must occur in training to get a row, by table."""
    counts = dict.fromkeys(spec.tables, config.min_count) | dict.fromkeys(spec.vector_tables, 1)
    return {table: count if new_ids else math.inf for table, count in counts.items()}


def _fingerprint(
    spec: FeatureSpec,
    ids: Hashing | Vocabulary,
    statistics: Mapping[str, Mapping[str, float]],
    transforms: Mapping[str, Mapping[str, Any]],
    vectors: Mapping[str, str],
) -> str:
    """Of everything that decides which row an id of a feature becomes, how numbers are scaled and what files give."""
    # Six digits: sums round differently on other processors.
    names = ("mean", "std", "fill")
    scales = [(name, *(f"{used[key]:.6g}" for key in names if key in used)) for name, used in statistics.items()]
    further = [each for each in (transforms, vectors) if each]
    text = json.dumps([list(spec.lookups()), ids.digest(), scales, *further])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def history_field(history: History, field: SparseFeature, columns: Mapping[str, Coded | CodedLists]) -> Coded:
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
    for feature in (*spec.of_rows, *row_fields):
        if (feature.table, feature.name) not in counted:
            counted.add((feature.table, feature.name))
            column = columns[feature.name]
            lengths = np.diff(column.offsets) if isinstance(column, CodedLists) else 1
            yield feature.table, column.values, occurrences(column, np.repeat(training, lengths))
    for event in spec.histories:
        history = histories[event.name]
        if history.rows is None:
            seen = history.seen(*bounds)
            for field in event.fields:
                column = history.fields[field.name]
                yield field.table, column.values, occurrences(column, seen)
