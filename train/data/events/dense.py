"""Numeric features of labelled rows: what training rows say of them, and how they are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modules.batch import VectorFeature
from train.config.schema import EventsConfig
from train.data.events.names import logarithmic, numeric, vectors
from train.data.features.exact import Moments
from train.data.features.numeric import AS_IT_IS, INDICATOR, before_scaling, matching, scaled, scaled_vectors
from train.data.statistics import describe

Statistics = dict[str, dict[str, float]]


class Numbers:
    """Statistics of the training rows, seen in any parts and any order."""

    def __init__(self, config: EventsConfig) -> None:
        self.config = config
        names = [*numeric(config), *describe.all_features(config)]
        self._moments = {name: Moments() for name in names}
        self._vectors = {name: VectorFeature(name, each.width) for name, each in vectors(config).items()}
        self._standard = [name for name, each in vectors(config).items() if each.scale == "standard"]
        of_vectors = [column for name in self._standard for column in self._vectors[name].columns]
        self._moments |= {column: Moments() for column in of_vectors}
        self._missing = dict.fromkeys([*names, *self._vectors], 0)
        self._rows = 0

    def train(self, columns: Mapping[str, np.ndarray]) -> None:
        """Numbers [N] and vectors [N, width] of training rows by column, NaN where they are missing."""
        for name, values in columns.items():
            if name not in self._vectors:
                self._moments[name].add(_read(self.config, name, values))
            elif name in self._standard:
                for column, numbers in zip(self._vectors[name].columns, values.T, strict=True):
                    self._moments[column].add(numbers.astype(np.float64))
            self._missing[name] += int(np.count_nonzero(np.isnan(values if values.ndim == 1 else values[:, 0])))
        self._rows += len(next(iter(columns.values()), ()))

    def statistics(self, earlier: Mapping[str, dict[str, float]]) -> Statistics:
        """Mean, std and fill by feature; of an `earlier` run where it has them."""
        used: Statistics = {}
        for name, moments in self._moments.items():
            used[name] = earlier.get(name) or {"mean": moments.mean(), "std": moments.std()}
            if name in self.config.missing_fill:
                used[name] = used[name] | {"fill": self.config.missing_fill[name]}
        indicators = matching(numeric(self.config), self.config.missing_indicator)
        used |= {name: AS_IT_IS for name in self._vectors if name not in self._standard}
        return used | {name + INDICATOR: AS_IT_IS for name in indicators}

    def missing(self) -> dict[str, float]:
        """Share of the training rows without a number."""
        return {name: count / max(self._rows, 1) for name, count in self._missing.items()}


def dense(
    config: EventsConfig,
    names: Sequence[str],
    columns: Mapping[str, np.ndarray],
    rows: int,
    statistics: Statistics,
    vectors: Sequence[VectorFeature] = (),
) -> np.ndarray:
    """[rows, columns] float32: numbers [rows] by column, scaled, and the indicators of missing ones; then vectors."""
    features = np.zeros((rows, len(names)), np.float32)
    for index, name in enumerate(names):
        if name in columns:
            features[:, index] = scaled(_read(config, name, columns[name]), statistics[name])
        else:
            features[:, index] = np.isnan(columns[name.removesuffix(INDICATOR)])
    return np.concatenate([features, *(scaled_vectors(columns[each.name], each, statistics) for each in vectors)], 1)


def _read(config: EventsConfig, name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)  # of statistics, which are float32 until then
    return before_scaling(values, config.missing_fill.get(name), name in logarithmic(config))
