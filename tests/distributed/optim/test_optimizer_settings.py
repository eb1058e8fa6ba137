"""Decay of tables, groups of parameters and the first rows of tables, through the optimisers that a run has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modules.layers.embedding.tokens import FeatureEmbedding
from tests.distributed.checkpoint.test_resume import training
from tests.distributed.test_step import Step
from tests.launching import TINY_DLRM, train_here
from tests.modules.factories import random_batch, random_spec
from tests.processes import run_ranks
from train.config.schema import GroupConfig, OptimizerConfig
from train.optim.dense import Optimizer
from train.process import distributed
from train.record.tracking import METRICS_FILE, read_metrics

LR, DECAY = 0.1, 0.5


def after_one_step(**settings: object) -> tuple[Step, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    step = Step(OptimizerConfig(**({"sparse_lr": LR, "warmup_steps": 0} | settings)))
    before = step.shards()
    step.pipeline.progress(iter([random_batch(step.spec)]))
    return step, before, step.shards()


def looked_up(name: str, rows: torch.Tensor) -> torch.Tensor:
    """[rows] bool: those of a table that the batch has, also where their gradient is zero."""
    spec = random_spec()
    lookup = random_batch(spec).packed().lookup
    ids = [lookup[feature].values() for feature, table in spec.lookups() if f".{table}." in name]
    return torch.isin(torch.arange(len(rows)), torch.cat(ids))


def _decay() -> None:
    _, before, plain = after_one_step()
    _, _, decayed = after_one_step(sparse_weight_decay=DECAY)
    for name, rows in before.items():
        touched = looked_up(name, rows)
        assert touched.any()
        assert torch.equal(decayed[name][~touched], rows[~touched])
        expected = plain[name] - LR * DECAY * rows
        torch.testing.assert_close(decayed[name][touched], expected[touched], rtol=1e-5, atol=1e-6)
    distributed.stop()


def test_tables_decay_in_rowwise_adagrad() -> None:
    run_ranks(_decay, 1)


def _groups() -> None:
    groups = [
        GroupConfig(match=["*.embeddings.user"], lr=2 * LR, weight_decay=DECAY),
        GroupConfig(match=["arch.events"], lr=0.0),
        GroupConfig(match=["arch.*"], lr=0.3, weight_decay=0.0),
    ]
    _, before, plain = after_one_step()
    step, _, grouped = after_one_step(groups=groups, lr=0.2)
    for name, rows in before.items():
        expected = plain[name]
        if ".user." in name:
            touched = looked_up(name, rows)[:, None]
            expected = rows + 2 * (plain[name] - rows) - torch.where(touched, 2 * LR * DECAY * rows, 0)
        torch.testing.assert_close(grouped[name], expected, rtol=1e-5, atol=1e-6)
    rates = {
        name: (group["lr"], group["weight_decay"])
        for group in step.optimizer.adam.param_groups
        for name, param in step.optimizer.params.items()
        if any(param is each for each in group["params"])
    }
    peak = step.optimizer.factor(1)
    assert rates["arch.events.weight"] == (0.0, 0.01)
    assert rates["arch.tokens.weight"] == (pytest.approx(0.3 * peak), 0.0)
    assert rates["embedding.assemble.request_dense.weight"] == (pytest.approx(0.2 * peak), 0.01)
    assert rates["embedding.assemble.request_dense.bias"] == (pytest.approx(0.2 * peak), 0.0)
    distributed.stop()


def test_groups_have_rates_and_decays_of_their_own() -> None:
    run_ranks(_groups, 1)


def test_a_run_with_everything_resumes_where_it_stopped(tmp_path: Path) -> None:
    keys = (
        "optimizer.dense=torch.optim.NAdam", "optimizer.schedule=cosine", "model.table_std=0.01",
        "optimizer.sparse_weight_decay=0.1", "model.embedding_dropout=0.2", "+data.id_dropout.user=0.2",
        "data.history_dropout=0.2", "optimizer.groups=[{match: [arch.heads], lr: 0.01}]", "runtime.steps=4",
        "checkpoint.every=2", "checkpoint.keep=9",
    )  # fmt: skip
    whole = tmp_path / "whole"
    train_here(whole, *keys, base=TINY_DLRM)
    resumed = tmp_path / "resumed" / "checkpoints"
    resumed.mkdir(parents=True)
    (whole / "checkpoints" / "step_00000002").rename(resumed / "step_00000002")
    train_here(resumed.parent, *keys, base=TINY_DLRM)
    losses = [[record.values["loss"] for record in training(run)] for run in (whole, resumed.parent)]
    assert losses[0][2:] == losses[1]


def test_validations_within_an_epoch(tmp_path: Path) -> None:
    train_here(tmp_path, "runtime.evals_per_epoch=3", "runtime.epochs=1", "runtime.steps=0", "data.num_requests=90",
               "data.batch_size=10", base=TINY_DLRM)  # fmt: skip
    records = [record for record in read_metrics(tmp_path / METRICS_FILE) if record.split == "valid"]
    assert [record.step for record in records] == [3, 6, 9]


def test_schedules() -> None:
    def rates(**settings: object) -> list[float]:
        optimizer = object.__new__(Optimizer)
        optimizer.config, optimizer.total_steps = OptimizerConfig(warmup_steps=2, min_lr=0.1, **settings), 12
        return [optimizer.factor(index) for index in range(13)]

    assert rates(schedule="constant") == [0.5, *[1.0] * 12]
    cosine = rates(schedule="cosine")
    assert cosine[7] == pytest.approx(0.55)
    assert cosine[12] == pytest.approx(0.1)


def test_tables_start_at_the_scale_that_is_asked_for() -> None:
    for std in (None, 0.01):
        embedding = FeatureEmbedding(random_spec(), 16, "cpu", {"user": 64}, table_std=std)
        for width, table in (
            (16, embedding.collection.embeddings["item"]),
            (64, embedding.further["64"].embeddings["user"]),
        ):
            found = table.weight.std().item()
            assert found == pytest.approx(std or width**-0.5, rel=0.15)


def test_embedding_dropout_in_training_only() -> None:
    spec = random_spec()
    embedding = FeatureEmbedding(spec, 16, "cpu", dropout=0.5)
    batch = random_batch(spec, [2] * 50).packed()
    dropped = embedding(batch).candidate[:, 0]
    kept = dropped != 0
    assert 0.4 < kept.float().mean() < 0.6
    embedding.eval()
    torch.testing.assert_close(dropped[kept], 2 * embedding(batch).candidate[:, 0][kept])
