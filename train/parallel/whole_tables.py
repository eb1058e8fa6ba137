"""Tables that are whole on every rank (`sharding_types: [data_parallel]`): FBGEMM's lookup for them on a CPU.

Its CPU kernel for dense tables does not know lookups without pooling: it sums the rows of a list, and hands out those
of several tables example by example instead of table by table.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn import functional

from modules.layers.embedding.tokens import FeatureEmbedding


def serve_cpu(embedding: FeatureEmbedding) -> None:
    """Give the tables of sharded collections that are such and lie on a CPU the lookup `rows`."""
    lookups = [lookup for collection in embedding.collections for lookup in cast(Any, collection)._lookups]
    for module in nn.ModuleList(lookups).modules():
        if isinstance(module, DenseTableBatchedEmbeddingBagsCodegen) and module.use_cpu:
            module.forward = partial(rows, module)


def rows(tables: DenseTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor) -> Tensor:
    """[N, width]: the row of each of the N ids, feature by feature, of tables of one width.

    Args:
        indices: [N] int64, the ids.
        offsets: [F * B + 1] int64: where the ids of each of the F features' B examples begin.
    """
    width = tables.max_D
    starts = tables.weights_offsets // width  # [F]: where the rows of each feature's table begin
    counts = offsets.diff().view(len(starts), (offsets.numel() - 1) // len(starts)).sum(1)
    places = indices + torch.repeat_interleave(starts, counts, output_size=len(indices))
    return functional.embedding(places, tables.weights.view(-1, width))
