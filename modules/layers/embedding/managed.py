"""Tables whose rows are those of the ids that occur: TorchRec's managed collisions, for ids that never end.

An id gets a row of its own once it has occurred often enough between two reviews of a table, and loses it to one that
scores better: by how often it has occurred, divided by how long ago it did. All ids without a row
share the last one of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from modules.config import ManagedTable


class RowsOfIds(MCHManagedCollisionModule):
    """TorchRec's module, whose memory of the ids since the last review grows instead of leaving some out."""

    occurrences: Tensor | None = None
    """How often each id of the next batch occurred, [N]; None: as often as it is given."""

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        if self.training:
            seen = features
            if self.occurrences is not None:
                ((name, ids),) = features.items()
                counts = self.occurrences.long()
                seen = {name: JaggedTensor(ids.values().repeat_interleave(counts), lengths=counts)}
            self._make_room(sum(feature.values().numel() for feature in seen.values()))
            super().profile(seen)
        return features

    def _make_room(self, count: int) -> None:
        needed = max(self._current_history_buffer_offset, 0) + count
        if self._input_history_buffer_size >= needed:
            return
        before = dict(self._history_metadata)
        kept = self._history_accumulator if self._input_history_buffer_size > 0 else None
        room = torch.empty(2 * needed // self._eviction_interval + 1, device=self.device)
        self._init_history_buffers({"": JaggedTensor(room, lengths=torch.tensor([room.numel()], device=self.device))})
        if kept is not None:
            self._history_accumulator[: kept.numel()] = kept
            for name, values in before.items():
                self._history_metadata[name][: values.numel()] = values

    def split(self, ranks: int) -> None:
        """Say over how many ranks TorchRec shall plan the rows and ranges of ids."""
        self._buckets = ranks

    def review(self) -> None:
        """Give rows by what occurred since the last review, as `every` steps do; nothing before the first step."""
        if self._current_iter == -1:
            return
        if self._current_history_buffer_offset:
            self._coalesce_history()
        self._last_eviction_iter = self._current_iter


def managed_collection(
    tables: Sequence[EmbeddingConfig], settings: Mapping[str, ManagedTable], ids: Mapping[str, int], device: str
) -> ManagedCollisionEmbeddingCollection:
    """The tables of a collection with their settings, by name; ids of a table are below `ids`."""
    modules = {
        table.name: RowsOfIds(
            zch_size=table.num_embeddings,
            device=torch.device(device),
            eviction_policy=_policy(settings[table.name]),
            eviction_interval=settings[table.name].every,
            input_hash_size=ids[table.name],
            name=table.name,
        )
        for table in tables
    }
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=list(tables), device=torch.device(device)),
        ManagedCollisionCollection(modules, list(tables), need_preprocess=False),
    )


def _policy(settings: ManagedTable) -> DistanceLFU_EvictionPolicy:
    admitted = partial(_at_least, settings.min_count) if settings.min_count > 1 else None
    return DistanceLFU_EvictionPolicy(threshold_filtering_func=admitted)


def _at_least(min_count: int, counts: Tensor) -> tuple[Tensor, float]:
    return counts >= min_count, min_count
