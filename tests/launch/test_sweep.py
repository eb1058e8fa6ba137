"""The sweep, over a stand-in for the trainer that writes what the trainer writes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import runs
from launch.runs import Runner
from launch.sweep import grid, main
from launch.trials import Trial, write_tables
from tests.launching import ROOT
from train.config.overrides import split_options, split_values
from train.process.signals import STATUS

# Rank 0 records what it was given and writes results.json, or fails for model=broken; model=slow waits for a signal.
FAKE_JOB = """
import json, os, sys
from pathlib import Path
arguments = dict(text.split("=", 1) for text in sys.argv[1:])
if arguments["model"] == "broken":
    sys.exit("this model is broken" if os.environ["RANK"] == "0" else 0)
if arguments["model"] == "slow":
    import signal, time
    folder = Path(os.environ["RUN_DIR"])
    def stop(*_):
        (folder / "told").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    (folder / "waits").touch()
    time.sleep(60)
if os.environ["RANK"] == "0":
    run_dir = Path(os.environ["RUN_DIR"])
    with (run_dir / "starts.txt").open("a") as file:
        group = os.environ["WANDB_RUN_GROUP"]
        file.write(f"{group} {os.environ['WORLD_SIZE']} {arguments['+experiment']} {arguments['hidden']}\\n")
    results = {"step": 3, "test": {"like/auc": 0.75, "like/ne": 0.5}, "valid": {"like/auc": 0.1}}
    (run_dir / "results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_job.py").write_text(FAKE_JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MODULE", "fake_job")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", os.defpath)  # as where the environment is not activated: jobs have that of the sweep


def test_values_split_at_outer_commas_only() -> None:
    assert split_values("a,b") == ["a", "b"]
    assert split_values("[64,32],[128]") == ["[64,32]", "[128]"]
    assert split_values("'x,y',z") == ["'x,y'", "z"]


def test_options_are_taken_out_of_overrides() -> None:
    arguments = ["out=x=y", "model=din", "runtime.kernels="]
    assert split_options(arguments, {"out": "", "split": "test"}, "out=DIR") == (
        {"out": "x=y", "split": "test"},
        ["model=din", "runtime.kernels="],
    )
    for wrong in ("out", "out="):
        with pytest.raises(ValueError, match=f"'{wrong}' is not key=value; e.g. out=DIR"):
            split_options([wrong], {"out": ""}, "out=DIR")


def test_the_grid_is_every_combination_last_key_fastest() -> None:
    assert grid(["model=din,dlrm", "seed=0,1"]) == [
        {"model": "din", "seed": "0"},
        {"model": "din", "seed": "1"},
        {"model": "dlrm", "seed": "0"},
        {"model": "dlrm", "seed": "1"},
    ]


@pytest.mark.parametrize("over", [["seed"], ["seed="], ["seed=1,,2"], ["=1"], ["seed=0", "seed=1"]])
def test_a_malformed_axis_is_named(over: list[str]) -> None:
    with pytest.raises(ValueError, match=r"seed|=1"):
        grid(over)


@pytest.mark.usefixtures("fake_job")
def test_a_sweep_runs_each_job_reports_failures_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["+experiment=tiny", "--over", "model=din,broken", "hidden=[64,32]", "--nproc", "2", "--out", str(out)]
    arguments += ["shared=1"]  # for all jobs, as if it stood before the options
    assert main(arguments) == 1

    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["model"], row["hidden"]) for row in rows] == [("din", "[64,32]"), ("broken", "[64,32]")]
    assert rows[0]["status"] == "ok"
    assert float(rows[0]["like/auc"]) == 0.75  # of the test split, not the validation
    assert rows[1]["status"].startswith("failed, exit code 1")
    assert rows[1]["like/auc"] == ""
    assert "| din | [64,32] | ok |" in (out / "results.md").read_text()
    assert (out / "00-din-64-32" / "starts.txt").read_text() == "out 2 tiny [64,32]\n"
    console = (out / "01-broken-64-32" / "console.log").read_text()
    assert "this model is broken" in console
    assert "1 of 2 jobs finished" in capfd.readouterr().out

    assert main(arguments) == 1  # again: only the failed job runs
    assert (out / "00-din-64-32" / "starts.txt").read_text().count("\n") == 1
    assert (out / "01-broken-64-32" / "console.log").read_text().count("this model is broken") == 2


def test_a_sweep_that_is_told_to_stop_takes_its_jobs_along(fake_job: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.sweep", "+experiment=x", "hidden=1", "--over", "model=slow,other"]
    process = subprocess.Popen([*command, "--nproc", "1", "--out", str(tmp_path / "out")], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/*/waits")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == STATUS
    assert [path.parent.name for path in tmp_path.glob("out/*/told")] == ["00-slow"]
    assert not (tmp_path / "out" / "01-other").exists()


def test_seeds_have_a_table_of_means(tmp_path: Path) -> None:
    aucs = {("din", "0"): 0.5, ("din", "1"): 0.7, ("dlrm", "0"): 0.6, ("dlrm", "1"): None}
    jobs = [
        Trial(
            tmp_path,
            "ok" if auc else "failed",
            1.0,
            {"model": model, "runtime.seed": seed},
            {"auc": auc, "click/examples": 9} if auc else {},
        )
        for (model, seed), auc in aucs.items()
    ]
    lines = write_tables(tmp_path, jobs).splitlines()
    assert lines[-4:] == [
        "| model | seeds | auc |",
        "| --- | --- | --- |",
        "| din | 2 | 0.6 ± 0.14 |",
        "| dlrm | 1 | 0.6 |",
    ]
    assert lines[0] == "| model | runtime.seed | status | seconds | auc |"
    in_csv = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["click/examples"] for row in in_csv] == ["9", "9", "9", ""]


def test_settings_are_ranked_by_validation_and_the_chosen_one_is_tested(tmp_path: Path) -> None:
    """The table was in the order of the grid and had test metrics alone, by which everybody then chose."""
    ne = {("din", "0"): 0.8, ("din", "1"): 0.9, ("dlrm", "0"): 0.5, ("dlrm", "1"): None, ("dcnv2", "0"): 0.7}
    aucs = {"din": 0.9, "dlrm": 0.6, "dcnv2": 0.7}
    jobs = [
        Trial(tmp_path, "ok" if best else "failed", 1.0, {"model": model, "runtime.seed": seed}, {}, best)
        for (model, seed), best in ne.items()
    ]
    for job in jobs:
        job.metrics = {"like/auc": aucs[job.values["model"]]} if job.best_ne else {}
    lines = write_tables(tmp_path, jobs).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:7]] == [
        ["| dlrm", "0"], ["| dcnv2", "0"], ["| din", "0"], ["| din", "1"], ["| dlrm", "1"]
    ]  # fmt: skip
    assert lines[0] == "| model | runtime.seed | status | seconds | best validation NE | like/auc |"
    assert "| din | 2 | 0.85 ± 0.071 | 0.9 ± 0 |" in lines
    assert lines[-1] == "Chosen by validation: model=dlrm (NE 0.5). On the test split: like/auc 0.6."
    in_csv = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["model"] for row in in_csv] == ["din", "din", "dlrm", "dlrm", "dcnv2"]


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"overrides": [], "jobs": [{"model": "din"}]}))
    with pytest.raises(SystemExit):
        main(["--over", "model=dlrm", "--out", str(tmp_path)])
    assert "choose another --out" in capsys.readouterr().err


def test_parallel_jobs_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    runner = Runner([], nproc=2, parallel=2)
    assert runner.slots == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    with pytest.raises(ValueError, match="4 GPUs"):
        Runner([], nproc=2, parallel=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(runs, "nvidia_smi", lambda: (None, ()))
    assert Runner([], nproc=2, parallel=2).slots == [{}, {}]
