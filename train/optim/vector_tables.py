"""Rows that files give to tables, copied to the shards of this rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from train.data.source import PreparedSource, Source

AT_ONCE = 1 << 16
"""Rows that are copied together."""


@torch.no_grad()
def give_rows(model: DistributedModelParallel, source: Source) -> None:
    """Write the vectors of `source` over the rows of the tables that they are for; only those of shards are read."""
    if not source.spec.vector_tables:
        return
    assert isinstance(source, PreparedSource)
    weights = {name.split(".")[-2]: weight for name, weight in model.state_dict().items() if ".embeddings." in name}
    for table in source.spec.vector_tables:
        rows, weight = source.vectors(table), weights[table]
        if isinstance(weight, ShardedTensor):
            for shard in weight.local_shards():
                (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                _copy(shard.tensor, rows[row : row + height, column : column + width])
        else:
            _copy(weight, rows)


def _copy(weight: Tensor, rows: np.ndarray) -> None:
    for begin in range(0, len(rows), AT_ONCE):
        weight[begin : begin + AT_ONCE] = torch.from_numpy(np.array(rows[begin : begin + AT_ONCE])).to(weight.device)
