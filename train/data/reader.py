"""Requests in plain Python, as a server gets them, to batches: with the ids and the scales of a run's own data.

A request is a mapping: `request` has the values of its columns, `candidates` one mapping of columns for each,
`histories` the events of each event type, `time` when it is made. A candidate has the columns of its vendor, too, where
the data has vendors. It is the same after JSON, and as a row of an Arrow
table, see `train.serving.formats`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from modules.batch import UNKNOWN_ID, EventType, FeatureSpec, RequestBatch, SparseFeature, VectorFeature
from modules.pretrained import read_description
from train.config.schema import EventsConfig
from train.data.batch import Events, Ids, VendorColumns, pack
from train.data.features import mapping
from train.data.features.columns import Coded
from train.data.features.numeric import INDICATOR, LARGEST, TOO_LARGE, before_scaling, matching, scaled, scaled_vectors
from train.data.features.transforms import Transforms, texts_as_ids
from train.data.features.vocabulary import Hashing, first_row, rows_of_unknown
from train.data.requests import vendor_runs
from train.data.source import Source
from train.data.statistics.lookup import Lookup
from train.data.values import (
    WRONG,
    as_float,
    equal,
    first_wrong,
    mapping_of,
    refuse_unknown,
    seconds,
    several,
    shown,
    value_of,
    vector_of,
)
from train.process.files import write_json

DESCRIPTION = "reader.json"
"""In the folder of an export, beside the vocabulary: the configuration of the data, without its files."""
PARTS = ("request", "candidates", "histories", "time")
_FILES = (
    "root",
    "cache_dir",
    "files",
    "valid_files",
    "test_files",
    "joins",
    "vocabulary_of",
    "table_vectors",
    "follow",
    "manifest",
)


class RequestReader:
    """Batches for `train.serving.scorer.Scorer`, from the columns of an `events` run's files.

    Every id of the run's vocabulary is held in memory, as a Python string.
    """

    def __init__(self, run_dir: Path, spec: FeatureSpec) -> None:
        """`run_dir`: a run directory, or the folder of an export. `spec`: that of the `Scorer`.

        Raises ValueError when the data is not data=events.
        """
        data = _description(run_dir)
        if data["name"] != "events":
            raise ValueError(
                f"{run_dir} was trained on data={data['name']}, whose features are computed; use data=events"
            )
        lists = {name: each for name, each in data["histories"].items() if each["lists"] and not each["times"]}
        self.undated = {event.name for event in spec.histories if event.name in lists}
        """Event types whose events have an order and no time."""
        self.folder = run_dir
        self.spec, self.logarithmic = spec, set(data["log_numeric"])
        self.transforms = Transforms(data.get("transforms", {}))
        self.display: dict[str, Any] = data.get("display", {})
        self.vendor: str = data.get("vendor") or ""
        self.event_types = frozenset(event.name for event in spec.histories)
        columns = [*data["request_numeric"], *data["candidate_numeric"], *data.get("vendor_numeric", [])]
        columns += self.transforms.number_inputs()
        self.nan_missing = set(matching(columns, data.get("missing_nan", [])))
        self.indicated = {name + INDICATOR: name for name in matching(columns, data.get("missing_indicator", []))}
        known = mapping.read(run_dir)
        if lost := sorted(spec.tables.keys() - known.ids.keys()) if data["id_map"] == "vocabulary" else []:
            raise ValueError(f"{run_dir / mapping.FOLDER} lacks the ids of table {lost[0]!r}; copy it whole")
        self.numeric = known.numeric
        scaled_by = {*spec.request_dense, *spec.candidate_dense, *spec.vendor_dense} - self.indicated.keys()
        if lost := [name for name in sorted(scaled_by) if not {"mean", "std"} <= self.numeric.get(name, {}).keys()]:
            raise ValueError(f"{run_dir / mapping.FOLDER / mapping.ABOUT} lacks mean and std of {lost[0]!r}; copy it")
        self.statistics = Lookup(run_dir, data, known.statistics)
        self.logarithmic |= self.statistics.logarithmic
        self.oov_rows = known.oov_rows
        self.columns = None if known.columns is None else frozenset(known.columns)
        """Of the run's files: a name beside them is a mistake. None: an earlier version kept none."""
        self._rows = {
            table: {text: row for row, text in enumerate(texts.to_pylist(), first_row(self.oov_rows))}
            for table, texts in known.ids.items()
        }

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Self:
        """That of an export's folder. ValueError if it was exported from a run that is not of data=events."""
        folder = Path(folder)
        if not (folder / DESCRIPTION).exists():
            raise ValueError(
                f"{folder} holds no {DESCRIPTION}, with which requests become batches: it is written for runs of "
                "data=events, by this version of train.commands.export"
            )
        try:
            return cls(folder, read_description(folder)[1])
        except (KeyError, TypeError, AttributeError) as error:
            files = f"{DESCRIPTION} or {mapping.FOLDER}/{mapping.ABOUT}"
            raise ValueError(f"{folder}: {files} is not what an export writes ({error!r}); export anew") from error

    def __call__(
        self,
        request: Mapping[str, Any],
        candidates: Sequence[Mapping[str, Any]],
        histories: Mapping[str, Sequence[Mapping[str, Any]]],
        time: Any = None,
    ) -> RequestBatch:
        """The request with its candidates, values by column; `histories` has the events of each type in any order.

        Events have a `time` beside their fields, in seconds since 1970 like the request's; the newest events before the
        request are taken, as many as in training. Event types that were trained on lists without times
        (`data.histories.NAME.lists`) need none: their events stand oldest first, all before the request. A request of
        such types alone needs no time either. None is a missing value or no event, an id that the run does not know is
        unknown, list columns take Python lists. Raises ValueError for columns and event types that do not exist, for a
        list in place of an id or the reverse, and for numbers that are not finite.
        """
        return self._batch([{"request": request, "candidates": candidates, "histories": histories, "time": time}])

    def batch(self, requests: Sequence[Mapping[str, Any]]) -> RequestBatch:
        """Several requests, each a mapping with `request`, `candidates`, `histories` and `time`, as one batch.

        ValueError as above, and for other keys, with the number of the request.
        """

        def read(some: Sequence[Mapping[str, Any]]) -> RequestBatch:
            return self._batch([_parts(request) for request in some])

        try:
            return read(requests)
        except WRONG as error:
            if found := first_wrong(requests, read):
                raise ValueError(f"request {found[0]}: {found[1]}") from found[1]
            raise ValueError(str(error)) from error

    def _batch(self, requests: Sequence[Mapping[str, Any]]) -> RequestBatch:
        spec = self.spec
        own = [request["request"] for request in requests]
        candidates = [row for request in requests for row in request["candidates"]]
        owners = [request["request"] for request in requests for _ in request["candidates"]]
        times = [self._time(request["time"]) for request in requests]
        histories = [(request["histories"], time) for request, time in zip(requests, times, strict=True)]
        own = self._shown(own, spec.request, spec.request_dense, "the request")
        vendors = None
        if spec.num_vendor_tokens:
            vendors = self._vendors(candidates, owners, [len(request["candidates"]) for request in requests])
        candidates = self._shown(candidates, spec.candidate, spec.candidate_dense, "a candidate", owners)
        counted: dict[str, np.ndarray] = {}
        if self.statistics:
            moments = np.array(times, np.int64)
            counted = self.statistics.of("request", _Columns(self, own, "the request"), moments)
            both = [{**owner, **mapping_of(row, "a candidate")} for owner, row in zip(owners, candidates, strict=True)]
            moments = np.repeat(moments, [len(request["candidates"]) for request in requests])
            counted |= self.statistics.of("candidate", _Columns(self, both, "a candidate"), moments)
        batch = pack(
            spec,
            request=[self._ids(feature, own, "the request") for feature in spec.request],
            candidate=[self._ids(feature, candidates, "a candidate") for feature in spec.candidate],
            request_dense=self._numbers(spec.request_dense, own, "the request", spec.request_vectors, counted),
            candidate_dense=self._numbers(
                spec.candidate_dense, candidates, "a candidate", spec.candidate_vectors, counted
            ),
            histories=[self._events(event, histories) for event in spec.histories],
            request_time=np.array(times, np.int64),
            candidate_counts=np.array([len(request["candidates"]) for request in requests], np.int64),
            labels=np.full((len(candidates), len(spec.tasks)), np.nan),
            group=np.zeros(len(candidates)),
            row=np.arange(len(candidates)),
            vendor=vendors,
            torchrec=False,
        )
        self._refuse_unknown(requests)
        return batch

    def _refuse_unknown(self, requests: Sequence[Mapping[str, Any]]) -> None:
        refuse_unknown((request["histories"] for request in requests), self.event_types, "histories", "event type")
        if self.columns is None:
            return
        refuse_unknown((request["request"] for request in requests), self.columns, "the request")
        refuse_unknown((row for request in requests for row in request["candidates"]), self.columns, "a candidate")
        with_time = self.columns | {"time"}
        for name in self.event_types:
            events = (event for request in requests for event in request["histories"].get(name) or ())
            refuse_unknown(events, with_time, f"an event of type {name!r}")

    def _vendors(
        self, candidates: list[Mapping[str, Any]], owners: Sequence[Mapping[str, Any]], counts: Sequence[int]
    ) -> VendorColumns:
        """Neighbours among a request's candidates that have the same vendor; they must agree in its features."""
        spec, whose = self.spec, "a candidate"
        ids = self.coded([value_of(row, self.vendor, whose) for row in candidates], self.vendor, whose)
        if (ids.codes < 0).any():
            raise ValueError(f"{whose} has {self.vendor}=None; it must have a vendor")
        each, sizes = vendor_runs(ids.codes, np.array(counts, np.int64))
        derived = self._shown(candidates, spec.vendor, spec.vendor_dense, whose, owners)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes).tolist()
        numbers = dict.fromkeys(self.indicated.get(name, name) for name in spec.vendor_dense)
        vectors = [vector.name for vector in spec.vendor_vectors]
        for name in (*(feature.name for feature in spec.vendor), *numbers, *vectors):
            values = [value_of(row, name, whose) for row in derived]
            for place, value in enumerate(values):
                if not equal(value, values[first[place]]):
                    raise ValueError(
                        f"{whose} has {name}={shown(value)}, and another of the same {self.vendor}="
                        f"{shown(candidates[place][self.vendor])} has {shown(values[first[place]])}; features of a "
                        "vendor must be equal"
                    )
        firsts = [derived[place] for place in dict.fromkeys(first)]
        return VendorColumns(
            sparse=[self._ids(feature, firsts, whose) for feature in spec.vendor],
            dense=self._numbers(spec.vendor_dense, firsts, whose, spec.vendor_vectors),
            counts=each,
            candidates=sizes,
        )

    def _time(self, time: Any) -> int:
        if time is None and not self.statistics and all(event.name in self.undated for event in self.spec.histories):
            return 0  # ages of events count from it, and here they are all the same
        return seconds(time, "the request")

    def _shown(
        self,
        rows: list[Mapping[str, Any]],
        features: Sequence[SparseFeature],
        numbers: Sequence[str],
        whose: str,
        owners: Sequence[Mapping[str, Any]] = (),
    ) -> list[Mapping[str, Any]]:
        """As `_derived`, with the fixed values of features that no request has."""
        features = [feature for feature in features if feature.name not in self.display]
        numbers = [name for name in numbers if self.indicated.get(name, name) not in self.display]
        rows = self._derived(rows, features, numbers, whose, owners)
        return [{**mapping_of(row, whose), **self.display} for row in rows] if self.display else rows

    def _derived(
        self,
        rows: list[Mapping[str, Any]],
        features: Sequence[SparseFeature],
        numbers: Sequence[str],
        whose: str,
        owners: Sequence[Mapping[str, Any]] = (),
    ) -> list[Mapping[str, Any]]:
        """The rows with the columns that transforms make of theirs, and of those of the requests that own them."""
        names = [feature.name for feature in features] + [self.indicated.get(name, name) for name in numbers]
        if not any(name in self.transforms for name in names):
            return rows
        if owners:
            rows = [{**owner, **row} for owner, row in zip(owners, rows, strict=True)]
        return list(self.transforms.derive(rows, dict.fromkeys(names), _Columns(self, rows, whose)))

    def _ids(self, feature: SparseFeature, rows: Sequence[Mapping[str, Any]], whose: str) -> Ids:
        values = [value_of(row, feature.name, whose) for row in rows]
        if not feature.is_list:
            return Ids(self._known(feature, values, whose))
        for value in values:
            if value is not None and not several(value):
                wanted = f"a list of ids, such as [{shown(value)}]"
                raise ValueError(f"{whose} has {feature.name}={shown(value)}; it must be {wanted}")
        lists = [[] if value is None else list(value) for value in values]
        return Ids(
            self._known(feature, [item for items in lists for item in items], whose),
            np.array([len(items) for items in lists], np.int64),
        )

    def _known(self, feature: SparseFeature, values: Sequence[Any], whose: str) -> np.ndarray:
        ids, table = self.coded(values, feature.name, whose), feature.table
        if table not in self._rows:
            return Hashing(self.spec.tables[table]).ids(table, ids)
        unknown = rows_of_unknown(ids.values, self.oov_rows).tolist()
        rows = [self._rows[table].get(text, row) for text, row in zip(ids.values.to_pylist(), unknown, strict=True)]
        return np.array([*rows, UNKNOWN_ID], np.int32)[ids.codes]

    def coded(self, values: Sequence[Any], name: str, whose: str) -> Coded:
        """Values as ids. ValueError for a list or another object among them."""
        try:
            return texts_as_ids(values)
        except WRONG:
            place, _ = first_wrong(values, texts_as_ids) or (0, None)
            raise ValueError(
                f"{whose} has {name}={shown(values[place])}; it must be one id: a number, or text in Unicode"
            ) from None

    def _numbers(
        self,
        names: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        whose: str,
        vectors: Sequence[VectorFeature] = (),
        counted: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """`counted`: numbers that the rows do not have, by feature."""
        columns = np.zeros((len(rows), len(names)), np.float32)
        for index, name in enumerate(names):
            column = self.indicated.get(name, name)
            if counted and name in counted:
                values = counted[name]
            else:
                values = np.array(
                    [self.number(value_of(row, column, whose), column, whose) for row in rows], np.float64
                )
            if name in self.indicated:
                columns[:, index] = np.isnan(values)
            else:
                statistics = self.numeric[name]
                numbers = before_scaling(values, statistics.get("fill"), name in self.logarithmic)
                columns[:, index] = scaled(numbers, statistics)
        of_vectors = [scaled_vectors(self._vectors_of(each, rows, whose), each, self.numeric) for each in vectors]
        return np.concatenate([columns, *of_vectors], 1)

    def _vectors_of(self, feature: VectorFeature, rows: Sequence[Mapping[str, Any]], whose: str) -> np.ndarray:
        """[N, width] float64, NaN in all of a missing one, which is None."""
        values = np.full((len(rows), feature.width), np.nan)
        for index, row in enumerate(rows):
            given = value_of(row, feature.name, whose)
            if given is None:
                continue
            numbers = vector_of(given, feature.width)
            if numbers is None:
                raise ValueError(
                    f"{whose} has {feature.name}={shown(given)}; it must be {feature.width} finite numbers"
                )
            values[index] = numbers
        return values

    def number(self, value: Any, name: str, whose: str) -> float:
        """As files have it: nothing is a missing number, and so is NaN in a column of `data.missing_nan`."""
        if value is None:
            return np.nan
        number = as_float(value)
        if math.isinf(number) or (math.isnan(number) and name not in self.nan_missing):
            wanted = "a finite number, or None where it is missing"
            raise ValueError(f"{whose} has {name}={shown(value)}; it must be {wanted}")
        if abs(number) > LARGEST and name not in self.logarithmic:
            raise ValueError(f"{whose} has {name}={shown(value)}, {TOO_LARGE}")
        return number

    def _events(self, event: EventType, requests: Sequence[tuple[Mapping[str, Any], int]]) -> Events:
        """Of one type, from the histories and the time of each request."""
        whose = f"an event of type {event.name!r}"
        newest: list[Mapping[str, Any]] = []
        times, lengths = [], []
        for histories, now in requests:
            events = value_of(histories, event.name, "histories") or []
            if not several(events):
                raise ValueError(f"histories has {event.name}={shown(events)}; it must be a list of events")
            if event.name in self.undated:
                dated = [(now - 1, each) for each in events]
            else:
                all_dated = [(seconds(value_of(each, "time", whose), whose), each) for each in events]
                dated = sorted((pair for pair in all_dated if pair[0] < now), key=lambda pair: pair[0])
            kept = dated[-event.max_length :]
            newest += [each for _, each in kept]
            times += [time for time, _ in kept]
            lengths.append(len(kept))
        newest = self._derived(newest, event.fields, (), whose)
        return Events(
            [self._known(each, [value_of(row, each.name, whose) for row in newest], whose) for each in event.fields],
            np.array(times, np.int64),
            np.array(lengths, np.int64),
        )


@dataclass
class _Columns:
    """Values of requests, candidates or events, as `train.data.features.transforms.Columns`."""

    reader: RequestReader
    rows: Sequence[Mapping[str, Any]]
    whose: str

    def ids(self, name: str) -> Coded:
        if name in self.reader.transforms:
            return self.reader.transforms.ids(name, self)
        return self.reader.coded(self.given(name), name, self.whose)

    def given(self, name: str) -> list[Any]:
        return [value_of(row, name, self.whose) for row in self.rows]

    def numbers(self, name: str) -> np.ndarray:
        if name in self.reader.transforms:
            return self.reader.transforms.numbers(name, self)
        return np.array(
            [self.reader.number(value_of(row, name, self.whose), name, self.whose) for row in self.rows], np.float64
        )


def keep_reader(data: Any, source: Source, folder: Path) -> bool:
    """Write what `RequestReader.from_pretrained` reads; False, and nothing, for data that no requests come from."""
    if not isinstance(data, EventsConfig):
        return False
    source.keep_mapping(folder)
    about = {name: value for name, value in dataclasses.asdict(data).items() if name not in _FILES}
    write_json(folder / DESCRIPTION, about)
    return True


def _description(folder: Path) -> dict[str, Any]:
    """The configuration of the data of a run directory or of an export's folder."""
    if (folder / DESCRIPTION).exists():
        return json.loads((folder / DESCRIPTION).read_text())
    return json.loads((folder / "config.json").read_text())["config"]["data"]


def _parts(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """ValueError for a request that is no mapping, has other keys or lacks its candidates."""
    if not isinstance(request, Mapping):
        raise ValueError(f"a request is a mapping with {', '.join(PARTS)}, got {type(request).__name__}")
    if unknown := [name for name in request if name not in PARTS]:
        raise ValueError(f"{shown(unknown[0])} is no part of a request, which has {', '.join(PARTS)}")
    parts: dict[str, Any] = {"request": {}, "histories": {}, "time": None} | dict(request)
    candidates = parts.get("candidates")
    if isinstance(candidates, str | Mapping) or not isinstance(candidates, Sequence):
        raise ValueError(f"candidates={shown(candidates)} must be a list with a mapping of columns for each candidate")
    return parts
