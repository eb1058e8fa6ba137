"""The interface of every source, and the source that reads prepared columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from modules.batch import EventType, FeatureSpec, RequestBatch, SparseFeature
from train.data.batch import Events, Ids, VendorColumns, pack, ranges
from train.data.features import mapping
from train.data.storage import store
from train.data.storage.files import locate
from train.data.vector_tables import array_name


class Source(Protocol):
    """Requests of three splits, "train", "valid" and "test", each numbered from 0.

    `shuffled`: the requests of a split are in random order already, so that a loader need not shuffle them.
    """

    spec: FeatureSpec
    shuffled: bool

    @property
    def fingerprint(self) -> str:
        """Equal for two sources that give ids the same rows and scale numbers alike: weights of one fit the other."""
        ...

    @property
    def extends(self) -> str | None:
        """The fingerprint of another source whose ids have the same rows here, with others behind them."""
        ...

    def keep_mapping(self, run_dir: Path) -> None:
        """Write what a run on other files needs to continue with the weights, if the source has such a mapping."""
        ...

    @property
    def oov_rows(self) -> int:
        """Rows from 1 on of every table that belong to no id but to those without a row of their own."""
        ...

    def num_requests(self, split: str) -> int: ...

    def batch(self, split: str, requests: np.ndarray) -> RequestBatch:
        """The requests of these numbers (int64), in this order, on the CPU."""
        ...

    def lengths(self, split: str, requests: np.ndarray) -> np.ndarray:
        """[N] int64: events of all types that `batch` would give each of these requests."""
        ...

    def label_rates(self) -> dict[str, float]:
        """Positive rate of each task's observed labels in the training split, by the weights of their rows."""
        ...

    def label_bounds(self) -> dict[str, tuple[float, float, bool]]:
        """(least, most, whether all are whole) of the labels of tasks that have real numbers; others have 0 and 1."""
        ...

    def missing(self) -> dict[str, float]:
        """Share of training candidates without a number or an observed label, by numeric column and task."""
        ...

    def statistics(self) -> dict[str, dict[str, Any]]:
        """What is counted of earlier rows, by the name of each statistic."""
        ...

    def check(self) -> None:
        """RuntimeError if the data have changed since this process began to read them."""
        ...

    def locate(self, row: int) -> str:
        """Where a `RequestBatch.row` comes from, for error messages: file and row."""
        ...


class PreparedSource:
    """Requests out of a folder written by `train.data.prepare`. Only what a batch needs is read from the disk."""

    shuffled = False

    def __init__(self, folder: Path, max_history: int) -> None:
        self.folder = folder
        self.max_history = max_history
        self.meta = store.load_meta(folder)
        self.spec = spec_from_dict(self.meta["spec"], max_history)

    def __reduce__(self) -> tuple[type[PreparedSource], tuple[Path, int]]:
        return type(self), (self.folder, self.max_history)

    @property
    def fingerprint(self) -> str:
        return self.meta["fingerprint"]

    @property
    def extends(self) -> str | None:
        return self.meta["extends"]

    @property
    def oov_rows(self) -> int:
        return self.meta["oov_rows"]

    def keep_mapping(self, run_dir: Path) -> None:
        mapping.keep(self.folder, self.meta, run_dir)

    def statistics(self) -> dict[str, dict[str, Any]]:
        return self.meta["statistics"]

    def check(self) -> None:
        """RuntimeError if the prepared data was cut short since this process mapped it."""
        self._arrays.check()

    def num_requests(self, split: str) -> int:
        first, end = self.meta["bounds"][split]
        return end - first

    def num_candidates(self, split: str) -> int:
        first, end = self._arrays["candidate_offsets"][list(self.meta["bounds"][split])].tolist()
        return end - first

    def label_rates(self) -> dict[str, float]:
        return self.meta["label_rates"]

    def label_bounds(self) -> dict[str, tuple[float, float, bool]]:
        return {task: tuple(bounds) for task, bounds in self.meta["label_bounds"].items()}

    def missing(self) -> dict[str, float]:
        return self.meta["missing"]

    def locate(self, row: int) -> str:
        return locate(self.meta["files"], self.meta["first_row"], row)

    def vectors(self, table: str) -> np.ndarray:
        """[rows, width] of a table that files give, memory-mapped."""
        return self._arrays[array_name(table)]

    def batch(self, split: str, requests: np.ndarray) -> RequestBatch:
        self.check()
        arrays, spec = self._arrays, self.spec
        rows = self.meta["bounds"][split][0] + np.asarray(requests, np.int64)
        starts = arrays["candidate_offsets"][rows]
        counts = arrays["candidate_offsets"][rows + 1] - starts
        candidates = ranges(starts, counts)
        vendor = None
        if self.spec.num_vendor_tokens:
            first = arrays["vendor_offsets"][rows]
            each = arrays["vendor_offsets"][rows + 1] - first
            vendors = ranges(first, each)
            of_vendors = arrays["vendor_candidate_offsets"]
            sparse = self._features("vendor", self.spec.vendor, vendors)
            sizes = of_vendors[vendors + 1] - of_vendors[vendors]
            vendor = VendorColumns(sparse, arrays["vendor_dense"][vendors], each, sizes)
        request, request_dense = self._features("request", spec.request, rows), arrays["request_dense"][rows]
        candidate = self._features("candidate", spec.candidate, candidates)
        candidate_dense = arrays["candidate_dense"][candidates]
        if split != "train":
            self._as_scored(spec.request, request, spec.request_dense, request_dense)
            self._as_scored(spec.candidate, candidate, spec.candidate_dense, candidate_dense)
            if vendor is not None:
                self._as_scored(spec.vendor, vendor.sparse, spec.vendor_dense, vendor.dense)
        return pack(
            spec,
            request=request,
            candidate=candidate,
            request_dense=request_dense,
            candidate_dense=candidate_dense,
            histories=[self._events(event, rows) for event in self.spec.histories],
            request_time=arrays["request_time"][rows],
            candidate_counts=counts,
            labels=arrays["labels"][candidates],
            weights=arrays["weights"][candidates] if "weights" in arrays else None,
            group=arrays["user"][np.repeat(rows, counts)],
            row=arrays["row"][candidates],
            vendor=vendor,
        )

    def _as_scored(
        self, features: Sequence[SparseFeature], ids: Sequence[Ids], numbers: Sequence[str], dense: np.ndarray
    ) -> None:
        """Give features of the display the values that scoring gives them."""
        fixed = self.meta["display"]
        for feature, column in zip(features, ids, strict=True):
            if feature.name in fixed:
                column.values = np.full_like(column.values, fixed[feature.name])
        for index, name in enumerate(numbers):
            if name in fixed:
                dense[:, index] = fixed[name]

    def lengths(self, split: str, requests: np.ndarray) -> np.ndarray:
        self.check()
        rows = self.meta["bounds"][split][0] + np.asarray(requests, np.int64)
        total = np.zeros(len(rows), np.int64)
        for event in self.spec.histories:
            total += self._events_of(event, rows)[1]
        return total

    @cached_property
    def _arrays(self) -> store.Arrays:
        return store.Arrays(self.folder)

    def _features(self, side: str, features: Sequence[SparseFeature], rows: np.ndarray) -> list[Ids]:
        single = self._arrays[f"{side}_ids"][rows]
        columns, taken = [], 0
        for feature in features:
            if feature.is_list:
                offsets = self._arrays[f"{side}_list.{feature.name}.offsets"]
                lengths = offsets[rows + 1] - offsets[rows]
                columns.append(
                    Ids(self._arrays[f"{side}_list.{feature.name}.ids"][ranges(offsets[rows], lengths)], lengths)
                )
            else:
                columns.append(Ids(single[:, taken]))
                taken += 1
        return columns

    def _events_of(self, event: EventType, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each row's events end, and how many of them it gets."""
        ends = self._arrays[f"history.{event.name}.ends"][rows]
        return ends, np.minimum(ends - self._arrays[f"history.{event.name}.starts"][rows], event.max_length)

    def _events(self, event: EventType, rows: np.ndarray) -> Events:
        name = f"history.{event.name}"
        ends, lengths = self._events_of(event, rows)
        picked = ranges(ends - lengths, lengths)
        ids = self._arrays[f"{name}.ids"][picked]
        return Events(list(ids.T), self._arrays[f"{name}.times"][picked], lengths)


def spec_from_dict(saved: dict, max_history: int) -> FeatureSpec:
    """The inverse of `dataclasses.asdict`, with the newest `max_history` events kept of each event type."""

    histories = [item | {"max_length": max_history} for item in saved["histories"]]
    return FeatureSpec.from_dict(saved | {"histories": histories})
