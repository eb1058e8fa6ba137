"""Embedding tables: fused optimiser, sharding plan, DistributedModelParallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim import SGD, Adam, RowWiseAdagrad

from modules.models.ranking import RankingModel
from train.config import Config
from train.distributed import World

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"rowwise_adagrad": RowWiseAdagrad, "adam": Adam, "sgd": SGD}
CPU_OPTIMIZERS = ("rowwise_adagrad", "sgd")  # what FBGEMM fuses there
GIB = 2**30


class _Alone(DataParallelWrapper):
    """One rank has nobody to average gradients with: DDP would only scale and copy each of them."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


def shard(model: RankingModel, config: Config, world: World) -> tuple[DistributedModelParallel, ShardingPlan]:
    """Give the tables their optimiser, plan their shards and materialise this rank's.

    The optimiser runs inside the backward, so no gradient of a table is ever held. No process allocates a whole table:
    `model.embedding` is on `meta` until here.
    """
    if world.device.type == "cpu" and config.optimizer.sparse not in CPU_OPTIMIZERS:
        raise ValueError(
            f"optimizer.sparse={config.optimizer.sparse} has no fused CPU kernel; use optimizer.sparse=rowwise_adagrad"
        )
    tables = list(model.embedding.collection.parameters())
    optimizer = config.optimizer
    apply_optimizer_in_backward(OPTIMIZERS[optimizer.sparse], tables, {"lr": optimizer.sparse_lr})
    # The generic parameter of ModuleSharder is invariant, hence the annotation.
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingCollectionSharder()]
    plan = _plan(model, sharders, config, world)
    # Shards of one table live on several ranks: equal seeds would start them equal.
    torch.manual_seed(config.runtime.seed * 1_000_003 + world.rank)
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=world.device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=_Alone() if world.size == 1 else None,
    )
    return parallel, plan


def _plan(model: nn.Module, sharders: list[ModuleSharder[nn.Module]], config: Config, world: World) -> ShardingPlan:
    parallel = config.parallel
    on_gpu = world.device.type == "cuda"
    hbm = int(parallel.hbm_gib * GIB) if parallel.hbm_gib else None
    if on_gpu and hbm is None:
        hbm = torch.cuda.get_device_properties(world.device).total_memory
    names = [table.name for table in model.embedding.collection.embedding_configs()]  # type: ignore[union-attr, operator]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world.size,
            local_world_size=world.local_size,
            compute_device=world.device.type,
            hbm_cap=hbm,
            ddr_cap=int(parallel.host_gib * GIB),
        ),
        batch_size=config.data.batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=parallel.reserve),
        constraints={name: ParameterConstraints(sharding_types=parallel.sharding_types) for name in names},
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    if plan is None:
        raise ValueError("the sharding planner found no plan; raise parallel.hbm_gib or lower parallel.reserve")
    return plan
