"""The tool of the scaling law: sizes, jobs, and what it writes of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.quality import run, scaling


@pytest.mark.parametrize("model", list(scaling.SIZES))
def test_sizes_span_two_orders_of_operations(model: str) -> None:
    jobs = {job["name"]: job["overrides"] for job in scaling.jobs([0], [model])}
    smallest, largest = (scaling.operations(jobs[f"{model}/{size}/0"]) for size in ("XS", "XXL"))
    assert largest > 100 * smallest


def test_every_size_composes_with_a_rate_by_its_width() -> None:
    jobs = scaling.jobs([0, 3], list(scaling.SIZES), ["runtime.steps=2"])
    assert len({job["name"] for job in jobs}) == len(jobs) == 2 * sum(map(len, scaling.SIZES.values()))
    assert [job["name"] for job in jobs[:2]] == ["interformer/XXL/0", "kunlun/XXL/0"]
    for job in jobs[-6:]:
        config = run.configuration(job["overrides"])
        assert (config.runtime.seed, config.runtime.steps) == (3, 2)
        assert config.optimizer.lr == pytest.approx(0.016 / config.model.dim**0.5, rel=0.05)


def test_what_is_written_of_finished_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "STORED", tmp_path)
    flops = dict(zip(scaling.SIZES["wukong"], (1e5, 1e6, 1e7, 1e8, 1e9, 1e10), strict=True))
    monkeypatch.setattr(scaling, "operations", lambda overrides: flops[overrides[-1]])
    results = {
        f"{model}/{size}/{seed}": {
            "overrides": [*scaling.COMMON, "model=wukong", "data.eval_requests=512", size],
            "valid": {"click/ne": 0.9 - 0.01 * place},
            "device": "CPU",
            "commit": "abc",
        }
        for model in ("kunlun", "wukong")
        for place, size in enumerate(flops)
        for seed in (0, 1)
    }
    monkeypatch.setattr(scaling, "floor", lambda overrides: 0.75)
    tables = scaling.write(results)
    assert "| kunlun | 12 | 5.0 | -0.0100 ± 0.0000 | 0 |" in tables
    assert "| M | 10 | 0.8800 | 10 | 0.8800 |" in tables
    written = json.loads((tmp_path / "scaling_law.json").read_text())
    assert written["laws"]["wukong"]["slope"] == pytest.approx(-0.01)
    assert len(written["runs"]) == 24
    assert written["about"] == {"device": ["CPU"], "commit": ["abc"]}
    assert (tmp_path / "scaling_law.png").stat().st_size


def test_the_floor_is_below_what_a_constant_reaches() -> None:
    assert 0.7 < scaling.floor([*scaling.COMMON, "model=wukong", "data.eval_requests=2048"]) < 0.8
