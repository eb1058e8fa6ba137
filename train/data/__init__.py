"""Data sources: files are prepared once into memory-mapped columns, from which batches of requests are gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from train.config.schema import DataConfig, EventsConfig, MovieLensConfig, SyntheticConfig
from train.data import events, movielens
from train.data.source import PreparedSource, Source
from train.data.storage import store
from train.data.synthetic import SyntheticSource

__all__ = ["PreparedSource", "Source", "SyntheticSource", "build_source"]


Maker = Callable[[Any, store.ByFirst], Source]


def _prepared(module: ModuleType) -> Maker:
    """Of files that `module.prepare(config, folder)` prepares into `module.cache_folder(config)`."""

    def make(config: DataConfig, by_first: store.ByFirst) -> Source:
        folder = module.cache_folder(config)
        store.prepare_once(folder, partial(module.prepare, config), by_first)
        return PreparedSource(folder, config.max_history)

    return make


MAKERS: dict[type[DataConfig], Maker] = {
    SyntheticConfig: lambda config, by_first: SyntheticSource(config),
    MovieLensConfig: _prepared(movielens),
    EventsConfig: _prepared(events),
}
"""How the source of each of `train.config.schema.SOURCES` is made."""


def build_source(config: DataConfig, by_first: store.ByFirst = lambda prepare: prepare()) -> Source:
    """The source that a configuration describes.

    Files are prepared in the function that `by_first` is given, unless the cache has them already; by default this
    process is alone. Raises ValueError for bad input, naming file and row.
    """
    make = next((MAKERS[kind] for kind in type(config).__mro__ if kind in MAKERS), None)
    if make is None:
        raise ValueError(f"data.name={config.name!r} is no source; use {', '.join(kind.name for kind in MAKERS)}")
    return make(config, by_first)
