"""Rows of cached tables are fetched while the step before computes: `parallel.prefetch_tables`.

A table in host memory with a cache on the GPU (`fused_uvm_caching`) copies the rows that a batch lacks into its cache
before it looks them up, and the step waits. TorchRec's `PrefetchTrainPipelineSparseDist` lets FBGEMM do so for the next
batch, on a stream of its own: it begins when the forward is launched, and the backward, which writes to the cache and
to host memory, waits until it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.types import EmbeddingModuleShardingPlan, NoWait, ShardingPlan

from modules.batch import RequestBatch

Forward = Callable[[RequestBatch], tuple[Tensor, Any]]


class PrefetchPipeline(PrefetchTrainPipelineSparseDist[Any, Any]):
    """TorchRec's, with lookups of other batches between two steps: after `detach`, and until `attach`.

    FBGEMM hands what was prefetched to the next lookup, whose ids would be others then, and takes the locks from rows
    in the cache in a backward, which an evaluation does not have. So the next batch's prefetch is given up, its rows
    may leave the cache, and it is made again.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: Any,  # of torch, or what steps and clears gradients like one
        device: torch.device,
        custom_model_fwd: Forward,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            pipeline_postproc=False,
            custom_model_fwd=cast(Any, custom_model_fwd),
        )
        if self._prefetch_stream is not None:
            # TorchRec makes one, on which nothing runs; tensors of the prefetch are kept until this one has read them.
            self._default_stream = torch.cuda.current_stream()
        collections = [module for module in model.modules() if isinstance(module, ShardedEmbeddingCollection)]
        lookups = nn.ModuleList([lookup for collection in collections for lookup in collection._lookups])
        self._tables = [
            tables
            for tables in lookups.modules()
            if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen) and tables.prefetch_pipeline
        ]

    def fill_pipeline(self, dataloader_iter: Any) -> None:
        if not self.batches:
            self._follow()  # tables may have been loaded
        super().fill_pipeline(dataloader_iter)

    def detach(self) -> nn.Module:
        self._wait()
        for context in cast("list[PrefetchTrainPipelineContext]", self.contexts):
            for name, ids in context.module_input_post_prefetch.items():
                context.input_dist_tensors_requests[name] = NoWait(ids)
            context.module_contexts |= context.module_contexts_post_prefetch
            context.module_input_post_prefetch.clear()
            context.module_contexts_post_prefetch.clear()
        for tables in self._tables:
            tables.timesteps_prefetched.clear()
            tables.lxu_cache_locations_list.clear()
            tables.lxu_cache_locking_counter.zero_()
            tables.lock_cache_line = False
        return super().detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        super().attach(model, sparse_dist)
        for tables in self._tables:
            tables.lock_cache_line = True
        if self.contexts:
            self._follow()
            self._prefetch(cast(PrefetchTrainPipelineContext, self.contexts[0]))
            self._wait()  # a checkpoint may read the cache before the next backward waits

    def _follow(self) -> None:
        """Prefetch after what has been launched so far."""
        if self._prefetch_stream is not None:
            self._prefetch_stream.wait_stream(torch.cuda.current_stream())

    def _wait(self) -> None:
        if self._prefetch_stream is not None:
            torch.cuda.current_stream().wait_stream(self._prefetch_stream)


def cached(plan: ShardingPlan) -> bool:
    """Whether a table of the plan is in host memory with a cache on the GPU."""
    collections = (cast(EmbeddingModuleShardingPlan, collection).values() for collection in plan.plan.values())
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return any(table.compute_kernel == kernel for tables in collections for table in tables)
