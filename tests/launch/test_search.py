"""The search, over an objective in place of training, and once with a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from launch import search
from launch.search import Range, draw, lengths, main, parse_space
from launch.trials import Trial

RAN: list[str] = []


class Objective:
    """Runs nothing: NE is the distance of log10(lr) from -3, and lower in longer runs. A width of 8 fails."""

    def __init__(self, *_: object) -> None:
        self.slots: list[dict[str, str]] = [{}]

    def run(self, trials: list[Trial]) -> None:
        for trial in trials:
            RAN.append(trial.folder.name)
            if trial.values["model.dim"] == "8":
                trial.status = "failed"
                continue
            ne = abs(math.log10(float(trial.values["optimizer.lr"])) + 3) + 1 / int(
                trial.values.get("runtime.epochs", 1)
            )
            trial.folder.mkdir(parents=True)
            (trial.folder / "results.json").write_text(json.dumps({"best_ne": ne, "test": {"like/auc": 1 - ne / 9}}))
            trial.collect()


@pytest.fixture(autouse=True)
def objective(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    RAN.clear()
    if "real" not in request.node.name:
        monkeypatch.setattr(search, "Runner", Objective)


SPACE = ["--space", "optimizer.lr=1e-5..1e-1", "model.dim=16,32"]


def test_draws_fill_the_space_evenly_and_do_not_depend_on_each_other() -> None:
    space = parse_space(["lr=1e-4..1e-2", "width=2..5", "model=din,dlrm", "hidden=[64,32],[128]"])
    found = [draw(space, 0, number) for number in range(400)]
    rates = [math.log10(float(values["lr"])) for values in found]
    assert -4 <= min(rates) < -3.95
    assert -2.05 < max(rates) <= -2
    assert sum(rates) / 400 == pytest.approx(-3, abs=0.12)  # of a standard error of 0.03
    assert {values["width"] for values in found} == {"2", "3", "4", "5"}
    assert min(Counter(values["hidden"] for values in found).values()) > 150
    assert found[7] == draw(space, 0, 7) != draw(space, 1, 7)


def test_lengths_of_rungs() -> None:
    assert lengths(1, 9, 3) == [1, 3, 9]
    assert lengths(2, 20, 3) == [2, 6, 20]
    assert lengths(5, 9, 3) == [9]


def test_random_search_keeps_what_is_done_and_takes_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["+experiment=x", *SPACE, "--trials", "4", *out]) == 0
    assert len(RAN) == 4
    done = next(tmp_path.glob("02-*"))
    (done / "results.json").unlink()
    done.rmdir()  # as if killed there
    RAN.clear()
    assert main(["+experiment=x", *SPACE, "--trials", "6", *out]) == 0
    assert [name[:2] for name in RAN] == ["02", "04", "05"]
    best = min((json.loads(file.read_text())["best_ne"], file.parent.name) for file in tmp_path.glob("*/results.json"))
    assert f"(NE {best[0]:.5g})" in capsys.readouterr().out.split("Chosen by validation:")[-1]
    with pytest.raises(SystemExit):
        main(["+experiment=y", *SPACE, *out])


def test_halving_runs_the_best_of_each_rung_longer(tmp_path: Path) -> None:
    assert main([*SPACE, "--trials", "9", "--halving", "runtime.epochs=1..9", "--out", str(tmp_path)]) == 0
    by_length = [[name for name in RAN if name.endswith(f"-{epochs}")] for epochs in (1, 3, 9)]
    assert list(map(len, by_length)) == [9, 3, 1]
    ne = {file.parent.name: json.loads(file.read_text())["best_ne"] for file in tmp_path.glob("*/results.json")}
    best = sorted(by_length[0], key=ne.__getitem__)[:3]
    assert {name[:2] for name in by_length[1]} == {name[:2] for name in best}
    assert by_length[2][0][:2] == best[0][:2]
    RAN.clear()
    assert main([*SPACE, "--trials", "9", "--halving", "runtime.epochs=1..9", "--out", str(tmp_path)]) == 0
    assert RAN == []


def test_what_failed_is_not_promoted(tmp_path: Path) -> None:
    space = ["--space", "optimizer.lr=1e-5..1e-1", "model.dim=8,16"]
    assert main([*space, "--trials", "9", "--halving", "runtime.epochs=1..3", "--out", str(tmp_path)]) == 1
    longer = [name for name in RAN if name.endswith("-3")]
    assert len(longer) == 3
    assert all("-16-" in name for name in longer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "optimizer.lr"], "expected key=low..high or key=a,b,c"),
        (["--space", "optimizer.lr=0..1"], "two numbers above 0, e.g. 1e-4..1e-2"),
        (["--space", "a=1,2", "a=3"], "--space names a twice"),
        ([*SPACE, "--halving", "runtime.epochs=0.5..2"], "lengths are whole numbers"),
        ([*SPACE, "--eta", "1"], "--eta 1 at least 2"),
    ],
)
def test_what_cannot_be_searched_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_range_of_whole_numbers() -> None:
    assert Range.parse("1..9").whole
    assert not Range.parse("1..9.5").whole
