"""Copies of the tables: groups of neighbouring ranks each hold all tables, and their copies are averaged now and then.

Within a group tables are sharded as they would be over all ranks, so that looked-up rows travel between fewer ranks.
Copies differ between two averages, by the gradients of their groups. This is the two-dimensional parallelism of
TorchRec's `DMPCollection`, with its environment (`ShardingEnv2D`): the class itself runs on GPUs only, and saves tables
as tensors that other layouts cannot read.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
)

from train.process.distributed import World


def environment(mesh: DeviceMesh | None) -> ShardingEnv:
    """Where TorchRec shards tables: over all ranks, or over `shard` of a mesh [replicate, shard]."""
    everyone = dist.group.WORLD
    assert everyone is not None
    if mesh is None:
        return ShardingEnv.from_process_group(everyone)
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    env = ShardingEnv2D(*groups, everyone, mesh, use_inter_host_allreduce=True)
    env.output_dtensor = False  # DCP writes a ShardedTensor, which copies of it have alike, as without groups
    return env


def of_group(plan: ShardingPlan, mesh: DeviceMesh, world: World) -> ShardingPlan:
    """The plan of a group's ranks 0, 1, ... for the ranks of this rank's group."""
    first = world.rank - mesh.get_local_rank("shard")
    plan = copy.deepcopy(plan)
    for collection in plan.plan.values():
        for table in cast(EmbeddingModuleShardingPlan, collection).values():
            table.ranks = [first + rank for rank in table.ranks or ()]
            spec = table.sharding_spec
            for shard in spec.shards if isinstance(spec, EnumerableShardingSpec) else ():
                assert isinstance(shard.placement, _remote_device)
                rank = first + cast(int, shard.placement.rank())
                index = rank % world.local_size
                device = f"cuda:{index}" if world.device.type == "cuda" else world.device.type
                shard.placement = _remote_device(f"rank:{rank}/{device}")
    return plan


class TableCopies:
    """The tables of `model` and their optimiser's state, as this rank shares them with those of other groups."""

    def __init__(self, model: DistributedModelParallel, mesh: DeviceMesh, frozen: Collection[str]) -> None:
        self._group, self._count = mesh.get_group("replicate"), mesh["replicate"].size()
        self._tensors = list(_parts(model, frozen))

    def average(self) -> None:
        """Make all copies their mean, weights and state, the same bits on all ranks. Waits for all groups."""
        works = [dist.all_reduce(part, group=self._group, async_op=True) for part in self._tensors]
        for work in works:
            work.wait()
        if self._tensors:
            torch._foreach_div_(self._tensors, self._count)


def _parts(model: DistributedModelParallel, frozen: Collection[str]) -> Iterator[Tensor]:
    optimizer = model.fused_optimizer
    for name, weight in optimizer.params.items():
        if name in frozen:
            continue
        for tensor in (weight, *optimizer.state[weight].values()):
            assert isinstance(tensor, ShardedTensor)
            yield from (shard.tensor.detach() for shard in tensor.local_shards())
