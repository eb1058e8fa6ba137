"""Whether a run may go on from a checkpoint: the same data, configuration and model."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from train.checkpoint.find import read_meta
from train.config.compose import from_dict
from train.config.environment import to_saved

log = logging.getLogger(__name__)
FIXED = {"data": ("name",), "optimizer": ("dense", "sparse", "accumulate", "frozen", "ema_decay")}
"""Keys that a resumed run may not change, besides all of model, precision and tasks."""


def check_data(path: Path, fingerprint: str, counts: dict[str, float] | None = None) -> None:
    """ValueError if a checkpoint's ids or numbers were mapped differently from those of this run's data.

    A warning if requests by split and label rates by task, `counts`, are others than those that were trained on.
    """
    meta = read_meta(path)
    saved, before = meta["data_fingerprint"], meta.get("data_counts", counts)
    if saved != fingerprint:
        raise ValueError(
            f"{path} was trained on data with another vocabulary or other statistics (data_fingerprint {saved}, here "
            f"{fingerprint}), so its tables' rows mean other ids; use the same files, data.split and data.min_count, "
            "or for data=synthetic its keys and the version of gemsmith that trained it. A new run on other files of "
            "data=events goes on from it with checkpoint.load, its vocabulary added to by data.vocabulary_of=RUN_DIR"
        )
    if counts is not None and json.dumps(before, sort_keys=True) != json.dumps(counts, sort_keys=True):
        log.warning(
            "the data are others than those of %s: requests and label rates were %s and are %s. What it has trained on "
            "and its validations are of the former; choose another runtime.run_dir to begin anew",
            *(path, before, counts),
        )


def check_config(path: Path, current: dict[str, Any], shown: dict[str, Any] | None = None) -> None:
    """ValueError if a resumed run has another model, data or optimiser; other differences are only logged.

    `shown`: what is told of the values, which do not include those of the environment; None: the values.
    """
    earlier = from_dict(read_meta(path)["config"], [])  # keys that are newer than the checkpoint have their defaults
    saved, shown_before, shown = dataclasses.asdict(earlier), to_saved(earlier), shown or current
    for group, values in current.items():
        for key in dict.fromkeys((*values, *saved.get(group, {}))):
            value, before = values.get(key), saved.get(group, {}).get(key)
            if before == value or (group, key) == ("runtime", "run_dir"):  # which may be relative, or have moved
                continue
            value, before = (each.get(group, {}).get(key) for each in (shown, shown_before))
            if group in ("model", "precision", "tasks") or key in FIXED.get(group, ()):
                raise ValueError(
                    f"{path} was written with {group}.{key}={before}, this run has {value}; "
                    f"resume with the same value or choose another runtime.run_dir"
                )
            log.warning("resuming with %s.%s=%s (was %s)", group, key, value, before)


def check_keys(path: Path, state: dict[str, Any], saved: Metadata, longer_tables: bool = False) -> None:
    """ValueError unless the checkpoint has this model; takes random states that it lacks out of `state`.

    `longer_tables`: the model's tables may have more rows. Random states belong to a rank and its devices.
    """
    entries = saved.state_dict_metadata
    found = list(differences(state["model"], saved, longer_tables).values())
    if found:
        raise ValueError(
            f"{path} holds another model: {'; '.join(found[:5])}"
            f"{f' and {len(found) - 5} more differences' if len(found) > 5 else ''}. "
            "Use the model and data options that are in its meta.json, or another runtime.run_dir."
        )
    if "rng" in state:
        ((rank, generators),) = state["rng"].items()
        if any(f"rng.{rank}.{name}" not in entries for name in generators):
            del state["rng"]


def differences(weights: dict[str, Any], saved: Metadata, longer_tables: bool = False) -> dict[str, str]:
    """By name, how the weights of a model and those that are saved differ; empty if they have the same names and sizes.

    `longer_tables`: more rows here are no difference.
    """
    entries = saved.state_dict_metadata.items()
    wanted = {f"model.{name}": tuple(value.size()) for name, value in weights.items()}
    stored = {name: tuple(getattr(entry, "size", ())) for name, entry in entries if name.startswith("model.")}
    found = {name: f"{name} is missing from it" for name in wanted if name not in stored}
    found |= {name: f"{name} is not in this model" for name in stored if name not in wanted}
    found |= {
        name: f"{name} is {list(stored[name])} there and {list(size)} here"
        for name, size in wanted.items()
        if name in stored
        and stored[name] != size
        and not (longer_tables and stored[name][1:] == size[1:] and stored[name][0] < size[0])
    }
    return {name.removeprefix("model."): difference for name, difference in found.items()}
