"""The suite of quality tables: equal searches, choices on validation, resuming, and the table of what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.quality import page, run, suite
from tools.quality.sections import RANKING_MODELS, SECTIONS

# Rows that differ by the model alone compose alike.
ROWS = [(name, row) for name, section in SECTIONS.items() for row in section.rows if row not in RANKING_MODELS]


@pytest.mark.parametrize(("name", "row"), [*ROWS, ("ml1m_features", "interformer")], ids=str)
def test_every_row_composes(name: str, row: str) -> None:
    job = suite.job(name, row, SECTIONS[name].settings_of(row)[-1], 3, ["runtime.steps=2"])
    config = run.configuration([*job["overrides"], *job.get("again", [])])
    assert (config.runtime.seed, config.runtime.steps) == (3, 2)


def test_a_row_overrides_its_section() -> None:
    job = suite.job("gdpa_scales_ml1m", "no GDPA: linear PFFN, softmax", (), 0, [])
    assert vars(run.configuration(job["overrides"]).model)["pffn"] == "linear"


def test_rows_of_a_section_have_as_many_settings() -> None:
    for section in SECTIONS.values():
        assert len({len(section.settings_of(row)) for row in section.rows}) == 1


class Jobs:
    """In place of trainings: writes results whose validation is best at the last setting of the search."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def train(self, job: dict[str, Any]) -> dict[str, Any]:
        assert job["overrides"][-1] == "a.b=3"
        self.started.append(job["name"])
        *_, setting, seed = job["name"].split("/")
        good = "table_std=null" in setting and "lr=0.0003" in setting and "sparse_lr=0.005" in setting
        test = {"like/auc": 0.8 + 0.01 * int(seed), "like/gauc": 0.7, "like/ne": 0.9}
        valid = {"like/ne": 0.5 if good else 0.6}
        return job | {"step": 4, "best_step": 2, "valid": valid, "test": test, "again_test": {"like/gauc": 0.71}}

    def run(self, jobs: list[dict[str, Any]], out: Path, **options: Any) -> bool:
        with (out / "results.jsonl").open("a") as file:
            for job in jobs:
                if job["name"] not in run.results(out):
                    file.write(json.dumps(self.train(job)) + "\n")
                    file.flush()
        return True


def test_each_row_is_trained_with_all_seeds_at_its_best_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs()
    monkeypatch.setattr(run, "run", jobs.run)
    monkeypatch.setattr(suite, "STORED", tmp_path)
    monkeypatch.setattr(page, "STORED", tmp_path)
    arguments = [
        "--out",
        str(tmp_path),
        "--sections",
        "ml1m",
        "--rows",
        "din",
        "--seeds",
        "0",
        "1",
        "2",
        "a.b=3",
        "--store",
    ]
    assert suite.main(arguments) == 0
    assert len(jobs.started) == len(set(jobs.started)) == 8 + 2
    content = json.loads((tmp_path / "suite" / "ml1m.json").read_text())
    assert content["rows"]["din"]["setting"] == [
        "optimizer.sparse_lr=0.005", "optimizer.lr=0.0003", "model.table_std=null"
    ]  # fmt: skip
    assert len(content["rows"]["din"]["tried"]) == 8
    row = "| din | 0.8100 ± 0.0248 | 0.7000 ± 0.0000 | 0.7100 ± 0.0000 | 0.9000 ± 0.0000 |"
    assert row in capsys.readouterr().out
    assert any(line.startswith(row) for line in page.sections())
    assert suite.main(arguments) == 0
    assert len(jobs.started) == 10  # nothing again
    with pytest.raises(SystemExit):
        suite.main([*arguments[:-1], "--rows", "nobody"])


def test_jobs_that_ended_well_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"name": "a"}, {"name": "b", "error": "broken"}, {"name": "c", "error": "broken"}, {"name": "c"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert set(run.results(tmp_path)) == {"a", "c"}
    prepared: list[Any] = []
    monkeypatch.setattr(run, "prepare", prepared.extend)
    assert run.run([{"name": "a"}, {"name": "c"}], tmp_path)
    assert prepared == []
    monkeypatch.setattr(run, "work", lambda *_: None)
    assert not run.run([{"name": "b", "overrides": []}], tmp_path, parallel=0)
    assert [job["name"] for job in prepared] == ["b"]
