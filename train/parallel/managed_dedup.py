"""Each id of a managed table once on its way, with how often it occurred, by which it gets or loses a row."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder, ShardedManagedCollisionCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from modules.layers.embedding.managed import RowsOfIds


class CountedIds(ShardedManagedCollisionCollection):
    """TorchRec's, which counts an id that is sent once as one that occurred once."""

    def _dedup_indices(self, ctx: Any, features: list[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        once = super()._dedup_indices(ctx, features)
        # An evaluation counts nothing.
        return [_counted(*each) for each in zip(once, ctx.reverse_indices, strict=True)] if self.training else once

    def get_lookup_value(self, table: str, features: KeyedJaggedTensor, **options: Any) -> dict[str, JaggedTensor]:
        rows = cast(RowsOfIds, self._managed_collision_modules[table])
        rows.occurrences = features.weights_or_none()
        found = super().get_lookup_value(table, features, **options)
        rows.occurrences = None
        return cast("dict[str, JaggedTensor]", found)


def _counted(once: KeyedJaggedTensor, places: Tensor) -> KeyedJaggedTensor:
    """Ids with how often each occurred as their weights, which are sent along; exact in float32 up to 2^24."""
    counts = torch.zeros(once.values().numel(), device=places.device)
    counts.index_add_(0, places, torch.ones(places.numel(), device=places.device))
    return KeyedJaggedTensor(once.keys(), once.values(), counts, once.lengths(), once.offsets())


class CountedIdsSharder(ManagedCollisionCollectionSharder):
    """Makes `CountedIds`."""

    def shard(self, module: Any, params: Any, env: Any, embedding_shardings: Any, **options: Any) -> CountedIds:
        return CountedIds(module, params, env=env, embedding_shardings=embedding_shardings, **options)
