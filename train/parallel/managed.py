"""Tables of `model.managed_tables` on their ranks: rows that change hands begin anew, and checkpoints are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

from modules.layers.embedding.managed import RowsOfIds
from modules.layers.embedding.tokens import FeatureEmbedding
from train.parallel.managed_dedup import CountedIdsSharder


class ManagedTables(ShardedManagedCollisionEmbeddingCollection):
    """TorchRec's, which resets the optimiser's state of row-wise Adagrad only, and on GPUs only."""

    def _evict(self, evictions_per_table: dict[str, Tensor | None]) -> None:
        embedding = cast(Any, self._embedding_module)
        for table, rows in evictions_per_table.items():
            if rows is None or not rows.numel():
                continue
            weight = embedding.embeddings.get_parameter(f"{table}.weight")
            fresh = torch.empty(rows.numel(), weight.shape[1], device=weight.device)
            weight.data[rows] = embedding._table_name_to_config[table].init_fn(fresh)
            tables, index = self._table_to_tbe_and_index[table]
            states = tables.split_optimizer_states()  # SGD has none
            for state in states[int(index)] if states else ():
                if state.dim() and len(state) == len(weight):
                    state[rows] = 0

    def review(self) -> None:
        """Review all tables now, so that nothing is left that a checkpoint does not hold."""
        for module in self._managed_collision_collection.modules():
            if isinstance(module, RowsOfIds):
                module.review()
        self._evict(self._managed_collision_collection.evict())


class ManagedTablesSharder(ManagedCollisionEmbeddingCollectionSharder):
    """Shards them by rows, with their ids by ranges, which are sent once each with `index_dedup`."""

    def __init__(
        self, codecs: dict[str, QuantizedCommCodecs] | None, fused_params: dict[str, Any], *, index_dedup: bool
    ) -> None:
        tables = EmbeddingCollectionSharder(
            fused_params=fused_params, qcomm_codecs_registry=codecs, use_index_dedup=index_dedup
        )
        super().__init__(tables, CountedIdsSharder(), qcomm_codecs_registry=codecs)

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ManagedTables:
        assert device is not None
        return ManagedTables(
            module,
            params,
            ec_sharder=cast(EmbeddingCollectionSharder, self._e_sharder),
            mc_sharder=self._mc_sharder,
            env=env,
            device=device,
        )


def split(embedding: FeatureEmbedding, ranks: int) -> None:
    """Split the managed tables, if there are any, over ranks. ValueError for rows that they cannot share evenly."""
    for module in embedding.managed.modules():
        if isinstance(module, RowsOfIds):
            rows = module.output_size()
            if rows % ranks:
                raise ValueError(
                    f"the {rows} rows of a table of model.managed_tables must be a multiple of the {ranks} ranks of "
                    f"this run, e.g. rows: {-(-rows // ranks) * ranks}"
                )
            module.split(ranks)


def review(embedding: FeatureEmbedding) -> None:
    """Review the managed tables, if there are any, as every checkpoint needs it."""
    for tables in embedding.managed.values():
        cast(ManagedTables, tables).review()


def check_ranks(path: Path, model: nn.Module, saved: int, ranks: int) -> None:
    """ValueError if `ranks` cannot go on with managed tables, if `model` has any, of a checkpoint of `saved` ranks."""
    if saved % ranks and any(isinstance(module, ManagedTables) for module in model.modules()):
        raise ValueError(
            f"{path} has managed tables of {saved} ranks, whose ids lie by ranges on each: {ranks} ranks cannot go on "
            f"with them, but divisors of {saved} can, e.g. {saved}"
        )
