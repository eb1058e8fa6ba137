"""A comparison's gap, spread and verdict in the W&B group of its arms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from wandb.sdk.wandb_run import Run as WandbRun

from train.commands.compare_report import Run, track
from train.config.schema import TrackingConfig
from train.record.tracking import METRICS_FILE, Baseline, Record, read_metrics


def run(seed: int, losses: list[float], wandb: str) -> Run:
    about = {"config": {"tracking": vars(TrackingConfig(wandb=wandb))}}
    return Run(seed, {}, about, np.array([10, 20]), np.array(losses), {}, ["click"])


def test_gap_spread_and_verdict_are_a_run_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[tuple[WandbRun, dict[str, float]]] = []
    log = WandbRun.log

    def heard(run: WandbRun, values: dict[str, float]) -> None:
        logged.append((run, values))
        log(run, values)

    monkeypatch.setattr(WandbRun, "log", heard)
    task = {"ne_gap_percent": 0.1, "baseline_spread_percent": 0.3, "passed": False}
    result = {"baseline": "a", "other": "b", "seeds": [0, 1], "steps": 20, "budget_percent": 0.05, "passed": False}
    result["tasks"] = {"click": task}
    for mode in ("disabled", "offline"):
        runs = {"a": [run(0, [1.0, 0.5], mode), run(1, [1.0, 0.4], mode)]}
        runs["b"] = [run(0, [1.1, 0.5], mode), run(1, [1.3, 0.4], mode)]
        track(tmp_path, "report", result, runs)
        assert (tmp_path / "tracking").exists() == (mode == "offline")
    folder = tmp_path / "tracking" / "report"
    first, second, verdict = read_metrics(folder / METRICS_FILE)
    expected = {"loss_gap_percent": 20, "loss_gap_percent_least": 10, "loss_gap_percent_most": 30}
    assert first.values == pytest.approx(expected)
    assert second.values == pytest.approx(dict.fromkeys(expected, 0))
    values = {"passed": 0, "click/ne_gap_percent": 0.1, "click/baseline_spread_percent": 0.3, "click/passed": 0}
    assert verdict.values == values
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert {(run.group, run.tags, run.name) for run, _ in logged} == {(tmp_path.name, ("report",), "b against a")}
    assert [values["train/step"] for _, values in logged] == [10, 20, 20]
    assert logged[0][1]["comparison/loss_gap_percent"] == pytest.approx(20)
    assert logged[2][1]["comparison/click/ne_gap_percent"] == 0.1


def test_the_gap_follows_a_baseline_that_is_under_way(tmp_path: Path) -> None:
    file = tmp_path / METRICS_FILE
    baseline = Baseline(file)
    assert baseline.gap(10, {"loss": 1.0}) == {}
    file.write_text(Record(10, "train", 0.0, {"loss": 0.8}).to_json() + "\n")
    assert baseline.gap(10, {"loss": 1.0}) == pytest.approx({"loss_gap_percent": 25})
    assert baseline.gap(20, {"loss": 1.0}) == {}
    with file.open("a") as lines:
        lines.write(json.dumps({"step": 20, "split": "train", "time": 0, "values": {"loss": 2.0}}) + "\n")
    assert baseline.gap(20, {"loss": 1.0}) == pytest.approx({"loss_gap_percent": -50})
