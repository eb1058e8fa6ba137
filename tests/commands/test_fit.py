"""What a configuration takes on a rank: bytes by hand, and which settings save most."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from modules.models import build as build_arch
from tests.launching import TINY
from train.commands.fit import Fit, fit
from train.commands.fit import _model as model_of
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.data import build_source


def config(*overrides: str) -> Config:
    return to_config(composed([*TINY, "model.num_layers=1", "precision=bf16", *overrides]))


@functools.cache
def report(*overrides: str, ranks: int = 1, gpu_gib: float = 1) -> Fit:
    return fit(config(*overrides), ranks, node_ranks=8, gpu_gib=gpu_gib)


def test_tables_and_their_moments_are_those_of_the_plan() -> None:
    rows = sum(build_source(config().data).spec.tables.values())
    assert report().parts["tables"] == rows * 16 * 4
    assert report().parts["optimiser of tables"] == rows * 4
    assert report("optimizer.sparse=adam").parts["optimiser of tables"] == rows * 16 * 8
    everywhere = report("parallel.sharding_types=[row_wise]", ranks=4).parts
    assert rows * 16 <= everywhere["tables"] < 1.1 * rows * 16  # the first ranks have up to a row more of each table
    copies = report("parallel.sharding_types=[row_wise]", "parallel.table_ranks=2", ranks=4)
    assert 2 * rows * 16 <= copies.parts["tables"] < 2.2 * rows * 16
    saved = {change.setting: change.saved for change in copies.changes}["parallel.table_ranks=0"]
    assert saved == (copies.parts["tables"] + copies.parts["optimiser of tables"]) // 2


def test_the_dense_part_is_that_of_its_layout() -> None:
    arch = build_arch(config().model, build_source(config().data).spec)
    dense = sum(parameter.numel() for parameter in arch.parameters())
    parts = report("optimizer.ema_decay=0.9", "optimizer.accumulate=2", ranks=4).parts
    assert dense * 4 <= parts["dense weights"] < 1.2 * dense * 4  # with what makes tokens of numbers
    weights = parts["dense weights"]
    assert parts["dense optimiser"] == 2 * weights
    assert parts["averaged weights"] == parts["sums of an accumulation"] == parts["dense gradients"] == weights
    sharded = report("parallel.dense=fsdp", ranks=4).parts
    assert sharded["dense optimiser"] == pytest.approx(weights / 2, rel=0.01)
    assert "averaged weights" not in sharded
    routed = [report("model=interformer_moe", *options, ranks=4) for options in ((), ("parallel.expert_ranks=4",))]
    model = model_of(config("model=interformer_moe"), source := build_source(config().data), source.spec)
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    saved = routed[0].parts["dense weights"] - routed[1].parts["dense weights"]
    assert saved == of_experts * 4 * 3 // 4


def test_long_histories_are_sampled_in_fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = report().parts["activations and looked-up rows"]
    monkeypatch.setattr("train.commands.fit.SAMPLED_EVENTS", 60)
    few = report.__wrapped__().parts["activations and looked-up rows"]
    assert few == pytest.approx(whole, rel=0.3)  # lengths differ from one request to another
    assert few != whole


def test_activations_grow_with_the_batch_and_shrink_where_layers_run_again() -> None:
    small, large = (report(f"data.batch_size={size}").parts["activations and looked-up rows"] for size in (16, 64))
    assert large == pytest.approx(4 * small, rel=1e-3)
    again = report("parallel.recompute=[arch.*]").parts["activations and looked-up rows"]
    assert again < 0.7 * small


def test_precision_is_what_gpus_settle_on() -> None:
    assert report("precision=auto").parts == report().parts


def test_ids_of_a_batch_are_counted_once_for_each_table() -> None:
    result = report("data.batch_size=64")
    source = build_source(config().data)
    lookup = source.batch("train", np.linspace(0, source.num_requests("train") - 1, 64).astype(np.int64)).lookup
    rows = {(table, row) for name, table in source.spec.lookups() for row in lookup[name].values().tolist()}
    assert (result.ids, result.unique_ids) == (lookup.values().numel(), len(rows))
    assert f"{result.ids:,}, {len(rows):,} different" in result.report()


def test_what_does_not_fit_names_the_three_settings_that_save_most() -> None:
    result = report("model.dim=64", "data.batch_size=512", ranks=2, gpu_gib=0.01)
    assert not result.fits
    lines = result.report().splitlines()
    changes = lines[lines.index(next(line for line in lines if line.startswith("does not fit"))) + 1 :]
    assert len(changes) == 3
    assert "data.batch_size=256" in "".join(changes)
    assert [change.saved for change in result.changes] == sorted((c.saved for c in result.changes), reverse=True)
    named = next(change for change in result.changes if change.setting.startswith("data.batch_size"))
    smaller = report("model.dim=64", "data.batch_size=256", ranks=2, gpu_gib=0.01)
    assert result.total - smaller.total == pytest.approx(named.saved, rel=1e-3)
    assert "fits, with" in report(gpu_gib=80).report()


def test_tables_that_cannot_be_planned_are_said_to_be_so() -> None:
    result = report("data.num_items=100000000", "parallel.host_gib=1", gpu_gib=1)
    assert "tables cannot be planned" in result.report()
    assert result.parts["tables"] > 100_000_000 * 16 * 4
    assert not result.fits
