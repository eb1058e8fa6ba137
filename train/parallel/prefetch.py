"""Rows of cached tables are fetched while the step before computes: `parallel.prefetch_tables`.

A table in host memory with a cache on the GPU (`fused_uvm_caching`) copies the rows that a batch lacks into its cache
before it looks them up, and the step waits. FBGEMM can do so for the next batch, on a stream of its own: it begins when
the forward is launched, and the tables' backward, which writes to the cache and to host memory, waits until it is done.

TorchRec's `PrefetchTrainPipelineSparseDist` calls it, but cannot stop for an evaluation, and up to TorchRec 1.6 has one
context for all batches. Here its parts are joined to `TrainPipelineSparseDist`, whose ids of the next batch are there
after the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PrefetchPipelinedForward
from torchrec.distributed.train_pipeline.utils import _prefetch_embeddings
from torchrec.distributed.types import EmbeddingModuleShardingPlan, NoWait, ShardingPlan

from modules.batch import RequestBatch

Forward = Callable[[RequestBatch], tuple[Tensor, Any]]


class PrefetchPipeline(TrainPipelineSparseDist[Any, Any]):
    """Prefetches the next batch between forward and backward; other batches can be looked up from `detach` to `attach`.

    FBGEMM hands what was prefetched to the next lookup, whose ids would be others there, and takes the locks from rows
    in the cache in a backward, which an evaluation does not have. So the next batch's prefetch is given up, its rows
    may leave the cache, and it is made again.
    """

    _pipelined_forward_type = PrefetchPipelinedForward

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
            context_type=PrefetchTrainPipelineContext,
            custom_model_fwd=cast(Any, custom_model_fwd),
        )
        self._prefetch_stream = torch.cuda.Stream() if device.type == "cuda" else None
        collections = [module for module in model.modules() if isinstance(module, ShardedEmbeddingCollection)]
        lookups = nn.ModuleList([lookup for collection in collections for lookup in collection._lookups])
        self._tables = [
            tables
            for tables in lookups.modules()
            if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen) and tables.prefetch_pipeline
        ]

    def fill_pipeline(self, dataloader_iter: Iterator[RequestBatch]) -> None:
        if not self.batches:
            self._prefetch_after_now()  # tables may have been loaded
        super().fill_pipeline(dataloader_iter)

    def wait_sparse_data_dist(self, context: Any) -> None:
        super().wait_sparse_data_dist(context)
        self._prefetch(context)

    def _wait_for_batch(self) -> None:
        super()._wait_for_batch()
        self._wait_for_prefetch()

    def detach(self) -> nn.Module:
        self._wait_for_prefetch()
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
            self._prefetch_after_now()
            self._prefetch(cast(PrefetchTrainPipelineContext, self.contexts[0]))
            self._wait_for_prefetch()  # a checkpoint may read the cache before the next step

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        forward = None if self._prefetch_stream is None else torch.cuda.current_stream()
        with self._stream_context(self._prefetch_stream):
            context.module_input_post_prefetch = cast(
                Any,
                _prefetch_embeddings(
                    self.batches[0],
                    context,
                    self._pipelined_modules,
                    self._device,
                    cast(Any, self._stream_context),
                    self._data_dist_stream,
                    forward,
                ),
            )
        context.module_contexts_post_prefetch, context.module_contexts = context.module_contexts, {}

    def _prefetch_after_now(self) -> None:
        """Prefetch after what has been launched so far."""
        if self._prefetch_stream is not None:
            self._prefetch_stream.wait_stream(torch.cuda.current_stream())

    def _wait_for_prefetch(self) -> None:
        if self._prefetch_stream is not None:
            torch.cuda.current_stream().wait_stream(self._prefetch_stream)


def cached(plan: ShardingPlan) -> bool:
    """Whether a table of the plan is in host memory with a cache on the GPU."""
    collections = (cast(EmbeddingModuleShardingPlan, collection).values() for collection in plan.plan.values())
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return any(table.compute_kernel == kernel for tables in collections for table in tables)
