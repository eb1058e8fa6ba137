"""The suite of quality tables: equal searches, choices on validation, resuming, and the table of what is stored."""

from __future__ import annotations

import json
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tools.quality import page, run, suite
from tools.quality.sections import RANKING_MODELS, SECTIONS

# Rows that differ by the model alone compose alike.
ROWS = [(name, row) for name, section in SECTIONS.items() for row in section.rows if row not in RANKING_MODELS]
ONE = (("ml1m_features", "interformer"), ("kuaivideo", "onetrans"), ("kuairand", "tokenmixer"))


@pytest.mark.parametrize(("name", "row"), [*ROWS, *ONE], ids=str)
def test_every_row_composes(name: str, row: str) -> None:
    job = suite.job(name, row, SECTIONS[name].settings_of(row)[-1], 3, ["runtime.steps=2"])
    config = run.configuration([*job["overrides"], *job.get("again", [])])
    assert (config.runtime.seed, config.runtime.steps) == (3, 2)


def test_a_row_overrides_its_section() -> None:
    job = suite.job("gdpa_scales_ml1m", "no GDPA: linear PFFN, softmax", (), 0, [])
    assert vars(run.configuration(job["overrides"]).model)["pffn"] == "linear"


def test_rows_of_a_section_have_as_many_settings() -> None:
    for section in SECTIONS.values():
        learned = [name for name, row in section.rows.items() if row.by != "logistic"]
        assert len({len(section.settings_of(row)) for row in learned}) == 1


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
        result = {"step": 4, "best_step": 2, "valid": valid, "test": test, "again_test": {"like/gauc": 0.71}}
        return job | result | {"device": "CPU", "commit": "c0"}

    def run(self, plan: run.Plan, out: Path, *, seconds: float, **options: Any) -> bool:
        while jobs := [job for job in plan(run.results(out)) if seconds and job["name"] not in run.results(out)]:
            with (out / "results.jsonl").open("a") as file:
                file.write(json.dumps(self.train(jobs[0])) + "\n")
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
    assert len(jobs.started) == len(set(jobs.started)) == 12 + 2
    content = json.loads((tmp_path / "suite" / "ml1m.json").read_text())
    assert content["rows"]["din"]["setting"] == [
        "optimizer.sparse_lr=0.005", "optimizer.lr=0.0003", "model.table_std=null"
    ]  # fmt: skip
    assert len(content["rows"]["din"]["tried"]) == 12
    row = "| din | 0.8100 ± 0.0248 | 0.7000 | 0.7100 | 0.9000 |"
    assert row in capsys.readouterr().out
    assert any(line.startswith(row) for line in page.sections())
    assert suite.main(arguments) == 0
    assert len(jobs.started) == 12 + 2  # nothing again
    with pytest.raises(SystemExit):
        suite.main([*arguments[:-1], "--rows", "nobody"])


def test_rows_are_stored_beside_those_of_earlier_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", Jobs().run)
    monkeypatch.setattr(suite, "STORED", tmp_path)
    file = tmp_path / "suite" / "gdpa_scales_ml1m.json"
    last, first = list(SECTIONS["gdpa_scales_ml1m"].rows)[-1], next(iter(SECTIONS["gdpa_scales_ml1m"].rows))
    for call, row in enumerate((last, first)):
        arguments = ["--out", str(tmp_path / f"{call}"), "--sections", "gdpa_scales_ml1m", "--store", "a.b=3"]
        suite.main([*arguments, "--rows", row, "--seeds", "0", "1"])
        suite.main([*arguments, "--rows", row, "--seeds", "0", "1", "--seconds", "0"])  # stores what there is
    assert list(json.loads(file.read_text())["rows"]) == [first, last]
    suite.main([*arguments, "--rows", first, "--seeds", "0"])  # of other seeds: nothing to stand beside
    assert list(json.loads(file.read_text())["rows"]) == [first]


def test_rows_stand_beside_published_ones() -> None:
    runs = [{"test": {"click/auc": 0.7, "click/gauc": 0.6, "click/log_loss": 0.5}}]
    for name, published in (
        ("kuaivideo", "| rankmixer, published | 0.6634 | 0.7436 |  | |"),
        ("kuairand", "0.7180 | |"),
    ):
        section = SECTIONS[name]
        lines = page.section_table(section, {"rows": {"mixformer": {"setting": ["a=1"], "runs": runs}}})
        assert len({line.count("|") for line in lines}) == 1
        assert lines[2].startswith("| mixformer | 0." + ("6" if name == "kuaivideo" else "7"))
        assert any(line.endswith(published) for line in lines)
        assert {"rankmixer", "tokenmixer", "hyformer", "mixformer", "onetrans"} < set(section.rows)
        assert name not in suite.OURS


def in_threads(number: int, out: Path) -> dict[Connection, Any]:
    """In place of processes."""
    made: dict[Connection, Any] = {}
    for _ in range(number):
        ours, theirs = Pipe()
        made[ours] = threading.Thread(target=run.serve, args=(theirs, out))
        made[ours].start()
    return made


def test_jobs_follow_results_and_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"name": "a"}, {"name": "b", "error": "broken"}, {"name": "c", "error": "broken"}, {"name": "c"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert set(run.results(tmp_path)) == {"a", "c"}
    started: list[str] = []

    def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
        started.append(job["name"])
        if job["name"] == "bad":
            raise ValueError("broken")
        return {"valid": {}}

    def plan(results: run.Results) -> list[dict[str, Any]]:
        names = ["no data", "a", "b", "bad", "c"] + (["after b"] if "b" in results else [])
        return [{"name": name, "overrides": []} for name in names]

    def prepare(job: dict[str, Any], done: set[tuple[str, ...]]) -> None:
        if job["name"] == "no data":
            raise ValueError("no file")

    monkeypatch.setattr(run, "_processes", in_threads)
    monkeypatch.setattr(run, "prepare", prepare)
    monkeypatch.setattr(run, "train", train)
    assert not run.run(plan, tmp_path, parallel=2, seconds=0)
    assert not started
    assert not run.run(plan, tmp_path, parallel=2)
    assert sorted(started) == ["after b", "b", "bad"]
    assert set(run.results(tmp_path)) == {"a", "b", "c", "after b"}
    assert all(error in (tmp_path / "results.jsonl").read_text() for error in ("ValueError: broken", "no file"))


def test_data_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr("train.data.build_source", built.append)
    done: set[tuple[str, ...]] = set()
    for seed in (0, 1):
        run.prepare(suite.job("ml1m", "din", SECTIONS["ml1m"].settings[seed], seed, []), done)
    assert [data.request for data in built] == [None, "request"]
