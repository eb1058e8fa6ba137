"""Requests in plain Python, as a server gets them, to batches: with the ids and the scales of a run's own data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modules.batch import UNKNOWN_ID, EventType, FeatureSpec, RequestBatch, SparseFeature
from train.data import mapping
from train.data.batch import Events, Ids, pack
from train.data.columns import Coded
from train.data.numeric import INDICATOR, LARGEST, TOO_LARGE, before_scaling, matching, scaled
from train.data.transforms import Transforms, texts_as_ids
from train.data.vocabulary import Hashing, first_row, rows_of_unknown


class RequestReader:
    """Batches of one request, for `train.commands.score.Scorer`, from the columns of an `events` run's files.

    Every id of the run's vocabulary is held in memory, as a Python string.
    """

    def __init__(self, run_dir: Path, spec: FeatureSpec) -> None:
        """`spec`: that of the `Scorer`. Raises ValueError when the run's data is not data=events."""
        data = json.loads((run_dir / "config.json").read_text())["config"]["data"]
        if data["name"] != "events":
            raise ValueError(
                f"{run_dir} was trained on data={data['name']}, whose features are computed; use data=events"
            )
        self.spec, self.logarithmic = spec, set(data["log_numeric"])
        self.transforms = Transforms(data.get("transforms", {}))
        columns = [*data["request_numeric"], *data["candidate_numeric"], *self.transforms.number_inputs()]
        self.nan_missing = set(matching(columns, data.get("missing_nan", [])))
        self.indicated = {name + INDICATOR: name for name in matching(columns, data.get("missing_indicator", []))}
        known = mapping.read(run_dir)
        self.numeric = known.numeric
        self.oov_rows = known.oov_rows
        self._rows: dict[str, dict[str, int]] | None = None
        if known.ids is not None:
            self._rows = {
                table: {text: row for row, text in enumerate(texts.to_pylist(), first_row(self.oov_rows))}
                for table, texts in known.ids.items()
            }

    def __call__(
        self,
        request: Mapping[str, Any],
        candidates: Sequence[Mapping[str, Any]],
        histories: Mapping[str, Sequence[Mapping[str, Any]]],
        time: int,
    ) -> RequestBatch:
        """The request with its candidates, values by column; `histories` has the events of each type in any order.

        Events have a `time` beside their fields, in seconds since 1970 like the request's; the newest events before the
        request are taken, as many as in training. None is a missing value, an id that the run does not know is unknown,
        list columns take Python lists. Raises ValueError for columns and event types that do not exist, for a list in
        place of an id or the reverse, and for numbers that are not finite.
        """
        spec = self.spec
        own = self._derived([request], spec.request, spec.request_dense, "the request")
        # A column that a transform makes for candidates may be made of the request's columns, too.
        joined = [{**request, **candidate} for candidate in candidates]
        candidates = self._derived(joined, spec.candidate, spec.candidate_dense, "a candidate")
        return pack(
            spec,
            request=[self._ids(feature, own, "the request") for feature in spec.request],
            candidate=[self._ids(feature, candidates, "a candidate") for feature in spec.candidate],
            request_dense=self._numbers(spec.request_dense, own, "the request"),
            candidate_dense=self._numbers(spec.candidate_dense, candidates, "a candidate"),
            histories=[self._events(event, histories, time) for event in spec.histories],
            request_time=np.array([time]),
            candidate_counts=np.array([len(candidates)]),
            labels=np.full((len(candidates), len(spec.tasks)), np.nan),
            group=np.zeros(len(candidates)),
            row=np.arange(len(candidates)),
        )

    def _derived(
        self, rows: Sequence[Mapping[str, Any]], features: Sequence[SparseFeature], numbers: Sequence[str], whose: str
    ) -> Sequence[Mapping[str, Any]]:
        """The rows with the columns that transforms make of theirs."""
        names = [feature.name for feature in features] + [self.indicated.get(name, name) for name in numbers]
        return self.transforms.derive(rows, dict.fromkeys(names), _Columns(self, rows, whose))

    def _ids(self, feature: SparseFeature, rows: Sequence[Mapping[str, Any]], whose: str) -> Ids:
        values = [_column(row, feature.name, whose) for row in rows]
        for value in values:
            if value is not None and feature.is_list != (isinstance(value, Iterable) and not isinstance(value, str)):
                wanted = f"a list of ids, such as [{value!r}]" if feature.is_list else "one id, not several"
                raise ValueError(f"{whose} has {feature.name}={value!r}; it must be {wanted}")
        if not feature.is_list:
            return Ids(self._known(feature.table, values))
        lists = [[] if value is None else list(value) for value in values]
        return Ids(
            self._known(feature.table, [item for items in lists for item in items]),
            np.array([len(items) for items in lists], np.int64),
        )

    def _known(self, table: str, values: Sequence[Any]) -> np.ndarray:
        ids = texts_as_ids(values)
        if self._rows is None:
            return Hashing(self.spec.tables[table]).ids(table, ids)
        unknown = rows_of_unknown(ids.values, self.oov_rows).tolist()
        rows = [self._rows[table].get(text, row) for text, row in zip(ids.values.to_pylist(), unknown, strict=True)]
        return np.array([*rows, UNKNOWN_ID], np.int32)[ids.codes]

    def _numbers(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]], whose: str) -> np.ndarray:
        columns = np.zeros((len(rows), len(names)), np.float32)
        for index, name in enumerate(names):
            column = self.indicated.get(name, name)
            values = np.array([self.number(_column(row, column, whose), column, whose) for row in rows], np.float64)
            if name in self.indicated:
                columns[:, index] = np.isnan(values)
            else:
                statistics = self.numeric[name]
                numbers = before_scaling(values, statistics.get("fill"), name in self.logarithmic)
                columns[:, index] = scaled(numbers, statistics)
        return columns

    def number(self, value: Any, name: str, whose: str) -> float:
        """As files have it: nothing is a missing number, and so is NaN in a column of `data.missing_nan`."""
        if value is None:
            return np.nan
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.inf
        if math.isinf(number) or (math.isnan(number) and name not in self.nan_missing):
            raise ValueError(f"{whose} has {name}={value!r}; it must be a finite number, or None where it is missing")
        if abs(number) > LARGEST and name not in self.logarithmic:
            raise ValueError(f"{whose} has {name}={value!r}, {TOO_LARGE}")
        return number

    def _events(self, event: EventType, histories: Mapping[str, Sequence[Mapping[str, Any]]], time: int) -> Events:
        whose = f"an event of type {event.name!r}"
        earlier = [each for each in _column(histories, event.name, "histories") if _column(each, "time", whose) < time]
        newest = sorted(earlier, key=lambda each: each["time"])[-event.max_length :]
        newest = list(self._derived(newest, event.fields, (), whose))
        return Events(
            [self._known(field.table, [_column(each, field.name, whose) for each in newest]) for field in event.fields],
            np.array([each["time"] for each in newest], np.int64),
            np.array([len(newest)]),
        )


@dataclass
class _Columns:
    """Values of requests, candidates or events, as `train.data.transforms.Columns`."""

    reader: RequestReader
    rows: Sequence[Mapping[str, Any]]
    whose: str

    def ids(self, name: str) -> Coded:
        if name in self.reader.transforms:
            return self.reader.transforms.ids(name, self)
        return texts_as_ids([_column(row, name, self.whose) for row in self.rows])

    def numbers(self, name: str) -> np.ndarray:
        if name in self.reader.transforms:
            return self.reader.transforms.numbers(name, self)
        return np.array(
            [self.reader.number(_column(row, name, self.whose), name, self.whose) for row in self.rows], np.float64
        )


def _column(row: Mapping[str, Any], name: str, whose: str) -> Any:
    if name not in row:
        raise ValueError(f"{whose} has no {name!r}, it has {sorted(row)}; None is a missing value, [] no event")
    return row[name]
