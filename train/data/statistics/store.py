"""Counters after all rows of a run, kept beside its vocabulary: further files and requests go on from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.data.statistics.counters import Counters
from train.data.statistics.groups import PAIR, Group, State
from train.data.statistics.values import Prior
from train.process.files import write_json

PRIOR = "prior.json"


def write(folder: Path, number: int, state: State) -> None:
    """Append to the counters of the statistic of that number; keys must rise from call to call."""
    for index, each in enumerate(state.counters):
        records = np.zeros(len(each.key), _record(each.count.shape[1]))
        for name in ("key", "last", "count", "carry"):
            records[name] = getattr(each, name)
        with (folder / f"{number}.{index}.counters").open("ab") as file:
            records.tofile(file)
    for index, pairs in enumerate(state.pairs):
        with (folder / f"{number}.{index}.pairs").open("ab") as file:
            pairs.tofile(file)


def read(folder: Path, number: int, group: Group) -> State:
    """Memory-mapped, but for the keys of counters."""
    none = group.none()
    counters = []
    for index, each in enumerate(none.counters):
        records = _mapped(folder / f"{number}.{index}.counters", _record(each.count.shape[1]))
        key = np.ascontiguousarray(records["key"])  # in memory, for it is searched
        counters.append(Counters(key, *(records[name] for name in ("last", "count", "carry"))))
    return State(counters, [_mapped(folder / f"{number}.{index}.pairs", PAIR) for index, _ in enumerate(none.pairs)])


def write_prior(folder: Path, prior: Prior) -> None:
    write_json(folder / PRIOR, {"hours": prior.hours.tolist(), "counts": prior.counts.tolist()})


def read_prior(folder: Path, tasks: Sequence[str]) -> Prior:
    if not (folder / PRIOR).exists():
        raise ValueError(f"{folder} holds no {PRIOR}; the counters of a run stand beside its vocabulary: copy both")
    saved = json.loads((folder / PRIOR).read_text())
    hours = np.array(saved["hours"], np.int64)
    return Prior(tasks, hours, np.array(saved["counts"], np.int64).reshape(len(hours), len(tasks), 2))


def _record(width: int) -> np.dtype:
    return np.dtype([("key", "<u8"), ("last", "<i8"), ("count", "<i8", (width,)), ("carry", "<f8", (width,))])


def _mapped(file: Path, record: np.dtype) -> np.ndarray:
    return np.memmap(file, record, "r") if file.stat().st_size else np.zeros(0, record)
