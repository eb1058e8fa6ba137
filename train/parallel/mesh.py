"""One mesh of all ranks with named axes: replicate x shard x expert.

    ddp    R x 1 x E    dense parameters whole on each of the R * E ranks
    fsdp   1 x S x E    sharded over the S * E ranks
    hsdp   R x S x E    sharded over S * E ranks, R copies

Experts lie along `expert` in each of them (E = 1: every rank has all), and what is left of a layer's experts is
treated along `replicate` and `shard` as dense parameters are. Ranks of one node are neighbours on the last axes.

Tables have a mesh of their own where groups of ranks hold copies of them: replicate x shard.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from train.config.schema import ParallelConfig
from train.process.distributed import World

log = logging.getLogger(__name__)
AXES = ("replicate", "shard", "expert")


@dataclass(frozen=True)
class Mesh:
    """The mesh of all ranks, and its parts that parameters are sharded over."""

    whole: DeviceMesh  # [replicate, shard, expert]
    dense: DeviceMesh | None  # [shard * expert] or [replicate, shard * expert]; None: dense parameters are replicated

    def size(self, axis: str) -> int:
        return self.whole[axis].size()

    @property
    def of_experts(self) -> DeviceMesh:
        """Over which what an expert rank holds is sharded, or replicated where the dense part is."""
        return self.whole["shard"] if self.size("replicate") == 1 else self.whole["replicate", "shard"]


def sizes(parallel: ParallelConfig, ranks: int, node_ranks: int) -> tuple[int, int, int]:
    """Ranks along replicate, shard and expert. ValueError where the ranks cannot be laid out as the keys say."""
    experts = max(1, parallel.expert_ranks)
    shards = {"ddp": experts, "fsdp": ranks, "hsdp": parallel.shard_ranks or node_ranks}[parallel.dense]
    if ranks % experts:
        raise ValueError(
            f"parallel.expert_ranks={experts} must divide the {ranks} ranks of this run, e.g. parallel.expert_ranks=1"
        )
    if ranks % shards:
        raise ValueError(
            f"parallel.shard_ranks={shards} must divide the {ranks} ranks of this run, e.g. "
            f"parallel.shard_ranks={ranks}"
        )
    if shards % experts:
        raise ValueError(
            f"parallel.expert_ranks={experts} must divide the {shards} ranks that share a copy of the dense part "
            f"(parallel.shard_ranks), e.g. parallel.expert_ranks={shards}"
        )
    return ranks // shards, shards // experts, experts


def build_mesh(parallel: ParallelConfig, world: World, timeout: float) -> Mesh | None:
    """The mesh of this run; None if nothing needs one: on one rank, or under DDP without expert parallelism.

    `timeout`: seconds that its collectives wait for the slowest rank.
    """
    if parallel.dense != "ddp" and world.size == 1:
        log.warning("parallel.dense=%s has no effect on a single rank, which holds all parameters", parallel.dense)
    sharded = parallel.dense != "ddp" and world.size > 1
    if not sharded and not parallel.expert_ranks:
        return None
    shape = sizes(parallel, world.size, world.local_size) if world.size > 1 else (1, 1, 1)
    grid = torch.arange(world.size).view(shape)
    log.info("mesh: %s", " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True)))
    whole = _mesh(grid, AXES, world, timeout)
    if not sharded:
        return Mesh(whole, None)
    if shape[0] == 1:
        return Mesh(whole, _mesh(grid.flatten(), ("shard",), world, timeout))
    return Mesh(whole, _mesh(grid.flatten(1), ("replicate", "shard"), world, timeout))


def table_ranks(parallel: ParallelConfig, ranks: int) -> int:
    """Ranks that share a copy of the tables. ValueError where the ranks cannot be laid out so."""
    share = parallel.table_ranks or ranks
    if ranks > 1 and ranks % share:
        raise ValueError(
            f"parallel.table_ranks={share} must divide the {ranks} ranks of this run, e.g. parallel.table_ranks={ranks}"
        )
    return min(share, ranks)


def table_mesh(parallel: ParallelConfig, world: World, timeout: float) -> DeviceMesh | None:
    """The mesh of the tables, [replicate, shard], of neighbouring ranks; None if all ranks share one copy of them.

    `timeout`: seconds that its collectives wait for the slowest rank.
    """
    share = table_ranks(parallel, world.size)
    if share == world.size:
        return None
    log.info("mesh of the tables: replicate %s x shard %s", world.size // share, share)
    return _mesh(torch.arange(world.size).view(-1, share), ("replicate", "shard"), world, timeout)


def _mesh(grid: Tensor, names: tuple[str, ...], world: World, timeout: float) -> DeviceMesh:
    """Ranks laid out as `grid`, with process groups of its own, since the backward has others' collectives, too."""
    groups = []
    for axis in range(grid.ndim):
        lines = grid.movedim(axis, -1).reshape(-1, grid.shape[axis]).tolist()
        own, _ = dist.new_subgroups_by_enumeration(lines, timeout=timedelta(seconds=timeout))
        groups.append(own)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], world.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, world.device.type, grid, mesh_dim_names=names)
