"""`parallel.table_ranks`: groups of ranks that hold copies of the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.checkpoint.test_resume import training
from tests.distributed.parallel.test_dense_parallel import CONSTANT, saved
from tests.distributed.test_step import Step
from tests.launching import TINY_DLRM, train_ranks
from tests.modules.factories import random_batch
from tests.processes import run_ranks
from train.checkpoint import load as checkpoint
from train.checkpoint.progress import Progress
from train.checkpoint.save import Checkpointer
from train.config.schema import OptimizerConfig
from train.process import distributed

MESH = ((0, 1), (2, 3))  # the ranks of each copy


def _train(step: Step, seed: int, *, averaged: bool) -> None:
    batches = iter([random_batch(step.spec, seed=seed + 10 * step.world.rank + index) for index in range(2)])
    for _ in range(2):
        step.pipeline.progress(batches)
        if averaged and step.copies is not None:
            step.copies.average()


def _save(step: Step, folder: Path, number: int) -> Path:
    about = {"config": {}, "data_fingerprint": ""}
    return Checkpointer(folder, 9, False, step.world).save(step.model, step.optimizer, Progress(number), about)


def _agrees(step: Step) -> dict[str, bool]:
    """Whether this rank's part of each table, and of its moments, is that of the same rank of the other group."""
    moments = step.model.fused_optimizer.state_dict()["state"]
    parts = step.shards() | {
        name: torch.cat([shard.tensor for shard in moment.local_shards()])
        for state in moments.values()
        for name, moment in state.items()
    }
    agrees = {}
    for name, part in parts.items():
        everyone: list[Tensor | None] = [None] * 4
        dist.all_gather_object(everyone, part, group=step.world.host_group)
        first, second = (
            torch.cat([part for part in (everyone[rank] for rank in group) if part is not None]) for group in MESH
        )
        agrees[name] = torch.equal(first, second)
    return agrees


def _whole_state(folder: Path) -> None:
    adagrad = OptimizerConfig(warmup_steps=0)
    one = Step(adagrad)
    _train(one, 0, averaged=False)
    _save(one, folder, 1)
    copies = Step(adagrad, table_ranks=2)
    assert copies.copies is not None
    assert all(_agrees(copies).values())  # fresh weights
    checkpoint.load(folder / "step_00000001", copies.model, copies.optimizer, copies.world)
    _save(copies, folder, 2)
    _train(copies, 100, averaged=False)
    apart = _agrees(copies)
    assert not any(apart.values())
    assert any("momentum1" in name for name in apart)
    copies.copies.average()
    assert all(_agrees(copies).values())
    _save(copies, folder, 3)
    again = Step(adagrad)
    checkpoint.load(folder / "step_00000003", again.model, again.optimizer, again.world)
    _save(again, folder, 4)


def _sgd(folder: Path) -> None:
    """Means of steps are steps by means of gradients where a step is linear in them."""
    sgd = OptimizerConfig(sparse="sgd", sparse_lr=1.0, warmup_steps=0)
    start = _save(Step(sgd), folder, 5)
    for number, table_ranks in ((6, 0), (7, 2)):
        step = Step(sgd, table_ranks=table_ranks)
        checkpoint.load(start, step.model, step.optimizer, step.world)
        _train(step, 0, averaged=True)
        _save(step, folder, number)


def _copies(folder: Path) -> None:
    _whole_state(folder)
    _sgd(folder)
    distributed.stop()


def test_one_copy_and_two_load_each_others_state_and_agree(tmp_path: Path) -> None:
    run_ranks(_copies, 4, tmp_path)
    first, second, third, fourth, start, one, copies = (
        saved(tmp_path / f"step_0000000{number}") for number in range(1, 8)
    )
    assert any(name.endswith("momentum1") for name in first)
    for before, after in ((first, second), (third, fourth)):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(
        first["tables.state.embedding.collection.embeddings.user.weight.user.momentum1"],
        third["tables.state.embedding.collection.embeddings.user.weight.user.momentum1"],
    )
    for name in one:
        if name.startswith("model."):
            # Sums over ranks are taken in another order.
            torch.testing.assert_close(copies[name], one[name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(one[name], start[name])


def test_a_run_goes_on_with_copies_and_its_loss_stays_close(tmp_path: Path) -> None:
    whole, copies = tmp_path / "whole", tmp_path / "copies"
    kinds = "{match: [context_*], sharding_types: [data_parallel]},{match: [user], sharding_types: [table_wise]}"
    options = (
        f"parallel.tables=[{kinds}]",
        "precision=fp32",
        "checkpoint.every=3",
        "runtime.steps=6",
        "runtime.eval_steps=1",
    )
    base = (*TINY_DLRM, *CONSTANT, *options, "data.batch_size=8")
    train_ranks(4, whole, base=base)
    shutil.copytree(whole / "checkpoints" / "step_00000003", copies / "checkpoints" / "step_00000003")
    layout = ("parallel.table_ranks=2", "parallel.table_average_every=2", "parallel.index_dedup=true")
    train_ranks(4, copies, *layout, "parallel.dense=hsdp", "parallel.shard_ranks=2", base=base)
    expected = [record.values["loss"] for record in training(whole)][3:]
    actual = [record.values["loss"] for record in training(copies)]
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)  # the same weights
    assert actual != expected
    # Copies are a step apart, and moments are means of squares of two groups' gradients.
    assert actual == pytest.approx(expected, rel=1e-3)
