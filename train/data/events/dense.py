"""Numeric features of labelled rows: what training rows say of them, and how they are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from train.config.schema import EventsConfig
from train.data.events.names import numeric
from train.data.exact import Moments
from train.data.numeric import AS_IT_IS, INDICATOR, before_scaling, matching, scaled

Statistics = dict[str, dict[str, float]]


class Numbers:
    """Statistics of the training rows, seen in any parts and any order."""

    def __init__(self, config: EventsConfig) -> None:
        self.config = config
        self._moments = {name: Moments() for name in numeric(config)}
        self._missing = dict.fromkeys(numeric(config), 0)

    def train(self, columns: Mapping[str, np.ndarray]) -> None:
        """Numbers [N] of training rows by column, NaN where they are missing."""
        for name, values in columns.items():
            self._moments[name].add(_read(self.config, name, values))
            self._missing[name] += int(np.count_nonzero(np.isnan(values)))

    def statistics(self, earlier: Mapping[str, dict[str, float]]) -> Statistics:
        """Mean, std and fill by feature; of an `earlier` run where it has them."""
        used: Statistics = {}
        for name, moments in self._moments.items():
            used[name] = earlier.get(name) or {"mean": moments.mean(), "std": moments.std()}
            if name in self.config.missing_fill:
                used[name] = used[name] | {"fill": self.config.missing_fill[name]}
        indicators = matching(self._moments, self.config.missing_indicator)
        return used | {name + INDICATOR: AS_IT_IS for name in indicators}

    def missing(self) -> dict[str, float]:
        """Share of the training rows without a number."""
        return {name: count / max(self._moments[name].rows, 1) for name, count in self._missing.items()}


def dense(
    config: EventsConfig, names: Sequence[str], columns: Mapping[str, np.ndarray], rows: int, statistics: Statistics
) -> np.ndarray:
    """[rows, names] float32: numbers [rows] by column, scaled, and the indicators of missing ones."""
    features = np.zeros((rows, len(names)), np.float32)
    for index, name in enumerate(names):
        if name in columns:
            features[:, index] = scaled(_read(config, name, columns[name]), statistics[name])
        else:
            features[:, index] = np.isnan(columns[name.removesuffix(INDICATOR)])
    return features


def _read(config: EventsConfig, name: str, values: np.ndarray) -> np.ndarray:
    return before_scaling(values, config.missing_fill.get(name), name in config.log_numeric)
