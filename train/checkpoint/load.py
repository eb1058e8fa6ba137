"""Reading a checkpoint into a model and its optimisers, and all that commands ask of checkpoints.

DCP re-shards on load, so that another number of ranks can resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from modules.layers.embedding.managed_local import OF_TRAINING
from train.checkpoint import manifest, moments
from train.checkpoint.compatible import check_config, check_data, check_keys, differences
from train.checkpoint.find import best_checkpoint, checkpoints, intact_best, newest_intact, read_meta, resolve
from train.checkpoint.progress import Progress
from train.checkpoint.read import read, read_metadata
from train.checkpoint.state import model_state, optimizer_state, restore_rng, rng_state
from train.optim.dense import Optimizer
from train.parallel.managed import check_ranks
from train.process.distributed import World

__all__ = [
    "best_checkpoint",
    "check_config",
    "check_data",
    "check_keys",
    "checkpoints",
    "differences",
    "intact_best",
    "load",
    "load_weights",
    "newest_intact",
    "read_meta",
    "resolve",
    "take",
]


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
