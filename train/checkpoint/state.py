"""What a checkpoint holds of a run: tensors by name, those of sharded parameters as DTensors of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from train.parallel.layout import described, layouts
from train.process.distributed import World


def model_state(model: DistributedModelParallel) -> dict[str, Any]:
    """All weights; those of sharded parameters as DTensors of the whole."""
    return {"model": described(model.state_dict(), layouts(get_unwrapped_module(model)))}


def optimizer_state(model: DistributedModelParallel, dense: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """The fused optimiser's state beside that of the `dense` one."""
    moments = {name: each for name, each in model.fused_optimizer.state_dict()["state"].items() if each}
    # An empty mapping, of tables under SGD, is written by the first rank alone: another one would not find its own.
    return {"dense": dense} | ({"tables": {"state": moments}} if moments else {})


def rng_state(world: World) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return {"rng": {str(world.rank): state}}


def restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def host_copy(value: Any, world: World) -> Any:
    """A copy in host memory, which training does not change while it is written."""
    if isinstance(value, dict):
        return {key: host_copy(item, world) for key, item in value.items()}
    if isinstance(value, list):
        return [host_copy(item, world) for item in value]
    if isinstance(value, ShardedTensor) and world.device.type == "cuda":
        return value.cpu(process_group=world.checkpoint_group)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().cpu()
    return value.detach().clone() if isinstance(value, Tensor) else value
