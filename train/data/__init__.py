"""Data sources: files are prepared once into memory-mapped columns, from which batches of requests are gathered."""

from __future__ import annotations

from functools import partial

from train.config.schema import DataConfig, EventsConfig, MovieLensConfig, SyntheticConfig
from train.data import events, movielens, store
from train.data.source import PreparedSource, Source
from train.data.synthetic import SyntheticSource

__all__ = ["PreparedSource", "Source", "SyntheticSource", "build_source"]


def build_source(cfg: DataConfig, by_first: store.ByFirst = lambda prepare: prepare()) -> Source:
    """The source that a configuration describes.

    Files are prepared in the function that `by_first` is given, unless the cache has them already; by default this
    process is alone. Raises ValueError for bad input, naming file and row.
    """
    if isinstance(cfg, SyntheticConfig):
        return SyntheticSource(cfg)
    if isinstance(cfg, MovieLensConfig):
        folder, prepare = movielens.cache_folder(cfg), partial(movielens.prepare, cfg)
    elif isinstance(cfg, EventsConfig):
        folder, prepare = events.cache_folder(cfg), partial(events.prepare, cfg)
    else:
        raise ValueError(f"data.name={cfg.name!r} is no source; use movielens, events or synthetic")
    store.prepare_once(folder, prepare, by_first, cfg.verify_cache)
    return PreparedSource(folder, cfg.max_history)
