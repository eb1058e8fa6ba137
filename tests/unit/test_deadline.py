"""Runs that train side by side under a time limit: where they stop, and that a trainer does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import compare, deadline
from train.checkpoint import Progress
from train.deadline import Deadline
from train.tracking import METRICS_FILE, Record
from train.trainer import Trainer


def log(run: Path, steps_and_times: list[tuple[int, float]]) -> Path:
    run.mkdir(exist_ok=True)
    records = [Record(step, "train", time, {"loss": 0.5}) for step, time in steps_and_times]
    (run / METRICS_FILE).write_text("".join(record.to_json() + "\n" for record in records))
    return run


def test_all_stop_where_the_slowest_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(time=lambda: now[0]))
    file, runs = tmp_path / "stop.json", [tmp_path / "fast", tmp_path / "slow"]
    limit, plenty = (Deadline(seconds, runs, 1000, tmp_path / name) for seconds, name in ((100, file), (400, "none")))
    log(runs[0], [(100, 1010.0), (200, 1020.0)])  # ten steps a second
    now[0] = 1030.0
    limit.check()
    now[0] = 1050.0
    limit.check()
    assert not file.exists()  # first it was too early, then nothing was known of the other run
    log(runs[1], [(100, 1020.0), (200, 1040.0)])  # five: 500 after a hundred seconds
    limit.check()
    assert json.loads(file.read_text()) == 500
    now[0] = 1399.0
    plenty.check()
    assert not (tmp_path / "none").exists()


def test_a_run_that_is_past_it_stops_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "time", SimpleNamespace(time=lambda: 100.0))
    runs = [log(tmp_path / "fast", [(800, 0.0), (900, 1.0)]), log(tmp_path / "slow", [(100, 0.0), (200, 100.0)])]
    Deadline(0, runs, 2000, tmp_path / "stop.json").check()
    assert json.loads((tmp_path / "stop.json").read_text()) == 1100


def test_a_trainer_stops_after_the_step_of_its_file(tmp_path: Path) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.world = SimpleNamespace(is_first=True, broadcast=lambda value: value)  # type: ignore[assignment]
    trainer.config = SimpleNamespace(runtime=SimpleNamespace(early_stop=0))  # type: ignore[assignment]
    trainer.progress, trainer.total_steps = Progress(step=40), 100
    trainer._look_for_stop(tmp_path / "stop.json")
    assert trainer.total_steps == 100
    for stop, total in ((60, 60), (20, 40)):
        (tmp_path / "stop.json").write_text(json.dumps(stop))
        trainer._look_for_stop(tmp_path / "stop.json")
        assert trainer.total_steps == total
    assert trainer._finished()


def test_a_limit_needs_all_runs_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+experiment=synthetic", "runtime.steps=3", "--train-seconds", "9", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert "add --jobs N" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--jobs 6"):
        compare.main([*arguments, "--jobs", "5"])
