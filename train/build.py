"""From a configuration to the things a run needs: data source, sharded model, autocast."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from kernels.core import dispatch
from modules.batch import UNKNOWN_ID, FeatureSpec
from modules.costs.flops import BatchFlops, count_flops
from modules.costs.summary import summarise as summarise_model
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.loss import TaskLosses
from modules.loss.next_item import ItemShares
from modules.models import build as build_arch
from modules.models.ranking import Architecture, RankingModel
from modules.models.retrieval import RetrievalConfig, RetrievalModel
from modules.precision import DESCRIPTIONS, apply_recipe, format_execution, format_table
from modules.pretrained import PretrainedModel
from train.checkpoint import load as checkpoint
from train.config.schema import Config
from train.data import build_source
from train.data.source import Source
from train.data.statistics.compute import uncounted
from train.data.storage.store import ByFirst
from train.data.summary import summarise
from train.metrics.collection import OwnMetric, own_metrics
from train.optim import guarded, schedule
from train.optim.frozen import freeze
from train.optim.sparse import ids_per_request, shard
from train.optim.vector_tables import give_rows
from train.parallel.copies import TableCopies
from train.parallel.experts import share_experts
from train.parallel.mesh import build_mesh, table_mesh
from train.parallel.prefetch import cached
from train.parallel.recompute import recompute
from train.process import length, precision
from train.process.distributed import World
from train.speedup.casts import cast_together
from train.speedup.graphs import use_graphs
from train.speedup.regions import compile_regions

log = logging.getLogger(__name__)
SHARES_OF = 100_000  # requests from which the shares of items are taken


@dataclass
class Job:
    """A model on this rank, with the data it was built for."""

    config: Config
    world: World
    source: Source
    model: DistributedModelParallel
    plan: str
    metrics: dict[str, OwnMetric]  # of `tracking.metrics`, by name
    losses: TaskLosses
    forward_flops: BatchFlops  # of the architecture
    copies: TableCopies | None = None  # of the tables, where there are several
    prefetches: bool = False  # rows of cached tables

    @property
    def ranking_model(self) -> RankingModel:
        """The model below the data-parallel wrappers."""
        module: nn.Module = self.model.module
        while not isinstance(module, RankingModel):
            module = module.module  # type: ignore[assignment]
        return module

    @property
    def arch(self) -> Architecture:
        return cast(Architecture, self.ranking_model.arch)

    def autocast(self) -> AbstractContextManager[object]:
        """BF16 compute over FP32 master weights, unless `precision=fp32`."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision.name != "fp32")


def planned(
    config: Config, ranks: int = 1, by_first: ByFirst = lambda make: make()
) -> tuple[Source, TaskLosses, FeatureSpec, str]:
    """What a run reads, learns and builds its architecture for, with a sentence on what it chose where `config` leaves
    keys open, which are then set in it."""
    if isinstance(config.model, RetrievalConfig):
        config.data.leave_out_statistics()
    source = build_source(config.data, by_first)
    validated = source.num_requests("valid") > 0
    chosen = length.settle(config, source.num_requests("train"), validated, ranks, uncounted(config.data))
    losses = TaskLosses(config.tasks, source.spec.tasks)
    return source, losses, output_spec(source.spec, losses), chosen


def build(config: Config, world: World) -> Job:
    """Prepare the data, then build, quantise and shard the model. Equal seeds give equal models on any rank."""
    dispatch.force(config.runtime.kernels)
    guarded.check(config.optimizer)
    schedule.check(config.optimizer)
    precision.settle(config.precision, world)
    metrics = own_metrics(config.tracking.metrics)
    torch.manual_seed(config.runtime.seed)
    source, losses, spec, chosen = planned(config, world.size, world.by_first)
    if chosen:
        log.info(chosen)
    if world.is_first:
        splits, features = summarise(source, config.data.dated)
        log.info("data: %s\n%s", config.data.name, splits)
        log.debug("features:\n%s", features)
    losses.check_labels(source.label_bounds())
    with torch.device(world.device):
        arch = build_arch(config.model, spec)
    # Before layers are quantised, captured or spread over ranks.
    forward_flops = count_flops(arch, source.spec, config.model.dim)
    if losses.next_item:
        train_on_places(arch, losses, source, world.device)
    model = RankingModel(FeatureEmbedding.of(source.spec, config.model, "meta"), arch)
    model.embedding.assemble.to(world.device)
    log.info("%s: %s dense parameters", config.model.name, f"{sum(p.numel() for p in arch.parameters()):,}")
    table = format_table(apply_recipe(model, config.precision.name, config.precision.quantize, world.device))
    log.info("precision: %s", DESCRIPTIONS[config.precision.name])
    # Of interest to everybody where layers differ in precision.
    log.log(logging.INFO if config.precision.quantize else logging.DEBUG, "layers:\n%s", table)
    if execution := format_execution(model):
        log.info("how this device multiplies quantised operands:\n%s", execution)
    if world.is_first and world.device.type == "cuda":
        layers = config.model.describe_layers()
        summary = summarise_model(arch, source.spec, config.model.dim, dtype=_dtype(config), layers=layers)
        log.debug("what parts of the model cost, and what serves them:\n%s", summary)
        for sentence in summary.slow():
            log.warning(sentence)
    freeze(model, config.optimizer.frozen)
    mesh = build_mesh(config.parallel, world, config.runtime.collective_timeout)
    if mesh is not None and config.parallel.expert_ranks:
        share_experts(model, config.parallel, mesh)
    if config.runtime.compile:
        compile_regions(arch)
    graphs = config.runtime.cuda_graphs and world.device.type == "cuda"
    # FSDP gathers weights that are cast already, and compiled layers cast them in their own code. On a CPU it saves no
    # launch, and would pad rows to another length in a run's first step, so that a resumed run rounds otherwise.
    casts = config.precision.name != "fp32" and config.parallel.dense == "ddp" and not config.runtime.compile
    if casts and world.device.type == "cuda":
        cast_together(arch, by_layer=world.size > 1 and not graphs)
    if graphs:
        use_graphs(arch)
    elif config.runtime.cuda_graphs:
        log.warning("runtime.cuda_graphs=true has no effect on a CPU, which has no CUDA graphs")
    recompute(model, config.parallel.recompute, compiled=config.runtime.compile)
    tables = table_mesh(config.parallel, world, config.runtime.collective_timeout)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    sharded, plan = shard(model, config, world, ids_per_request(source), mesh, tables)
    give_rows(sharded, source)
    copies = None if tables is None else TableCopies(sharded, tables, frozen)
    prefetches = config.parallel.prefetch_tables and cached(plan)
    if config.parallel.prefetch_tables and not prefetches:
        log.warning(
            "parallel.prefetch_tables=true has no effect: no table is in host memory with a cache on the GPU, as "
            "parallel.tables=[{match: [TABLE], kernels: [fused_uvm_caching]}] makes it"
        )
    log.info("tables: %s", _kinds(plan))
    log.debug("sharding plan:\n%s", plan)
    return Job(config, world, source, sharded, str(plan), metrics, losses, forward_flops, copies, prefetches)


def output_spec(spec: FeatureSpec, losses: TaskLosses) -> FeatureSpec:
    """The spec that says how many logits each task has."""
    return spec if set(losses.outputs) == {1} else dataclasses.replace(spec, outputs=losses.outputs)


def train_on_places(arch: nn.Module, losses: TaskLosses, source: Source, device: torch.device) -> None:
    """Let training steps of `arch` give what a loss of next items needs. ValueError for a model that cannot."""
    if not isinstance(arch, RetrievalModel):
        raise ValueError(
            "a loss of next items needs a model of items: model=sasrec, model=hstu, model=two_tower, or a subclass of "
            "modules.models.retrieval.RetrievalModel"
        )
    if source.spec.max_candidates > 1 and not arch.several_targets:
        raise ValueError(
            "with a loss of next items a request of this model has one candidate, what came next: data.max_candidates=1"
        )
    arch.num_negatives = losses.negatives
    arch.trains_on_places = True
    rows = source.spec.tables[source.spec.candidate[0].table]
    assert losses.next_item
    shares = item_shares(source, rows).to(device) if losses.next_item.needs_shares else None
    losses.known = ItemShares(rows - 1, shares)


def item_shares(source: Source, rows: int) -> Tensor:
    """[rows] float32: how often each item is a target, in a sample of training requests; none is never."""
    counts = torch.ones(rows)
    total = source.num_requests("train")
    for requests in np.array_split(np.unique(np.linspace(0, total - 1, SHARES_OF).astype(np.int64)), SHARES_OF // 1000):
        batch = source.batch("train", requests)
        history = batch.histories[batch.histories.keys()[0]].values()
        for ids in (batch.candidate_sparse.values(), history):
            counts += torch.bincount(ids, minlength=rows)
    counts[UNKNOWN_ID] = 0
    return counts / counts.sum()


def _dtype(config: Config) -> torch.dtype:
    return torch.float32 if config.precision.name == "fp32" else torch.bfloat16


def _kinds(plan: ShardingPlan) -> str:
    """How many tables are sharded in which way."""
    placed = [cast(EmbeddingModuleShardingPlan, collection).values() for collection in plan.plan.values()]
    kinds = Counter(f"{table.sharding_type}, {table.compute_kernel}" for tables in placed for table in tables)
    return "; ".join(f"{count} {kind}" for kind, count in kinds.items())


def load_model(
    path: Path, config: Config, source: Source, max_candidates: int, device: torch.device
) -> PretrainedModel:
    """The checkpoint's model in eval mode, whole and unsharded, for requests of up to `max_candidates` candidates."""
    checkpoint.check_data(path, source.fingerprint)
    spec = dataclasses.replace(source.spec, max_candidates=max_candidates)
    model = PretrainedModel(config.model, output_spec(spec, TaskLosses(config.tasks, spec.tasks)))
    checkpoint.load_weights(path, model)
    return model.eval().to(device)
