"""`parallel.prefetch_tables`: which lookups find what was prefetched; a CPU has a stand-in for the cache."""

from __future__ import annotations

from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup

from tests.distributed.test_step import Step
from tests.modules.factories import random_batch
from tests.processes import run_ranks
from train.config.schema import OptimizerConfig
from train.parallel.prefetch import PrefetchPipeline
from train.process import distributed


class Cache:
    """Stands in for the cache of some tables: FBGEMM's own lookup takes from it what was prefetched."""

    def __init__(self, tables: SplitTableBatchedEmbeddingBagsCodegen, events: list[str]) -> None:
        self.tables, self.events = tables, events
        tables.prefetch_pipeline = tables.lock_cache_line = True
        tables.prefetch = self.prefetch
        tables.register_forward_hook(self.looked_up, with_kwargs=True)

    def prefetch(self, indices: Tensor, offsets: Tensor, forward_stream: object) -> None:
        assert self.tables.lock_cache_line
        self.tables.timesteps_prefetched.append(0)
        self.tables.lxu_cache_locations_list.append(indices.clone())
        self.events.append("prefetch")

    def looked_up(self, _: nn.Module, __: object, arguments: dict[str, Tensor], ___: Tensor) -> None:
        """Training finds the places of its own ids, and evaluation, which would keep its rows locked, none."""
        found, training = self.tables.lxu_cache_locations, torch.is_grad_enabled()
        assert torch.equal(found, arguments["indices"] if training else torch.empty(0, dtype=torch.int32))
        assert self.tables.lock_cache_line == training
        self.events.append("train" if training else "evaluate")


def _trained(events: list[str] | None) -> list[float]:
    """Losses of two epochs, with an evaluation in the first and after it; what happens is added to `events`."""
    step = Step(OptimizerConfig(warmup_steps=0))
    if events is not None:
        lookups = nn.ModuleList([lookup for each in step.embedding.collections for lookup in cast(Any, each)._lookups])
        for module in lookups.modules():
            if isinstance(module, GroupedEmbeddingsLookup):
                module._need_prefetch = True
            if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
                Cache(module, events)
        step.pipeline = PrefetchPipeline(step.model, step.optimizer, step.world.device, cast(Any, step._forward))
    batches = [random_batch(step.spec, seed=10 * step.world.rank + index) for index in range(5)]

    @torch.no_grad()
    def evaluate() -> float:
        step.pipeline.detach()
        logits = step.model.eval()(batches[0])
        step.model.train()
        step.pipeline.attach(sparse_dist=False)
        return float(logits.sum())

    losses = []
    for count in (5, 2):
        iterator = iter(batches[:count])
        for index in range(count):
            losses.append(float(cast(Tensor, step.pipeline.progress(iterator))))
            if events is not None:
                events.append("step")
            if index == 1:
                losses.append(evaluate())
    distributed.stop()
    return losses


def _prefetched() -> None:
    events: list[str] = []
    assert _trained(events) == _trained(None)
    between = ["train", "prefetch", "step"]
    first = ["prefetch", *between, *between, "evaluate", "prefetch", *between, *between, "train", "step"]
    assert events == [*first, "prefetch", *between, "train", "step", "evaluate"]


def test_a_step_finds_its_own_rows_prefetched_and_an_evaluation_nothing() -> None:
    run_ranks(_prefetched, 2)
