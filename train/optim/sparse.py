"""Embedding tables: fused optimiser, sharding plan, DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams, ModuleSharder, QuantizedCommCodecs, ShardingPlan
from torchrec.optim import SGD, Adam, RowWiseAdagrad
from torchrec.types import DataType

from modules.models.ranking import RankingModel
from train.config.schema import Config, TablesConfig
from train.data.source import Source
from train.optim.groups import chosen, grouped
from train.parallel import dedup, managed, whole_tables
from train.parallel.copies import environment, of_group
from train.parallel.dense import data_parallel
from train.parallel.exchange import exchange_rows
from train.parallel.mesh import Mesh, table_ranks
from train.process.distributed import World

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"rowwise_adagrad": RowWiseAdagrad, "adam": Adam, "sgd": SGD}
CPU_OPTIMIZERS = ("rowwise_adagrad", "sgd")  # what FBGEMM fuses there
GIB = 2**30
RESERVED = 0.15  # fraction of memory that the planner leaves to the dense part and activations
SAMPLE = 256  # requests from which the planner's mean numbers of ids are taken
MIN_COLUMNS = 32  # of a column-wise shard: narrower rows waste memory transactions


def shard(
    model: RankingModel,
    config: Config,
    world: World,
    ids: dict[str, float],
    mesh: Mesh | None = None,
    copies: DeviceMesh | None = None,
) -> tuple[DistributedModelParallel, ShardingPlan]:
    """Give the tables their optimiser, plan their shards for `ids_per_request`, and materialise this rank's shards.

    The optimiser runs inside the backward, so no gradient of a table is ever held; tables without `requires_grad` stay
    as they are. No process allocates a whole table: `model.embedding` is on `meta` until here. The dense part becomes
    data-parallel, over `mesh` if there is one. The tables are sharded over all ranks, or over `shard` of `copies`.
    """
    if world.device.type == "cpu" and config.optimizer.sparse not in CPU_OPTIMIZERS:
        raise ValueError(
            f"optimizer.sparse={config.optimizer.sparse} has no fused CPU kernel; use optimizer.sparse=rowwise_adagrad"
        )
    if world.device.type == "cpu" and config.parallel.prefetch_tables:
        raise ValueError(
            "parallel.prefetch_tables=true fills caches on a GPU, and a CPU has none; use "
            "parallel.prefetch_tables=false"
        )
    if config.parallel.index_dedup:
        dedup.serve_cpu()
    _give_optimizers(model, config)
    sharders = sharders_of(config, world)
    plan = plan_tables(model, sharders, config, world, ids)
    seed = config.runtime.seed * 1_000_003
    # Shards of one table are on several ranks: with equal seeds they would get equal weights, which copies need.
    torch.manual_seed(seed + (world.rank if copies is None else copies.get_local_rank("shard")))
    parallel = DistributedModelParallel(
        model,
        env=environment(copies),
        device=world.device,
        plan=plan if copies is None else of_group(plan, copies, world),
        sharders=sharders,
        data_parallel_wrapper=data_parallel(config, world, mesh),
    )
    whole_tables.serve_cpu(model.embedding)
    exchange_rows(parallel)
    if copies is not None:
        torch.manual_seed(seed + world.rank)  # ranks with the same shards drop out other elements
    return parallel, plan


def sharders_of(config: Config, world: World) -> list[ModuleSharder[nn.Module]]:
    """What shards each kind of collection."""
    codecs = _codecs(config, world)
    # Of all tables: a lookup is told to prefetch for all of its own or for none.
    fused: dict[str, Any] = {"prefetch_pipeline": True} if config.parallel.prefetch_tables else {}
    if world.device.type == "cuda":  # FBGEMM's CPU kernels have no bfloat16
        fused["output_dtype"] = DataType(config.parallel.row_precision.upper())
    # The generic parameter of ModuleSharder is invariant, hence the annotation.
    sharders: list[ModuleSharder[nn.Module]] = [
        EmbeddingCollectionSharder(
            fused_params=fused,
            qcomm_codecs_registry=codecs,
            use_index_dedup=config.parallel.index_dedup,
        ),
        managed.ManagedTablesSharder(codecs, fused, index_dedup=config.parallel.index_dedup),
    ]
    return sharders


def _give_optimizers(model: RankingModel, whole: Config) -> None:
    """Each table its fused optimiser, with the settings of its group."""
    config, tables = whole.optimizer, whole.parallel.tables
    names = {parameter: name for name, parameter in model.named_parameters()}
    rules = rules_of([name.split(".")[-2] for name in names.values() if ".embeddings." in name], tables)
    groups = grouped(list(names.values()), config.groups)
    for table in (table for each in model.embedding.collections for table in each.parameters()):
        name = names[table].split(".")[-2]
        if not table.requires_grad and "data_parallel" in (rules[name].sharding_types or ()):
            raise ValueError(
                f"parallel.tables: {name} cannot be data_parallel, which the dense optimiser steps, and frozen "
                "(optimizer.frozen); give it another sharding_types, e.g. [table_wise]"
            )
        if not table.requires_grad and name in whole.model.managed_tables:
            raise ValueError(
                f"model.managed_tables: rows of {name} begin anew when they go to another id, and cannot be "
                "frozen (optimizer.frozen); leave one of the two out"
            )
        if not table.requires_grad:
            # Fused kernels update every table. SGD has no state, and at a rate of 0 no weight moves.
            table.requires_grad_()
            apply_optimizer_in_backward(SGD, [table], {"lr": 0.0})
            continue
        group = groups[names[table]]
        settings: dict[str, Any] = {"lr": config.sparse_lr if group.lr is None else group.lr}
        decay = config.sparse_weight_decay if group.weight_decay is None else group.weight_decay
        if config.sparse == "rowwise_adagrad" and decay:
            # FBGEMM ignores the decay in its default mode.
            settings |= {"weight_decay": decay, "weight_decay_mode": WeightDecayMode.DECOUPLE}
        apply_optimizer_in_backward(OPTIMIZERS[config.sparse], [table], settings)


def rules_of(tables: Sequence[str], rules: Sequence[TablesConfig]) -> dict[str, TablesConfig]:
    """The rule of each table: the first of which a glob matches. ValueError for a glob that matches none."""
    found = {table: TablesConfig(match=[]) for table in tables}
    for rule in reversed(rules):
        for glob in rule.match:
            found |= dict.fromkeys(chosen(tables, glob, "parallel.tables"), rule)
    return found


def _codecs(config: Config, world: World) -> dict[str, QuantizedCommCodecs] | None:
    """The codecs that round rows, and their gradients, on the way between ranks; None: nothing is rounded.

    On GPUs the tables' kernels round as they read and write."""
    rounds = world.size > 1 and world.device.type == "cpu"
    precision = CommType(config.parallel.row_precision if rounds else "fp32")
    return get_qcomm_codecs_registry(QCommsConfig(precision, precision))


def ids_per_request(source: Source) -> dict[str, float]:
    """Mean number of ids that a request looks up, by feature, over a few training requests spread over the split."""
    total = source.num_requests("train")
    if total == 0:
        return {name: 1.0 for name, _ in source.spec.lookups()}
    requests = np.unique(np.linspace(0, total - 1, SAMPLE).astype(np.int64))
    lookup = source.batch("train", requests).lookup
    counts = zip(lookup.keys(), lookup.length_per_key(), strict=True)
    return {key: max(count, 1) / len(requests) for key, count in counts}


def plan_tables(
    model: RankingModel,
    sharders: list[ModuleSharder[nn.Module]],
    config: Config,
    world: World,
    ids: dict[str, float],
) -> ShardingPlan:
    """Where the shards of each table lie, among the ranks that share a copy of them.

    ValueError, with what a rank may fill, if they fit nowhere.
    """
    parallel = config.parallel
    ranks = table_ranks(parallel, world.size)
    managed.split(model.embedding, ranks)
    on_gpu = world.device.type == "cuda"
    hbm = int(parallel.hbm_gib * GIB) if parallel.hbm_gib else None
    if on_gpu and hbm is None:
        hbm = torch.cuda.get_device_properties(world.device).total_memory
    types = parallel.sharding_types
    if ranks == 1 and "table_wise" in types:
        types = ["table_wise"]  # a single rank holds whole tables, and all plans cost the same
    elif config.optimizer.sparse == "rowwise_adagrad" and "row_wise" in types:
        # Row-wise Adagrad has a moment for each row of each shard: split by columns, a run on other ranks, whose shards
        # are others, would only resume by converted moments.
        types = [kind for kind in types if kind != "column_wise"]
    # By default the planner assumes one id a feature, so that histories cost nothing, and does not split rows of up to
    # 128 columns.
    tables = [table for collection in model.embedding.collections for table in collection.embedding_configs()]
    rules = rules_of([table.name for table in tables], parallel.tables)
    constraints = {}
    for table in tables:
        rule, kinds = rules[table.name], types
        kernels = ["fused"] if ranks < world.size else rule.kernels  # copies in host memory cannot be averaged
        if table.name in config.model.managed_tables:
            kinds, kernels = ["row_wise"], ["fused"]
            if {*(rule.sharding_types or kinds), *(rule.kernels or kernels)} != {*kinds, *kernels}:
                raise ValueError(
                    f"parallel.tables: {table.name} is one of model.managed_tables, which are sharded by rows in GPU "
                    "memory; leave it out, or give it sharding_types: [row_wise] and kernels: [fused]"
                )
        constraints[table.name] = ParameterConstraints(
            sharding_types=kinds if rule.sharding_types is None else rule.sharding_types,
            compute_kernels=None if kernels is None else [*kernels, "dense"],
            pooling_factors=[ids[feature] for feature in table.feature_names],
            min_partition=max(MIN_COLUMNS, -(-table.embedding_dim // (4 * ranks)) * 4),
            cache_params=None if rule.cache_share is None else CacheParams(load_factor=rule.cache_share),
        )
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks,
            local_world_size=min(ranks, world.local_size),
            compute_device=world.device.type,
            hbm_cap=hbm,
            ddr_cap=int(parallel.host_gib * GIB),
        ),
        batch_size=config.data.batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED),
        constraints=constraints,
        debug=False,
    )
    memory = f"{parallel.host_gib} GiB of host memory (parallel.host_gib)"
    if hbm is not None:
        memory = f"{hbm / GIB:.3g} GiB of its GPU (parallel.hbm_gib) and {memory}"

    def plan() -> ShardingPlan:
        try:
            return planner.plan(model, sharders)
        except PlannerError as error:
            raise ValueError(
                f"{str(error).splitlines()[0].strip()} A rank may fill {memory}, of which "
                f"{RESERVED:.0%} stays free: allow more, take more ranks, or make the tables smaller, e.g. "
                "data.min_count=2"
            ) from error

    return world.by_first(plan)
