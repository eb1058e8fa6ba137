"""Checkpoints of a run: which there are, whether this run may go on from one, and reading it.

DCP re-shards on load, so that another number of ranks can resume.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from modules.managed_local import OF_TRAINING
from train.checkpoint import manifest, moments
from train.checkpoint.manifest import DamagedError
from train.checkpoint.progress import META, Progress
from train.checkpoint.read import read, read_metadata
from train.checkpoint.state import model_state, optimizer_state, restore_rng, rng_state
from train.config.compose import from_dict
from train.config.environment import to_saved
from train.optim.dense import Optimizer
from train.parallel.managed import check_ranks
from train.process.distributed import World
from train.process.files import fault_of

log = logging.getLogger(__name__)
FIXED = {"data": ("name",), "optimizer": ("dense", "sparse", "accumulate", "frozen", "ema_decay")}
"""Keys that a resumed run may not change, besides all of model, precision and tasks."""


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run's checkpoint folder, oldest first."""
    return sorted(path for path in folder.glob("step_????????") if (path / META).exists())


def newest_intact(folder: Path, world: World) -> Path | None:
    """The newest checkpoint whose files are as they were written, None if there is no checkpoint.

    Newer ones that are damaged are warned of and renamed, so that they count as checkpoints no more. Raises
    `DamagedError` if all are.
    """
    damaged: dict[Path, DamagedError] = {}
    # A node of a shared file system may see a new folder later. A folder is renamed when it is whole: one without its
    # meta.json has lost it.
    whole = world.by_first(lambda: sorted(path for path in folder.glob("step_????????") if path.is_dir()))
    for path in reversed(whole):
        try:
            manifest.verify(path, world)
        except DamagedError as error:
            damaged[path] = error
            continue
        for newer, fault in damaged.items():
            aside = world.by_first(partial(_set_aside, newer))
            log.warning("%s. The run goes on from %s; the damaged one is now %s", fault, path.name, aside.name)
        return path
    for fault in damaged.values():
        raise fault
    return None


def intact_best(folder: Path, progress: Progress, world: World) -> Path | None:
    """The best checkpoint, None where the newest one or none is best.

    One that is damaged or lost is warned of and set aside, and the best of the validations whose checkpoints are whole
    takes its place in `progress`.
    """
    while progress.best_step not in (0, progress.step):
        path = folder / f"step_{progress.best_step:08d}"
        try:
            if not world.by_first(path.is_dir):
                raise DamagedError(path, "it is lost")
            manifest.verify(path, world)
        except DamagedError as error:
            fault = error
        else:
            return path
        progress.forget_best(world.by_first(partial(_steps_without, path)))
        best = f"step {progress.best_step} is best now" if progress.best_step else "none of the others was validated"
        log.warning("%s. It was the best in validation, and %s", fault, best)
    return None


def _steps_without(path: Path) -> set[int]:
    """Those of the checkpoints that are left when this one is set aside."""
    if path.is_dir():
        _set_aside(path)
    return {int(each.name.removeprefix("step_")) for each in checkpoints(path.parent)}


def _set_aside(path: Path) -> Path:
    aside = path.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that the newest one (whose `meta.json` can be read) names as best on validation, None without."""
    for newest in reversed(checkpoints(folder)):
        try:
            best = folder / f"step_{read_meta(newest)['progress']['best_step']:08d}"
        except DamagedError as error:
            log.warning("%s", error)
            continue
        if best.exists():
            return best
        if best.name != "step_00000000":
            log.warning("%s, the best in validation, is lost", best)
        return None
    return None


def named(run_dir: str, path: str) -> Path:
    """What a command's `checkpoint=` names, or the best checkpoint of its `run_dir=`, the newest if none was validated.

    Raises ValueError unless one of the two is named, the other empty, and when the run has no whole checkpoint.
    """
    if bool(run_dir) == bool(path):
        other = ", not both" if path else ""
        raise ValueError(f"name a run or one of its checkpoints: run_dir=RUN_DIR or checkpoint=PATH{other}")
    if path:
        return Path(path)
    folder = Path(run_dir) / "checkpoints"
    newest = checkpoints(folder)[-1:]
    if not newest:
        raise ValueError(f"{folder} holds no whole checkpoint; name a run that saved one, or checkpoint=PATH")
    return best_checkpoint(folder) or newest[0]


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint. ValueError when `path` is no checkpoint, `DamagedError` when it is a damaged one."""
    try:
        text = (path / META).read_text()
    except OSError as error:
        raise ValueError(
            f"{path} is not a readable checkpoint ({error}); expected one such as RUN_DIR/checkpoints/step_00000100"
        ) from error
    expected = manifest.read(path).get(META)
    if expected is not None and (fault := fault_of(path / META, expected)):
        raise DamagedError(path, fault)
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise DamagedError(path, f"{META}: {error}") from error
    kinds = {"config": dict, "progress": dict, "data_fingerprint": str}
    for key, kind in kinds.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(key), kind):
            raise DamagedError(path, f"{META} has no {key!r}")
    return meta


def check_data(path: Path, fingerprint: str) -> None:
    """ValueError if a checkpoint's ids or numbers were mapped differently from those of this run's data."""
    saved = read_meta(path)["data_fingerprint"]
    if saved != fingerprint:
        raise ValueError(
            f"{path} was trained on data with another vocabulary or other statistics (data_fingerprint {saved}, here "
            f"{fingerprint}), so its tables' rows mean other ids; use the same files, data.split and data.min_count, "
            "or for data=synthetic its keys and the version of gemsmith that trained it. A new run on other files of "
            "data=events goes on from it with checkpoint.load, its vocabulary added to by data.vocabulary_of=RUN_DIR"
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


def load(
    path: Path,
    model: DistributedModelParallel,
    optimizer: Optimizer | None,
    world: World,
    *,
    verified: bool = False,
) -> Progress:
    """Read all tensors in place, without an `optimizer` the weights to evaluate; returns where the saved run stood.

    `verified`: its checksums have just been compared. Raises ValueError when the checkpoint is another model's, and
    `DamagedError` when it cannot be read.
    """
    if not verified:
        manifest.verify(path, world)
    meta = read_meta(path)
    progress = Progress.of(path, meta["progress"])
    state = model_state(model)
    if optimizer is not None:
        state |= optimizer_state(model, optimizer.state_dict())
        state |= rng_state(world)
    saved = read_metadata(path)
    check_keys(path, state, saved)
    if optimizer is None:
        state = _averages(state, saved)
    take(path, state, model, world)
    if "rng" in state:
        restore_rng(state["rng"][str(world.rank)])
    return progress


def take(
    path: Path, state: dict[str, Any], model: DistributedModelParallel, world: World, planner: LoadPlanner | None = None
) -> None:
    """Read the tensors of `state`, of all or a part of the model, in place, and hand them to it and its tables.

    ValueError if these ranks cannot go on with managed tables of the saved ones.
    """
    check_ranks(path, model, read_meta(path).get("world_size", world.size), world.size)
    plain = moments.read_converted(path, state, read_metadata(path))
    read(path, plain, planner=planner, group=world.checkpoint_group)
    # Sharded dense tensors describe the model's own memory, which they have been read into.
    model.load_state_dict(model.state_dict() | {k: v for k, v in state["model"].items() if not isinstance(v, DTensor)})
    if "tables" in state:
        tables = {name: {} for name in model.fused_optimizer.params} | state["tables"]["state"]
        model.fused_optimizer.load_state_dict({"state": tables})


def load_weights(path: Path, model: nn.Module) -> None:
    """Read the weights to evaluate, into a model that is neither sharded nor wrapped, in a single process.

    Raises ValueError when the checkpoint cannot be read or is another model's.
    """
    state = {"model": model.state_dict()}
    manifest.verify_alone(path)
    saved = read_metadata(path)
    for name in [name for name in saved.state_dict_metadata if name.endswith(OF_TRAINING)]:
        del saved.state_dict_metadata[name]
    check_keys(path, state, saved)
    read(path, _averages(state, saved), alone=True)
    model.load_state_dict(state["model"])


def _averages(state: dict[str, Any], saved: Metadata) -> dict[str, Any]:
    """The same tensors, those of which the checkpoint has an average under the name of that."""
    averaged = {name for name in state["model"] if f"dense.{name}.average" in saved.state_dict_metadata}
    return {
        "model": {name: tensor for name, tensor in state["model"].items() if name not in averaged},
        "dense": {name: {"average": state["model"][name]} for name in averaged},
    }


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
