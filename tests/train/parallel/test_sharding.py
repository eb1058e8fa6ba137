"""What the sharding planner is told, by what it makes of it; nothing is sharded and no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models.ranking import RankingModel
from train.config.compose import to_config
from train.config.files import composed
from train.data import build_source
from train.optim import sparse
from train.parallel.dedup import unique_ids
from train.parallel.prefetch import cached
from train.process.distributed import World

LONG_HISTORIES = (
    "+experiment=synthetic",
    "model.dim=64",
    "data.batch_size=2048",
    "data.num_requests=1000",
    "data.mean_history=100",
    "data.max_history=200",
    "data.history_sigma=0",
    "parallel.hbm_gib=80",
)


def planned(ranks: int, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, ParameterSharding]:
    """Shards of each table on so many GPUs of one host."""
    config = to_config(composed([*LONG_HISTORIES, *overrides]))
    source = build_source(config.data)
    model = RankingModel(FeatureEmbedding(source.spec, config.model.dim), nn.Identity())
    group: object = None
    world = World(0, ranks, 0, ranks, torch.device("cuda"), group, group, group)  # type: ignore[arg-type]
    monkeypatch.setattr(World, "broadcast", lambda world, value: value)
    plan = sparse.plan_tables(model, [EmbeddingCollectionSharder()], config, world, sparse.ids_per_request(source))
    ((_, tables),) = plan.plan.items()
    return dict(tables)  # type: ignore[call-overload]


def test_ids_per_request_count_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    config = to_config(composed([*LONG_HISTORIES, "data.candidates=3"]))
    ids = sparse.ids_per_request(build_source(config.data))
    assert (ids["user"], ids["item"], ids["click.item"]) == (1, 3, 100)


def test_tables_of_long_histories_are_shared_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = planned(4, monkeypatch)
    assert [tables[name].ranks for name in ("item", "category")] == [[0, 1, 2, 3]] * 2


def test_a_narrow_table_splits_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    item = planned(2, monkeypatch, "parallel.sharding_types=[column_wise]")["item"]
    assert item.ranks == [0, 1]
    assert [shard.shard_sizes[1] for shard in item.sharding_spec.shards] == [32, 32]  # type: ignore[union-attr]


def test_tables_with_a_moment_a_row_split_by_columns_only_if_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("model.dim=256", "data.num_users=10000000")
    adam = planned(4, monkeypatch, *wide, "optimizer.sparse=adam")
    assert "column_wise" in {table.sharding_type for table in adam.values()}  # what the planner likes best
    adagrad = planned(4, monkeypatch, *wide, "optimizer.sparse=rowwise_adagrad")
    assert "column_wise" not in {table.sharding_type for table in adagrad.values()}


def test_tables_that_a_gpu_cannot_hold_lie_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    item = planned(1, monkeypatch, "data.num_items=100000000", "parallel.hbm_gib=8")["item"]
    assert item.compute_kernel.startswith("fused_uvm")


def test_tables_that_fit_nowhere_are_told_by_the_keys_that_say_how_much_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"insufficient storage.* 8 GiB of its GPU \(parallel\.hbm_gib\) and 1.0 GiB"):
        planned(1, monkeypatch, "data.num_items=100000000", "parallel.hbm_gib=8", "parallel.host_gib=1")


def test_tables_with_rules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (
        "{match: [context_*], sharding_types: [data_parallel]}",
        "{match: [item], sharding_types: [row_wise], kernels: [fused_uvm_caching], cache_share: 0.1}",
        "{match: [item, user], sharding_types: [table_wise]}",  # the first that matches counts
    )
    tables = planned(4, monkeypatch, f"parallel.tables=[{','.join(rules)}]")
    assert {tables[name].sharding_type for name in tables if name.startswith("context")} == {"data_parallel"}
    assert (tables["item"].sharding_type, tables["item"].compute_kernel) == ("row_wise", "fused_uvm_caching")
    assert tables["item"].cache_params is not None
    assert tables["item"].cache_params.load_factor == 0.1
    assert tables["user"].sharding_type == "table_wise"
    assert cached(ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)}))
    del tables["item"]
    assert not cached(ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)}))
    with pytest.raises(ValueError, match=r"parallel\.tables: 'itme' matches no module and no parameter; .* item"):
        planned(4, monkeypatch, "parallel.tables=[{match: [itme]}]")


def test_a_rank_on_its_own_holds_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {table.sharding_type for table in planned(1, monkeypatch).values()} == {"table_wise"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optimizer.sparse=adam", r"optimizer\.sparse=adam has no fused CPU kernel; use .*=rowwise_adagrad"),
        ("parallel.prefetch_tables=true", r"a CPU has none; use parallel\.prefetch_tables=false"),
    ],
)
def test_what_has_no_kernel_for_the_cpu_is_refused_there(option: str, message: str) -> None:
    config = to_config(composed([option]))
    group: object = None
    world = World(0, 1, 0, 1, torch.device("cpu"), group, group, group)  # type: ignore[arg-type]
    model = RankingModel(nn.Identity(), nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        sparse.shard(model, config, world, {})


def test_a_frozen_table_cannot_be_data_parallel() -> None:
    group: object = None
    world = World(0, 1, 0, 1, torch.device("cpu"), group, group, group)  # type: ignore[arg-type]
    rule = "parallel.tables=[{match: [user], sharding_types: [data_parallel]}]"
    config = to_config(composed([*LONG_HISTORIES, rule]))
    model = RankingModel(FeatureEmbedding(build_source(config.data).spec, 16), nn.Identity())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="user cannot be"):
        sparse.shard(model, config, world, {})


def test_ids_are_sent_once_for_each_table() -> None:
    # Two examples, three features; the first two have one table of 10 rows, the last one has a table of 5.
    starts, features = torch.tensor([0, 0, 10, 15]), torch.tensor([0, 2, 2, 3])
    ids = torch.tensor([7, 7, 3, 9, 3, 4, 4, 0])
    offsets = torch.tensor([0, 2, 3, 5, 5, 8, 8])
    lengths, places, unique, reverse = unique_ids(starts, features, offsets, ids)
    assert unique.tolist() == [3, 7, 9, 0, 4]
    assert torch.equal(unique[reverse], ids)
    assert lengths.tolist() == [1, 1, 1, 0, 1, 1]
    assert places.tolist() == [0, 1, 2, 3, 3, 4, 5]
    none = torch.zeros(7, dtype=torch.int64)
    assert [part.tolist() for part in unique_ids(starts, features, none, ids[:0])] == [[0] * 6, [0] * 7, [], []]
