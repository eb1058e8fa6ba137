"""Configurations of `data=events` for rows of users, items, times and clicks, and the sources that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from modules.batch import RequestBatch
from train.config.schema import EventsConfig
from train.data import build_source
from train.data.source import PreparedSource, Source
from train.data.synthetic import SyntheticSource, _below, _bits


def events_config(folder: Path, **settings: Any) -> EventsConfig:
    """Of rows.parquet in a folder, if `settings` do not say otherwise."""
    usual: dict[str, Any] = {
        "root": str(folder), "cache_dir": str(folder / "cache"), "files": ["rows.parquet"], "user": "user",
        "time": "time", "labels": {"click": "click"}, "request_categorical": ["user"],
        "candidate_categorical": ["item"], "statistics": "none",
    }  # fmt: skip
    return EventsConfig(**usual | settings)


def source_of(config: EventsConfig) -> PreparedSource:
    source = build_source(config)
    assert isinstance(source, PreparedSource)
    return source


def whole(source: Source, split: str = "train") -> RequestBatch:
    """A split as one batch."""
    return source.batch(split, np.arange(source.num_requests(split)))


class JitteredSource(SyntheticSource):
    """Whose requests have 0 to `data.candidates` candidates."""

    def _counts(self, key: np.ndarray) -> np.ndarray:
        return _below(_bits(key, "count"), self.config.candidates + 1)
