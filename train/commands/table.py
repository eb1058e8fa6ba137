"""Training on tables in memory, from a notebook or a program: `fit(frame, user=..., labels=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config.compose import to_config
from train.config.files import composed, merge_error
from train.config.schema import EventsConfig
from train.data.storage.tables import keep_table
from train.process import distributed
from train.trainer import Trainer


def fit(
    table: Any, *overrides: str, run_dir: str | Path, valid: Any = None, test: Any = None, **data: Any
) -> dict[str, Any]:
    """Train on labelled rows in one process, and return what the run's `results.json` holds.

    table, and `valid` and `test` where these splits have rows of their own: see
    `train.data.storage.tables.keep_table`. `data` has the keys of `train.config.schema.EventsConfig` but for the files,
    as `user="user_id"` and `labels={"click": "clicked"}`; `overrides` are those of the command line, as "model=din" and
    "runtime.epochs=2". Everything else is as with `train/main.py data=events`: a run directory that holds a run is
    resumed, and `train.evaluate` and the other commands take it. Raises ValueError for keys and rows that are wrong.
    """
    chosen = [] if any(override.startswith("data=") for override in overrides) else ["data=events"]
    whole = composed([*chosen, *overrides])
    folder = (Path(data.get("cache_dir", whole.data.cache_dir)) / "tables").resolve()
    tables = {"files": table, "valid_files": valid, "test_files": test}
    if named := sorted(tables.keys() & data.keys()):
        raise ValueError(f"{named[0]}={data[named[0]]} has rows of its own; give them as table, valid= or test=")
    kept = {key: [str(keep_table(each, folder))] for key, each in tables.items() if each is not None}
    whole.runtime.run_dir = str(run_dir)
    schema, chosen_data = OmegaConf.structured(EventsConfig), OmegaConf.to_container(whole.data)
    try:
        whole.data = OmegaConf.merge(schema, chosen_data, data | kept)
    except OmegaConfBaseException as error:
        raise ValueError(merge_error(error, str(error), "data")) from None
    config = to_config(whole)
    world = distributed.start(config.runtime)
    try:
        return Trainer(config, world).run()
    finally:
        distributed.stop()
