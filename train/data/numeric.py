"""Numeric features as a model sees them, of prepared files as of a request that is to be scored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def signed_log(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.log1p(np.abs(values))


def scaled(values: np.ndarray, statistics: Mapping[str, float]) -> np.ndarray:
    """float32 (values - mean) / std, by 1 where nothing varied; a missing value (NaN) becomes 0, which is the mean."""
    std = statistics["std"] if statistics["std"] > 0 else 1.0
    return np.nan_to_num((values - statistics["mean"]) / std, nan=0.0).astype(np.float32)
