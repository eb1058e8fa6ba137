"""Data sources: files are prepared once into memory-mapped columns, from which batches of requests are gathered."""

from __future__ import annotations

from functools import partial

from train.config.schema import DataConfig, EventsConfig, MovieLensConfig, SyntheticConfig
from train.data import events, movielens
from train.data.source import PreparedSource, Source
from train.data.storage import store
from train.data.synthetic import SyntheticSource

__all__ = ["PreparedSource", "Source", "SyntheticSource", "build_source"]


def build_source(config: DataConfig, by_first: store.ByFirst = lambda prepare: prepare()) -> Source:
    """The source that a configuration describes.

    Files are prepared in the function that `by_first` is given, unless the cache has them already; by default this
    process is alone. Raises ValueError for bad input, naming file and row.
    """
    if isinstance(config, SyntheticConfig):
        return SyntheticSource(config)
    if isinstance(config, MovieLensConfig):
        folder, prepare = movielens.cache_folder(config), partial(movielens.prepare, config)
    elif isinstance(config, EventsConfig):
        folder, prepare = events.cache_folder(config), partial(events.prepare, config)
    else:
        raise ValueError(f"data.name={config.name!r} is no source; use movielens, events or synthetic")
    store.prepare_once(folder, prepare, by_first)
    return PreparedSource(folder, config.max_history)
