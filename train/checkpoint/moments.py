"""Moments of row-wise Adagrad under another split of a table's columns.

Row-wise Adagrad has one moment for each row of each shard: the sum over steps of the mean squared gradient of the row's
columns there. A table in k column shards has k moments a row, which are saved one shard after another, [k * rows], and
DCP finds them again only under the same split. Over other columns, the mean is that of the shards that hold them,
weighted by how many of the columns each holds. It is exact where shards are joined; where a shard is split, its parts
begin with the same moment.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from train.checkpoint.manifest import DamagedError
from train.checkpoint.read import read

log = logging.getLogger(__name__)

Columns = tuple[tuple[int, int], ...]
"""(first column, number of columns) of each column shard of a table, in order."""


def read_converted(path: Path, state: dict[str, Any], saved: Metadata) -> dict[str, Any]:
    """Read the moments that are split otherwise in a checkpoint into those of `state`; returns the rest of `state`.

    A table may have more rows than are saved; the moments of the others stay as they are. Each rank reads its own.
    """
    if "tables" not in state:
        return state
    rest = {name: dict(each) for name, each in state["tables"]["state"].items()}
    converted = []
    for name, each in state["tables"]["state"].items():
        weight, entry = state["model"].get(name), saved.state_dict_metadata.get(f"model.{name}")
        if not isinstance(weight, ShardedTensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        ours = columns((shard.shard_offsets, shard.shard_sizes) for shard in weight.metadata().shards_metadata)
        theirs = columns((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        rows = int(entry.size[0])
        if ours == theirs and (len(ours) == 1 or rows == weight.size(0)):
            continue
        for key, moment in each.items():
            if isinstance(moment, ShardedTensor) and len(moment.size()) == 1 and moment.size(0) % weight.size(0) == 0:
                _convert(path, f"tables.state.{name}.{key}", moment, (weight.size(0), ours), (rows, theirs), saved)
                del rest[name][key]
                converted.append(name)
    if converted:
        log.info("moments of %d tables are converted to their new split by columns: %s", len(converted), converted)
    return state | {"tables": {"state": {name: each for name, each in rest.items() if each}}}


def columns(shards: Any) -> Columns:
    """The column shards of a table, of the (offsets, sizes) of all its shards."""
    return tuple(sorted({(int(offsets[1]), int(sizes[1])) for offsets, sizes in shards}))


def over(moments: Tensor, theirs: Columns, first: int, count: int) -> Tensor:
    """The moments [rows] of `count` columns from `first` on, of those [k, rows] of the k column shards `theirs`."""
    overlap = [min(first + count, start + width) - max(first, start) for start, width in theirs]
    shares = torch.tensor([max(0, each) / count for each in overlap], dtype=moments.dtype)
    return shares @ moments


def _convert(
    path: Path,
    name: str,
    moment: ShardedTensor,
    ours: tuple[int, Columns],
    theirs: tuple[int, Columns],
    saved: Metadata,
) -> None:
    rows, split = ours
    saved_rows, saved_split = theirs
    shards = moment.local_shards()
    if not shards:
        return
    entry = saved.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != (saved_rows * len(saved_split),):
        raise DamagedError(path, f"{name} is not {saved_rows * len(saved_split):,} moments")
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    read(path, {name: whole}, alone=True)
    for shard in shards:
        (offset,) = shard.metadata.shard_offsets
        index, row = divmod(int(offset), rows)
        last = min(row + shard.tensor.shape[0], saved_rows)
        values = over(whole.view(len(saved_split), saved_rows)[:, row:last], saved_split, *split[index])
        shard.tensor[: max(0, last - row)].copy_(values)
