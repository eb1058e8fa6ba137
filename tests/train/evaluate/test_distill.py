"""Soft labels of a teacher, stored or computed, and the adapter that corrects them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from modules.batch import RequestBatch
from modules.loss import ranking_loss
from tests.launching import TINY_DLRM, train_here
from tests.modules.factories import random_batch, random_spec
from train import evaluate
from train.checkpoint.load import checkpoints, read_meta
from train.config.schema import DistillConfig
from train.evaluate.distill import Distillation, StoredTeacher, StudentAdapter
from train.record.tracking import METRICS_FILE, read_metrics

CPU = torch.device("cpu")
TASKS = ("click", "like")


def stored(folder: Path, rows: list[int], tasks: tuple[str, ...] = TASKS) -> Path:
    columns = {f"{task}_probability": [0.1 * row + index / 2 for row in rows] for index, task in enumerate(tasks)}
    folder.mkdir()
    pq.write_table(pa.table({"row": rows, **columns}), folder / "part-00000.parquet")
    return folder


def test_stored_predictions_are_found_by_row_and_others_are_not_there(tmp_path: Path) -> None:
    batch = random_batch(random_spec())
    teacher = StoredTeacher(stored(tmp_path / "a", [4, 1, 2]), TASKS, CPU)
    nan = float("nan")
    expected = torch.tensor([[nan, nan], [0.1, 0.6], [0.2, 0.7], [nan, nan], [0.4, 0.9], [nan, nan], [nan, nan]])
    torch.testing.assert_close(teacher(batch), expected, equal_nan=True)


def test_predictions_that_do_not_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no predictions of task 'like'; its columns are click_probability|row, click"):
        StoredTeacher(stored(tmp_path / "a", [1], ("click",)), TASKS, CPU)
    with pytest.raises(ValueError, match=r"cannot be read .*; write it with python -m train.evaluate"):
        StoredTeacher(tmp_path / "absent", TASKS, CPU)


def test_the_loss_is_that_on_soft_labels_where_the_teacher_has_them() -> None:
    batch = random_batch(random_spec())
    soft = torch.rand(7, 2)
    soft[3] = torch.nan
    distillation = Distillation(lambda batch: soft, DistillConfig(weight=0.5), 2, CPU)
    logits = torch.randn(7, 2, requires_grad=True)
    known = torch.tensor([0, 1, 2, 4, 5, 6])
    expected = 0.5 * binary_cross_entropy_with_logits(logits[known], soft[known])
    torch.testing.assert_close(distillation.loss(logits, batch, None), expected)


def test_the_adapter_learns_what_the_teacher_has_not_seen() -> None:
    torch.manual_seed(0)
    adapter = StudentAdapter(2, 0.3, CPU)
    spec = random_spec()
    losses = []
    for step in range(400):
        batch = random_batch(spec, [4] * 32, seed=step)
        teacher = 2 * torch.randn(128, 2)
        batch = dataclasses.replace(batch, labels=torch.bernoulli((0.5 * teacher - 1).sigmoid()))
        corrected = adapter(teacher.sigmoid(), batch)
        raw, mine = (ranking_loss(each, batch.labels, batch.weights)[0] for each in (teacher, corrected.logit()))
        losses.append((float(raw), float(mine)))
    torch.testing.assert_close(adapter.weight, 0.5 * torch.eye(2), atol=0.1, rtol=0)
    torch.testing.assert_close(adapter.bias, -torch.ones(2), atol=0.15, rtol=0)
    raw, mine = torch.tensor(losses[200:]).mean(0)
    assert mine < 0.8 * raw


def test_the_adapter_starts_as_the_teacher_and_its_state_restores() -> None:
    torch.manual_seed(0)
    batch = random_batch(random_spec())
    soft = torch.rand(7, 2)
    soft[2, 1] = torch.nan
    adapter = StudentAdapter(2, 0.3, CPU)
    first = adapter(soft, batch)
    known = ~soft.isnan().any(1)
    torch.testing.assert_close(first[known], soft[known])
    assert first[2].isnan().all()
    other = StudentAdapter(2, 0.3, CPU)
    other.restore(adapter.state())
    second = adapter(soft, batch)
    assert not torch.equal(second, first)
    assert torch.equal(second[known], other(soft, batch)[known])


def test_labels_that_were_not_observed_do_not_move_the_adapter() -> None:
    batch = random_batch(random_spec())
    unlabelled: RequestBatch = dataclasses.replace(batch, labels=torch.full_like(batch.labels, torch.nan))
    adapter = StudentAdapter(2, 0.3, CPU)
    adapter(torch.rand(7, 2), unlabelled)
    assert adapter.state() == [1, 0, 0, 1, 0, 0]


def losses(run_dir: Path) -> list[float]:
    records = [record for record in read_metrics(run_dir / METRICS_FILE) if record.split == "train"]
    return [record.values["loss"] for record in records]


def test_a_run_learns_alike_from_a_checkpoint_and_from_its_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("runtime.steps=6", "data.num_requests=128", "precision=fp32")
    teacher = tmp_path / "teacher"
    train_here(teacher, *short, base=TINY_DLRM)
    evaluate.main([f"run_dir={teacher}", "split=train", f"out={tmp_path / 'scored'}", "runtime.device=cpu"])
    students = {
        "alone": (),
        "stored": (f"distill.predictions={tmp_path / 'scored' / 'predictions'}", "distill.weight=3"),
        "scoring": (f"distill.checkpoint={teacher}", "distill.weight=3"),
        "adapted": (f"distill.checkpoint={teacher}", "distill.weight=3", "distill.adapter=true"),
    }
    found = {}
    for name, overrides in students.items():
        train_here(tmp_path / name, *short, "runtime.seed=1", *overrides, base=TINY_DLRM)
        found[name] = torch.tensor(losses(tmp_path / name))
    # The same soft labels, but for the rounding of float32 on the way through a file.
    torch.testing.assert_close(found["stored"], found["scoring"], rtol=1e-4, atol=0)
    assert (found["alone"] - found["stored"]).abs().max() > 1e-4
    assert (found["adapted"] - found["stored"]).abs().max() > 1e-6

    saved = read_meta(checkpoints(tmp_path / "adapted" / "checkpoints")[-1])["progress"]["adapter"]
    assert len(saved) == 6
    assert saved != [1, 0, 0, 1, 0, 0]
    restored = []
    monkeypatch.setattr(StudentAdapter, "restore", lambda adapter, state: restored.append(state))
    further = ("runtime.steps=7", *short[1:], "runtime.seed=1", *students["adapted"])
    train_here(tmp_path / "adapted", *further, base=TINY_DLRM)
    assert restored == [saved]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("distill.predictions=a", "distill.checkpoint=b"), "name two teachers; leave one of them empty"),
        (("distill.adapter=true",), "distill.adapter=true corrects a teacher, and there is none"),
        (("+tasks.click.loss=squared", "distill.predictions=a"), "this run's tasks.click.loss=squared gives no probab"),
        (("distill.weight=-1",), "distill.weight=-1.0 must be at least 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_here(tmp_path / "run", *overrides, base=TINY_DLRM)
