"""`model.managed_tables` on ranks: they train, resume, and give rows that change hands a new beginning."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modules.config import ManagedTable
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.pretrained import WEIGHTS
from tests.distributed.checkpoint.test_resume import training
from tests.distributed.parallel.test_dense_parallel import CONSTANT, saved
from tests.distributed.test_step import Step
from tests.launching import TINY_DLRM, train_ranks
from tests.modules.factories import random_batch
from tests.processes import run_ranks
from train.checkpoint import load as checkpoint
from train.commands import export
from train.config.compose import from_dict
from train.config.schema import OptimizerConfig
from train.data import build_source
from train.metrics.predictions import read_predictions
from train.parallel.managed import ManagedTables, check_ranks, split
from train.process import distributed
from train.serving.scorer import Scorer

ROWS_OF_ITEMS = "_managed_collision_collection._managed_collision_modules.item"

BASE = (
    *TINY_DLRM,
    *CONSTANT,
    "precision=fp32",
    "+model.managed_tables={item: {rows: 64, every: 2, min_count: 2}}",
    "checkpoint.every=3",
    "runtime.eval_steps=1",
)


def test_a_run_resumes_bit_for_bit_and_on_divisors_of_its_ranks(tmp_path: Path) -> None:
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    options = ("runtime.steps=6", "parallel.index_dedup=true")
    train_ranks(2, whole, *options, base=BASE)
    for run in (resumed, alone):  # step 3 is between two reviews
        shutil.copytree(whole / "checkpoints" / "step_00000003", run / "checkpoints" / "step_00000003")
    train_ranks(2, resumed, *options, base=BASE)
    expected, actual = (
        {record.step: record.values["loss"] for record in training(run) if record.step > 3} for run in (whole, resumed)
    )
    assert actual == expected
    first, second = (saved(run / "checkpoints" / "step_00000006") for run in (whole, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    (counts,) = (tensor for name, tensor in first.items() if name.endswith("_mch_counts"))
    assert int((counts > 0).sum()) > 32  # of 64 rows
    _scores_as_it_evaluated(resumed)
    train_ranks(1, alone, "runtime.steps=4", "data.batch_size=32", base=BASE)
    # But for ids without a row, which share another one, it is the same model.
    assert training(alone)[0].values["loss"] == pytest.approx(expected[4], rel=2e-2)


def _scores_as_it_evaluated(run_dir: Path) -> None:
    """An export of a run on two ranks looks up the rows that the run evaluated with, also for ids without one."""
    out = export.main([f"run_dir={run_dir}", "runtime.device=cpu"])
    scorer, evaluated = Scorer(out), read_predictions(run_dir / "predictions" / "test")
    config = from_dict(checkpoint.read_meta(checkpoint.resolve(str(run_dir), ""))["config"], [])
    source = build_source(config.data)
    requests = np.arange(source.num_requests("test"))
    batch = source.batch("test", requests)
    assert np.array_equal(batch.row, evaluated["row"])
    np.testing.assert_allclose(scorer(batch)[:, 0], evaluated["click_probability"], rtol=1e-5)
    one = source.batch("test", requests[:1])  # by the exported program
    np.testing.assert_allclose(scorer(one)[:, 0], evaluated["click_probability"][: one.num_candidates], rtol=1e-5)
    known = load_file(out / WEIGHTS)[f"embedding.managed.16.{ROWS_OF_ITEMS}._mch_sorted_raw_ids"]
    assert 0 < int(torch.isin(batch.candidate_sparse["item"].values(), known).sum()) < batch.num_candidates


def _begins_anew() -> None:
    managed = {name: ManagedTable(rows=8, every=1) for name in ("item", "user", "tag")}
    step = Step(OptimizerConfig(warmup_steps=0), managed=managed)
    step.pipeline.progress(iter([random_batch(step.spec, seed=0)]))
    (tables,) = (module for module in step.model.modules() if isinstance(module, ManagedTables))
    weight = tables._embedding_module.embeddings.get_parameter("item.weight")
    (moments,) = (
        shard.tensor
        for state in step.model.fused_optimizer.state_dict()["state"].values()
        for name, moment in state.items()
        if name.startswith("item.")
        for shard in moment.local_shards()
    )
    before, sums = weight.detach().clone(), moments.clone()
    learned = sums.nonzero().flatten()
    assert len(learned) > 2
    tables._evict({"item": learned[:2]})
    assert (moments[learned[:2]] == 0).all()
    assert (weight[learned[:2]] != before[learned[:2]]).all()
    kept = torch.ones(8, dtype=torch.bool)
    kept[learned[:2]] = False
    assert torch.equal(weight[kept], before[kept])
    assert torch.equal(moments[kept], sums[kept])
    with pytest.raises(ValueError, match=r"the 9 rows .* multiple of the 2 ranks .* rows: 10"):
        split(FeatureEmbedding(step.spec, 8, managed_tables={"item": ManagedTable(rows=9)}), 2)
    with pytest.raises(ValueError, match="managed tables of 3 ranks.* 2 ranks cannot go on .* divisors of 3 can"):
        check_ranks(Path("step_00000001"), step.model, saved=3, ranks=2)
    distributed.stop()


def test_a_row_that_changes_hands_begins_anew_with_its_moment() -> None:
    run_ranks(_begins_anew, 1)
