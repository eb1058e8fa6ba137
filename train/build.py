"""From a configuration to the things a run needs: data source, sharded model, autocast."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from kernels.core import dispatch
from modules.config import ModelConfig
from modules.embedding import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.ranking import Architecture, RankingModel
from modules.precision import DESCRIPTIONS, apply_recipe, format_execution, format_table
from train.config.schema import Config, EventsConfig
from train.data import build_source
from train.data.source import Source
from train.data.summary import summarise
from train.metrics.collection import OwnMetric, own_metrics
from train.optim.frozen import freeze
from train.optim.sparse import ids_per_request, shard
from train.process import precision
from train.process.distributed import World
from train.speedup.graphs import use_graphs
from train.speedup.regions import compile_regions

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A model on this rank, with the data it was built for."""

    config: Config
    world: World
    source: Source
    model: DistributedModelParallel
    plan: str
    metrics: dict[str, OwnMetric]  # of `tracking.metrics`, by name

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


def build(config: Config, world: World) -> Job:
    """Prepare the data, then build, quantise and shard the model. Equal seeds give equal models on any rank."""
    dispatch.force(config.runtime.kernels)
    precision.settle(config.precision, world)
    metrics = own_metrics(config.tracking.metrics)
    torch.manual_seed(config.runtime.seed)
    source = build_source(config.data, world.by_first)
    if world.is_first:
        dated = not isinstance(config.data, EventsConfig) or config.data.time is not None
        log.info("data: %s\n%s", config.data.name, summarise(source, dated))
    with torch.device(world.device):
        arch = build_arch(config.model, source.spec)
    model = RankingModel(_embedding(source, config.model), arch)
    model.embedding.assemble.to(world.device)
    log.info("%s: %s dense parameters", config.model.name, f"{sum(p.numel() for p in arch.parameters()):,}")
    table = format_table(apply_recipe(model, config.precision.name, config.precision.quantize))
    log.info("precision: %s\n%s", DESCRIPTIONS[config.precision.name], table)
    if execution := format_execution(model):
        log.info("how this device multiplies quantised operands:\n%s", execution)
    freeze(model, config.optimizer.frozen)
    if config.runtime.compile:
        compile_regions(arch)
    if config.runtime.cuda_graphs and world.device.type == "cuda":
        use_graphs(arch)
    elif config.runtime.cuda_graphs:
        log.warning("runtime.cuda_graphs=true has no effect on a CPU, which has no CUDA graphs")
    sharded, plan = shard(model, config, world, ids_per_request(source))
    log.info("sharding plan:\n%s", plan)
    return Job(config, world, source, sharded, str(plan), metrics)


def _embedding(source: Source, model: ModelConfig) -> FeatureEmbedding:
    return FeatureEmbedding(
        source.spec,
        model.dim,
        "meta",
        model.table_dims,
        table_std=model.table_std,
        dropout=model.embedding_dropout,
    )
