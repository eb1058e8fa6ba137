"""Checkpoints of the whole training state, written with DCP into a temporary folder that is renamed when it is whole.

A checkpoint folder `step_00000100` holds the sharded tensors (dense and table weights, both optimisers, random states),
`meta.json` (step, data position, configuration, plan, versions, tracker state) and `manifest.json` (checksums). DCP
re-shards on load, so another number of ranks can resume from it. Old checkpoints are deleted after a new one is whole.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from train.checkpoint import manifest, moments
from train.checkpoint.manifest import DamagedError
from train.checkpoint.read import read, read_metadata
from train.config.compose import from_dict
from train.optim.dense import Optimizer
from train.parallel.layout import described, layouts
from train.process.distributed import World
from train.process.files import fault_of, room, write_json

log = logging.getLogger(__name__)
META = "meta.json"
FIXED = {"data": ("name",), "optimizer": ("dense", "sparse", "accumulate", "frozen", "ema_decay")}
"""Keys that a resumed run may not change, besides all of model, precision and tasks."""


@dataclass
class Progress:
    """How far a run is. `consumed` counts requests of this epoch over all ranks, so another world size can resume."""

    step: int = 0  # micro-batches
    epoch: int = 0
    consumed: int = 0
    best_ne: float | None = None  # of the validations so far
    best_step: int = 0
    best_values: dict[str, float] = field(default_factory=dict)
    stale_validations: int = 0
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and NE of each
    skipped_steps: int = 0  # because a loss or gradient was not finite
    tokens_per_expert: list[int] = field(default_factory=list)  # of all routers and ranks since the last dense step
    adapter: list[float] = field(default_factory=list)  # of a teacher, see train.distill
    tracker: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, saved: dict[str, Any]) -> Progress:
        """What the `meta.json` of the checkpoint `path` says. Raises `DamagedError` for what no run has written."""
        begun = vars(cls())
        for name, value in saved.items():
            if name not in begun:
                raise DamagedError(path, f"{META} has the unknown progress.{name}={value!r}")
            like = begun[name]  # all but best_ne have a value of their kind
            if like is not None and (type(value) is not type(like) or (isinstance(value, int) and value < 0)):
                raise DamagedError(path, f"{META} has progress.{name}={value!r}, expected one like {like!r}")
        progress = cls(**saved)
        values = progress.best_values.items()
        progress.best_values = {name: math.nan if value is None else value for name, value in values}
        return progress

    def steps_left(self, num_requests: int, global_batch: int, epochs: int) -> int:
        """Micro-batches from here to the end of the last epoch."""
        if self.epoch >= epochs:
            return 0
        whole = -(-num_requests // global_batch)
        return -(-(num_requests - self.consumed) // global_batch) + (epochs - self.epoch - 1) * whole

    def judge(
        self,
        values: dict[str, float],
        label_rates: dict[str, float],
        shares: dict[str, float],
        others: Mapping[str, tuple[str, bool]] | None = None,
    ) -> None:
        """Note a validation: best is the smallest NE, mean by `shares` over the tasks that can have one.

        `label_rates` are those of binary tasks; `others` says of the rest which metric stands for NE, and whether a
        larger one is better, which counts as 1 minus the metric.
        A task has no NE without observed labels in the validation split, or with labels of only one class in the
        training split. If no task has one, no checkpoint is best and none counts as worse. The NE of weights that are
        not finite is NaN, which is never best.
        """
        counted = {
            task: shares[task]
            for task, rate in label_rates.items()
            if 0 < rate < 1 and shares[task] and not math.isnan(values[f"{task}/label_rate"])
        }
        losses = {task: values[f"{task}/ne"] for task in counted}
        for task, (name, larger) in (others or {}).items():
            value = values[f"{task}/{name}"]
            if shares[task] and not math.isnan(value):  # labels without an order or a spread have no such metric
                counted[task], losses[task] = shares[task], 1 - value if larger else value
        if not counted:
            return
        ne = sum(share * losses[task] for task, share in counted.items()) / sum(counted.values())
        if math.isfinite(ne):
            self.validations.append((self.step, ne))
        if math.isfinite(ne) and (self.best_ne is None or ne < self.best_ne):
            self.best_ne, self.best_step, self.stale_validations = ne, self.step, 0
            self.best_values = values
        else:
            self.stale_validations += 1


class Checkpointer:
    """Saves to and loads from `folder`; one save is in flight at a time."""

    def __init__(self, folder: Path, keep: int, asynchronous: bool, world: World) -> None:
        self.folder, self.keep, self.asynchronous, self.world = folder, keep, asynchronous, world
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(
        self, model: DistributedModelParallel, optimizer: Optimizer, progress: Progress, about: dict[str, Any]
    ) -> Path:
        """Save the whole state; asynchronously, the tensors are copied now and written while training goes on."""
        self.wait()
        path = self.folder / f"step_{progress.step:08d}"
        aside = path.with_suffix(".partial")
        self.world.by_first(lambda: self._begin(aside, {"progress": vars(progress), **about}))
        state = {**model_state(model), **optimizer_state(model, optimizer.state_dict()), **_rng_state(self.world)}
        # DCP's own asynchronous save cannot stage ShardedTensors, so the copy is made here.
        state = _host_copy(state, self.world)
        self._pending = self._thread.submit(self._write, state, path, aside)
        if not self.asynchronous:
            self.wait()
        return path

    def _begin(self, aside: Path, about: dict[str, Any]) -> None:
        for left in self.folder.glob("step_*.partial"):  # left by a process that was killed or ran out of space
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        write_json(aside / META, about)

    def _write(self, state: dict[str, Any], path: Path, aside: Path) -> None:
        try:
            _write_files(aside, state, self.world)
        except CheckpointException as error:  # a BaseException: torchrun's error file would not have it
            reasons = "; ".join(f"rank {rank}: {reason!r}" for rank, (reason, _) in error.failures.items())
            raise RuntimeError(
                f"{path.name} could not be written ({reasons}); {room(self.folder)}. Started again "
                f"with the same runtime.run_dir, the run goes on from its newest whole checkpoint"
            ) from error
        # Rank 0 returns once all ranks have written, metadata and manifest too, so the folder is whole.
        if self.world.is_first:
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
            self._prune()

    def check(self) -> None:
        """Raise the error that ended the save in flight, if there is one."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Until the save in flight, if any, is whole under its final name."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self.world.barrier()

    def _prune(self) -> None:
        best = best_checkpoint(self.folder)
        for old in checkpoints(self.folder)[: -self.keep]:
            if old != best:
                shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run's checkpoint folder, oldest first."""
    return sorted(path for path in folder.glob("step_????????") if (path / META).exists())


def newest_intact(folder: Path, world: World) -> Path | None:
    """The newest checkpoint whose files are as they were written, None if there is no checkpoint.

    Newer ones that are damaged are warned of and renamed, so that they count as checkpoints no more. Raises
    `DamagedError` if all are.
    """
    damaged: dict[Path, DamagedError] = {}
    whole = world.broadcast(checkpoints(folder))  # a node of a shared file system may see a new folder later
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
        return best if best.exists() else None
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


def of_first_rank(path: Path | None, world: World) -> Path | None:
    """The first rank's `path`, on all ranks: one node of a shared file system may see a new folder before others."""
    return world.broadcast(path)


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


def check_config(path: Path, current: dict[str, Any]) -> None:
    """ValueError if a resumed run has another model, data or optimiser; other differences are only logged."""
    # Keys that are newer than the checkpoint have their defaults.
    saved = dataclasses.asdict(from_dict(read_meta(path)["config"], []))
    for group, values in current.items():
        for key in dict.fromkeys((*values, *saved.get(group, {}))):
            value, before = values.get(key), saved.get(group, {}).get(key)
            if before == value or (group, key) == ("runtime", "run_dir"):  # which may be relative, or have moved
                continue
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
        state |= _rng_state(world)
    saved = read_metadata(path)
    check_keys(path, state, saved)
    if optimizer is None:
        state = _averages(state, saved)
    take(path, state, model, world)
    if "rng" in state:
        _restore_rng(state["rng"][str(world.rank)])
    return progress


def take(
    path: Path, state: dict[str, Any], model: DistributedModelParallel, world: World, planner: LoadPlanner | None = None
) -> None:
    """Read the tensors of `state`, of all or a part of the model, in place, and hand them to it and its tables."""
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
    check_keys(path, state, saved)
    read(path, _averages(state, saved), alone=True)
    model.load_state_dict(state["model"])


def save_weights(path: Path, model: DistributedModelParallel, world: World, about: dict[str, Any]) -> None:
    """Write a checkpoint of only the weights, for runs that start from the same ones (`checkpoint.load`)."""

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / META, {"progress": vars(Progress()), **about})

    world.by_first(begin)
    _write_files(path, model_state(model), world)
    world.barrier()


def _write_files(path: Path, state: dict[str, Any], world: World) -> None:
    """Write the tensors and, last, the manifest of a folder that has its `meta.json`."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = files = manifest.SummedFiles()
    dcp.save(state, storage_writer=writer, process_group=world.checkpoint_group)
    manifest.write(path, files, (META,), world)


def model_state(model: DistributedModelParallel) -> dict[str, Any]:
    """All weights; those of sharded parameters as DTensors of the whole."""
    return {"model": described(model.state_dict(), layouts(get_unwrapped_module(model)))}


def _averages(state: dict[str, Any], saved: Metadata) -> dict[str, Any]:
    """The same tensors, those of which the checkpoint has an average under the name of that."""
    averaged = {name for name in state["model"] if f"dense.{name}.average" in saved.state_dict_metadata}
    return {
        "model": {name: tensor for name, tensor in state["model"].items() if name not in averaged},
        "dense": {name: {"average": state["model"][name]} for name in averaged},
    }


def optimizer_state(model: DistributedModelParallel, dense: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """The fused optimiser's state beside that of the `dense` one."""
    moments = {name: each for name, each in model.fused_optimizer.state_dict()["state"].items() if each}
    # An empty mapping, of tables under SGD, is written by the first rank alone: another one would not find its own.
    return {"dense": dense} | ({"tables": {"state": moments}} if moments else {})


def _rng_state(world: World) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return {"rng": {str(world.rank): state}}


def _host_copy(value: Any, world: World) -> Any:
    """A copy in host memory, which training does not change while it is written."""
    if isinstance(value, dict):
        return {key: _host_copy(item, world) for key, item in value.items()}
    if isinstance(value, list):
        return [_host_copy(item, world) for item in value]
    if isinstance(value, ShardedTensor) and world.device.type == "cuda":
        return value.cpu(process_group=world.checkpoint_group)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().cpu()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


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
