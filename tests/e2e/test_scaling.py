"""`train.commands.speed` and `launch.scaling`: speeds without a checkpoint, on several numbers of ranks."""

from __future__ import annotations

import json
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from launch import scaling
from launch.runs import Runner
from tests.launching import TINY_DLRM, train_here
from train.commands.speed import SpeedRun

# Rank 0 records what it was given and writes what the speed command writes: two are 1.5 times as fast, three fail.
FAKE_SPEED = """
import json, os, sys
from pathlib import Path
ranks, run_dir = int(os.environ["WORLD_SIZE"]), Path(os.environ["RUN_DIR"])
if ranks == 3:
    sys.exit("no third one")
if os.environ["RANK"] == "0":
    (run_dir / "given.json").write_text(json.dumps(sys.argv[1:]))
    speed = {"ranks": ranks, "examples_per_s": 500.0 + 500 * ranks, "steps_per_s": 1.0, "data_wait_share": 0.0}
    each = [{"peak_memory_bytes": 1, "breakdown": {}}] * ranks
    (run_dir / "speed.json").write_text(json.dumps(speed | {"each_rank": each}))
"""


class Ended(SpeedRun):
    """Leaves no loader behind, whose workers would take time from what this process measures next."""

    def _results(self, seconds: float) -> dict[str, Any]:
        assert not active_children()
        return super()._results(seconds)


def test_a_speed_is_measured_without_checkpoints_and_test(tmp_path: Path) -> None:
    train_here(tmp_path / "run", "runtime.steps=20", "data.num_workers=1", base=TINY_DLRM, trainer=Ended)
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert "speed.json" in written
    assert not written & {"results.json", "checkpoints", "predictions"}
    speed = json.loads((tmp_path / "run" / "speed.json").read_text())
    assert speed["ranks"] == 1
    assert speed["requests_per_s"] / speed["steps_per_s"] == pytest.approx(16)
    assert speed["each_rank"][0]["peak_memory_bytes"] > 0
    assert (tmp_path / "run" / "profile" / "rank_0" / "trace.json").stat().st_size > 0


def test_scaling_runs_each_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_speed.py").write_text(FAKE_SPEED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(scaling, "Runner", lambda shared, count, module: Runner(shared, count, module="fake_speed"))
    out = tmp_path / "out"
    arguments = ["first=1", "--nproc", "2,1,3", "between=2", "--out", str(out), "behind=3"]
    assert scaling.main(arguments) == 1  # three ranks fail, which stops nobody
    given = ["first=1", "between=2", "behind=3"]
    assert json.loads((out / "scaling.json").read_text())["overrides"] == given
    assert json.loads((out / "ranks-2" / "given.json").read_text()) == given
    rows = (out / "scaling.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1", "2"]
    assert "100.0%" in rows[2]
    assert "75.0%" in rows[3]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SystemExit):
        scaling.main(["+experiment=synthetic", "--nproc", "1,2"])
    assert "--nproc 2 needs more than the 1 GPUs here" in capsys.readouterr().err


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
