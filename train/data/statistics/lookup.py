"""Statistics of requests that are scored, from the counters that a run has kept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

from train.config.schema import EventsConfig
from train.data.features import mapping
from train.data.features.transforms import Columns
from train.data.statistics import describe, store
from train.data.statistics.groups import Base, Group
from train.data.statistics.values import combined, hashed


class Lookup:
    """Numbers of rows by the counters in a run directory or an export, all of which count as earlier than a request."""

    def __init__(self, folder: Path, data: Mapping[str, Any], statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """data: the configuration of the run's data, of which `statistics` were made."""
        names = ("user", "request_categorical", "labels")
        self._config = EventsConfig(statistics=statistics, **{name: data[name] for name in names})
        self.logarithmic = {name for name, log in describe.all_features(self._config).items() if log}
        self._wanted: dict[str, set[str]] = {
            side: {*describe.of_side(self._config, side)} for side in get_args(describe.Side)
        }
        base, counters = Base(self._config), folder / mapping.COUNTERS
        self._groups = []
        if statistics:
            self._prior = store.read_prior(counters, base.tasks)
        for number, (name, each) in enumerate(describe.statistics(self._config).items()):
            group = Group(base, name, each)
            self._groups.append((group, store.read(counters, number, group)))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def of(self, side: describe.Side, columns: Columns, seconds: np.ndarray) -> dict[str, np.ndarray]:
        """[N] float64 by feature of that side, NaN where nothing is known, of rows that are asked at a second each."""
        wanted, found = self._wanted[side], dict[str, np.ndarray]()
        hashes = cache(lambda name: hashed(columns.ids(name), {}))
        for group, state in self._groups:
            names = list(describe.features(group.name, group.each))
            if names[0] in wanted:
                key, known = combined([hashes(name) for name in group.each.by])
                values = group.at(state, key, seconds, self._prior)
                values[~known] = np.nan
                found |= {name: values[:, index].astype(np.float64) for index, name in enumerate(names)}
        return found
