"""`train.speed` and `launch.scaling`: speeds without a checkpoint, on several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import scaling
from tests.launching import TINY, train_here
from train.speed import SpeedRun


def test_a_speed_is_measured_without_checkpoints_and_test(tmp_path: Path) -> None:
    train_here(tmp_path / "run", "runtime.steps=20", "runtime.device=cpu", trainer=SpeedRun)
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert "speed.json" in written
    assert not written & {"results.json", "checkpoints", "predictions"}
    speed = json.loads((tmp_path / "run" / "speed.json").read_text())
    assert speed["ranks"] == 1
    assert speed["requests_per_s"] / speed["steps_per_s"] == pytest.approx(16)
    assert speed["each_rank"][0]["peak_memory_bytes"] > 0
    assert (tmp_path / "run" / "profile" / "rank_0" / "trace.json").stat().st_size > 0


def test_a_speed_needs_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime\.steps=100"):
        train_here(tmp_path / "run", trainer=SpeedRun)


def test_scaling_runs_each_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "out"
    assert scaling.main([*TINY, "runtime.steps=20", "--nproc", "1,2", "--out", str(out)]) == 0
    one, two = json.loads((out / "scaling.json").read_text())["runs"]
    assert (one["ranks"], two["ranks"], len(two["each_rank"])) == (1, 2, 2)
    rows = (out / "scaling.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1", "2"]
    assert "100.0%" in rows[2]


def test_the_table_shows_the_first_ranks_times() -> None:
    spent = {"wall": 10.0, "communication": 2.0, "communication alone": 0.5, "idle": 1.25}
    rate = {"examples_per_s": 1000.0, "steps_per_s": 10.0, "data_wait_share": 0.01}
    one = {"ranks": 1, **rate, "each_rank": [{"peak_memory_bytes": 2**30, "breakdown": spent}]}
    two = {"ranks": 2, **rate, "examples_per_s": 1800.0}
    two["each_rank"] = [{"peak_memory_bytes": size * 2**30, "breakdown": spent} for size in (1, 3)]
    row = "| 2 | 1,800 | 10.00 | 90.0% | 1.0% | 3.0 GiB | 10.0 ms | 2.0 ms | 0.5 ms | 1.2 ms |"
    assert scaling.table([one, two]).splitlines()[3] == row


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["+experiment=synthetic", "--nproc", "1", "--out", str(tmp_path)])
