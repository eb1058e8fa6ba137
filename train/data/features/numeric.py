"""Numeric features as a model gets them, the same for prepared files and for a request that is scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from modules.batch import VectorFeature

INDICATOR = ".missing"
"""Behind the name of a column: the feature that is 1 where its number is missing, else 0."""
AS_IT_IS = {"mean": 0.0, "std": 1.0}
"""Statistics of an indicator, which is not standardised."""


LARGEST = float(np.finfo(np.float32).max)
TOO_LARGE = (
    f"expected a number of at most {LARGEST:.2g} in size, which float32 can hold (data.log_numeric takes larger)"
)


def too_large(values: np.ndarray) -> np.ndarray:
    """[N] bool: numbers, finite in float64, that are not in float32. NaN is missing and not too large."""
    return np.abs(values) > LARGEST


def matching(names: Iterable[str], globs: Sequence[str]) -> list[str]:
    """The names that are among the globs or match one, in their order."""
    return [name for name in names if name in globs or any(fnmatchcase(name, glob) for glob in globs)]


def numeric_features(columns: Sequence[str], indicator_globs: Sequence[str]) -> tuple[str, ...]:
    """The numbers that a model gets of these columns: each one's own, then the indicators."""
    return (*columns, *(name + INDICATOR for name in matching(columns, indicator_globs)))


def before_scaling(values: np.ndarray, fill: float | None, logarithmic: bool) -> np.ndarray:
    """Numbers [N] float64 with `fill`, if there is one, where they are missing (NaN), then their signed logarithm."""
    if fill is not None:
        values = np.where(np.isnan(values), fill, values)
    return signed_log(values) if logarithmic else values


def signed_log(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.log1p(np.abs(values))


def scaled(values: np.ndarray, statistics: Mapping[str, float]) -> np.ndarray:
    """float32 (values - mean) / std, or std 1 where nothing varied; a missing value (NaN) becomes 0, the mean."""
    std = statistics["std"] if statistics["std"] > 0 else 1.0
    return np.nan_to_num((values - statistics["mean"]) / std, nan=0.0).astype(np.float32)


def scaled_vectors(
    values: np.ndarray, vector: VectorFeature, statistics: Mapping[str, Mapping[str, float]]
) -> np.ndarray:
    """float32 [N, width], each number by the statistics of its column, or as it is; a missing one (NaN) becomes 0."""
    if vector.name in statistics:
        return np.nan_to_num(values.astype(np.float32), nan=0.0)
    columns = [scaled(numbers, statistics[name]) for name, numbers in zip(vector.columns, values.T, strict=True)]
    return np.stack(columns, 1)
