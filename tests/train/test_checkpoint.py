"""Where a run stands, as its checkpoints tell it, and a save that fails."""

from __future__ import annotations

import json
import math
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from train.checkpoint.compatible import check_data
from train.checkpoint.load import newest_intact
from train.checkpoint.manifest import SummedFiles
from train.checkpoint.progress import Progress
from train.checkpoint.save import Checkpointer
from train.config.schema import RuntimeConfig
from train.process import distributed
from train.process.distributed import World


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 16), (1, 16), (4, 16), (2, 5)])
def test_a_run_that_goes_on_with_other_batches_sees_every_request_once_an_epoch(ranks: int, batch_size: int) -> None:
    progress = Progress(step=3, consumed=96)  # of 500, by batches of 32
    total = progress.step + progress.steps_left(500, ranks * batch_size, epochs=2)
    while progress.step < total:
        progress.step, progress.consumed = progress.step + 1, min(progress.consumed + ranks * batch_size, 500)
        if progress.consumed == 500:
            progress.epoch, progress.consumed = progress.epoch + 1, 0
    assert (progress.epoch, progress.consumed) == (2, 0)
    assert progress.steps_left(500, 32, epochs=2) == 0
    assert Progress().steps_left(500, 32, epochs=2) == 32


@pytest.mark.reliability(
    "the disk is full when a checkpoint is written",
    "the error says so; whole checkpoints stay, the next save removes the remains",
)
def test_a_save_that_fails_says_why_and_the_next_one_clears_its_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    model.fused_optimizer = SimpleNamespace(state_dict=lambda: {"state": {}})  # type: ignore[assignment]
    about = cast(Any, (model, SimpleNamespace(state_dict=dict), Progress(step=3), {}))
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    checkpoints = Checkpointer(tmp_path, keep=1, asynchronous=True, world=world)

    def disk_full(*_: object, **__: object) -> None:
        raise CheckpointException("write", {0: (OSError(28, "No space left on device"), StackSummary())})

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", disk_full)
        checkpoints.save(*about)
        with pytest.raises(RuntimeError, match=r"step_00000003 could not be written .*No space left.* MiB are free"):
            checkpoints.wait()
        with pytest.raises(RuntimeError, match="could not be written"):
            checkpoints.check()  # what a run asks on its way
    (tmp_path / "step_00000001.partial").mkdir()
    checkpoints = Checkpointer(tmp_path, keep=1, asynchronous=True, world=world)
    checkpoints.save(*about)
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    distributed.stop()


def test_a_task_without_an_ne_leaves_the_judgement_to_the_others() -> None:
    rates = {"click": 0.3, "buy": 0.1, "seen": 1.0}
    equal = dict.fromkeys(rates, 1 / 3)

    def values(click: float, rate_of_buys: float = math.nan) -> dict[str, float]:
        ne = {"click/ne": click, "buy/ne": math.nan, "seen/ne": math.nan}
        return ne | {"click/label_rate": 0.3, "buy/label_rate": rate_of_buys, "seen/label_rate": 1.0}

    progress = Progress(step=1)
    progress.judge(values(0.9), rates, equal)
    progress.step = 2
    progress.judge(values(0.8), rates, equal)
    assert (progress.best_ne, progress.best_step, progress.stale_validations) == (0.8, 2, 0)
    progress.step = 3
    progress.judge(values(0.9), rates, equal)
    assert (progress.best_step, progress.stale_validations) == (2, 1)
    progress.judge(values(0.7, rate_of_buys=0.1), rates, equal)  # buys were seen, so the model's logits are NaN
    assert (progress.best_step, progress.stale_validations) == (2, 2)
    progress.judge(values(math.nan), {"seen": 1.0}, equal)
    assert progress.stale_validations == 2


def test_labels_that_decide_nothing_leave_the_judgement_to_other_tasks_and_an_infinite_metric_does_not() -> None:
    values = {"click/label_rate": 0.3, "click/ne": 0.8, "order/pair_accuracy": math.nan, "watch/nmse": math.nan}
    others = {"order": ("pair_accuracy", True), "watch": ("nmse", False)}
    shares = dict.fromkeys(("click", "order", "watch"), 1 / 3)
    progress = Progress(step=1)
    progress.judge(values, {"click": 0.3}, shares, others)
    assert (progress.best_ne, progress.best_step) == (pytest.approx(0.8), 1)
    progress.step = 2
    progress.judge(values | {"click/ne": 0.1, "watch/nmse": math.inf}, {"click": 0.3}, shares, others)
    assert (progress.best_step, progress.stale_validations) == (1, 1)


def test_the_best_validation_is_the_one_of_the_tasks_that_count() -> None:
    rates = dict.fromkeys(("click", "buy", "seen"), 0.3)
    rated = {f"{task}/label_rate": 0.3 for task in rates}
    shares = {"click": 0.75, "buy": 0.25, "seen": 0.0}
    progress = Progress(step=1)
    progress.judge(rated | {"click/ne": 0.8, "buy/ne": 1.0, "seen/ne": 0.5}, rates, shares)
    assert progress.best_ne == pytest.approx(0.85)
    progress.step = 2
    progress.judge(rated | {"click/ne": 0.9, "buy/ne": 0.8, "seen/ne": math.nan}, rates, shares)
    assert progress.best_step == 1


@pytest.mark.reliability(
    "a shared file system shows a node a new checkpoint late",
    "all ranks resume from the checkpoint that rank 0 sees",
)
def test_ranks_resume_from_the_checkpoint_that_the_first_one_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.checkpoint.manifest.verify", lambda path, world: None)
    seen = tmp_path / "step_00000003"
    late = cast(World, SimpleNamespace(by_first=lambda own: [seen]))  # a node that is shown the folder later
    assert newest_intact(tmp_path, late) == seen
    seen.mkdir()
    none = cast(World, SimpleNamespace(by_first=lambda own: []))
    assert newest_intact(tmp_path, none) is None


def test_a_file_that_is_closed_is_not_flushed_once_more(tmp_path: Path) -> None:
    """Which the interpreter does when it lets go of the stream; Python 3.14 printed the error."""
    files = SummedFiles()
    with files.create_stream(tmp_path / "file", "wb") as stream:
        stream.write(b"ab")
    stream.close()
    assert files.sums["file"]["bytes"] == 2


def test_a_run_that_resumes_on_other_rows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = {"config": {}, "progress": {}, "data_fingerprint": "ids"}
    counts = {"train": 10, "click": 0.25, "buy": math.nan}
    for number, saved in enumerate((about, about | {"data_counts": counts})):  # the former by an earlier version
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "meta.json").write_text(json.dumps(saved))
        check_data(tmp_path / str(number), "ids", counts)
        check_data(tmp_path / str(number), "ids")
    assert not caplog.messages
    check_data(tmp_path / "1", "ids", counts | {"click": 0.5})
    assert "requests and label rates were {'train': 10, 'click': 0.25" in caplog.text
