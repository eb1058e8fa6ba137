"""The judgement of a comparison on runs made up here: pairs of a seed, and a spread over more seeds than those."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.commands import compare, compare_report
from train.commands.verdict import STATUS, headline, judge, worst

ROOT = Path(__file__).parents[2]
RATES = {"click": 0.3}


def made_up(seed: int, shift: float) -> compare_report.Run:
    generator = np.random.default_rng(0)  # the test split is the same for all
    labels = (generator.random(400) < 0.3).astype(np.float32)
    logits = generator.normal(size=400).astype(np.float32) + np.float32(shift)
    steps = np.arange(1, 4)
    config = {"model": {"name": "interformer"}, "data": {"name": "synthetic"}}
    return compare_report.Run(
        seed=seed,
        results={
            "step": 7000,
            "label_rates": RATES,
            "test": {"click/ne": 0.8 + shift / 10, "click/auc": 0.5, "click/gauc": 0.5},
            "steps_per_s": 1.0,
            "examples_per_s": 2.0,
            "peak_memory_bytes": 2**20,
        },
        about={"config": config, "versions": {"torch": "2"}},
        steps=steps,
        losses=steps + shift,
        predictions={"click_label": labels, "click_logit": logits, "group": np.arange(400)},
        tasks=["click"],
    )


def test_intervals_are_of_weighted_rows() -> None:
    runs = {"a": [made_up(0, 0.0), made_up(1, 0.5)], "b": [made_up(0, 0.5)]}
    plain = compare_report.compare("a", "b", runs, budget=100, resamples=1)
    for run in (run for arm in runs.values() for run in arm):
        run.predictions["weight"] = (np.arange(400) < 200).astype(np.float32)
    halved = compare_report.compare("a", "b", runs, budget=100, resamples=1)
    for run in (run for arm in runs.values() for run in arm):
        run.predictions.update({name: column[:200] for name, column in run.predictions.items()})
    half = compare_report.compare("a", "b", runs, budget=100, resamples=1)
    gaps = [result["tasks"]["click"]["ne_gap_percent"] for result in (plain, halved, half)]
    assert gaps[1] == pytest.approx(gaps[2])
    assert gaps[0] != pytest.approx(gaps[2])


def test_one_seed_is_held_against_the_spread_of_more(tmp_path: Path) -> None:
    runs = {"bf16": [made_up(0, 0.0), made_up(1, 0.5), made_up(2, -0.5)], "mxfp8": [made_up(0, 0.01)]}
    result = compare_report.compare("bf16", "mxfp8", runs, budget=100, resamples=20)
    task = result["tasks"]["click"]
    assert (result["seeds"], result["baseline_seeds"]) == ([0], [0, 1, 2])
    assert task["baseline_spread_percent"] == pytest.approx(12.5)
    assert [row["seed"] for row in task["per_seed"]] == [0]
    assert abs(task["ne_gap_percent"]) < 2  # to the baseline's run of the same seed, not to the mean of all
    assert task["other"]["ne"]["std"] is None
    text = compare_report.write(tmp_path, "report", result, runs)
    assert "7,000 steps, seed 0; bf16 alone at 1, 2 too, for its spread" in text
    assert "| click | 0.80000 | 0.80100 |" in text  # of the same seed
    assert "| bf16 | 1.00 | 2 | 1 | nan |" in text  # runs of versions that did not count skipped steps


def two_tasks(seed: int, shift: float) -> compare_report.Run:
    """A run whose second task alone is shifted."""
    run, other = made_up(seed, 0.0), made_up(seed, shift)
    run.predictions.update({f"like_{column}": other.predictions[f"click_{column}"] for column in ("label", "logit")})
    results = run.results | {"label_rates": {"click": 0.3, "like": 0.3}}
    results["test"] = run.results["test"] | {f"like/{name}": 0.5 + shift / 10 for name in ("ne", "auc", "gauc")}
    return replace(run, results=results, tasks=["click", "like"])


def test_each_task_is_judged_by_its_own_rows_and_all_must_pass() -> None:
    runs = {"a": [two_tasks(0, 0.0), two_tasks(1, 0.0)], "b": [two_tasks(0, 0.5), two_tasks(1, 0.5)]}
    result = compare_report.compare("a", "b", runs, budget=0, resamples=1)
    click, like = result["tasks"]["click"], result["tasks"]["like"]
    assert [[row["seed"] for row in task["per_seed"]] for task in (click, like)] == [[0, 1], [0, 1]]
    assert click["ne_gap_percent"] == 0
    assert like["ne_gap_percent"] > 1
    assert (click["verdict"], like["verdict"], result["verdict"]) == (
        "within budget",
        "NOT within budget",
        "NOT within budget",
    )
    assert (click["passed"], like["passed"], result["passed"]) == (True, False, False)


def task(gaps: list[float], half: float, spread: float, ne: float = 0.7) -> dict[str, Any]:
    per_seed = [{"ne_percent": {"estimate": gap, "low": gap - half, "high": gap + half}} for gap in gaps]
    gap = sum(gaps) / len(gaps)
    return {"baseline": {"ne": {"mean": ne}}, "ne_gap_percent": gap, "baseline_spread_percent": spread} | {
        "per_seed": per_seed
    }


@pytest.mark.parametrize(
    ("facts", "budget", "verdict", "why"),
    [
        (task([0.0, 0.001, -0.001], 0.005, 0.01), 0.05, "within budget", ""),
        (task([-0.03, -0.031, -0.029], 0.005, 0.01), 0.05, "within budget", ""),
        (task([1.0, 1.01, 0.99], 0.005, 8.0), 0.05, "NOT within budget", "interval is above"),
        (task([0.0, 0.001, -0.001], 0.005, 8.0), 0.05, "unresolved", "spread is wider"),
        (task([0.04, 0.041, 0.039], 0.015, 0.01), 0.05, "unresolved", "interval ends above"),
        (task([-0.3, 0.2, 0.1], 0.005, 0.01), 0.05, "unresolved", "interval ends above"),
        (task([-0.3, -0.3, -0.3], 0.1, 0.01), 0.05, "unresolved", "interval is wider than"),
        (task([0.0], 0.1, 0.01), 0.05, "unresolved", "interval ends above"),
        (task([0.0], 0.01, 0.01), 0.05, "within budget", ""),
        (task([0.0, 0.0], float("nan"), 0.01), 0.05, "unresolved", "not a number"),
        (task([5.0, 5.0], 0.005, 0.01, ne=1.0), 0.05, "no verdict", "NE 1.000, no better than"),
        (task([0.0, 0.0], 0.005, 0.01, ne=float("nan")), 0.05, "no verdict", "NE nan"),
    ],
)
def test_a_verdict_says_only_what_the_runs_resolve(
    facts: dict[str, Any], budget: float, verdict: str, why: str
) -> None:
    judged = facts | judge(facts, budget)
    assert judged["verdict"] == verdict
    assert why in judged["why"]
    text = headline({"verdict": verdict, "budget_percent": budget, "baseline": "bf16", "tasks": {"click": judged}})
    assert text.splitlines()[0] == f"**Verdict: {verdict}** (budget: {budget} % of NE)."
    if verdict == "unresolved" and judged["least_budget_percent"] < 100:
        again = judge(facts, judged["least_budget_percent"])
        assert again["verdict"] == "within budget"


def test_verdicts_of_tasks_and_arms_add_up_to_the_one_that_decides() -> None:
    assert worst(["within budget", "unresolved"]) == "unresolved"
    assert worst(["unresolved", "no verdict"]) == "no verdict"
    assert worst(["no verdict", "NOT within budget", "within budget"]) == "NOT within budget"
    assert len(set(STATUS.values()) - {2}) == 4


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs/parity").glob("*/report*.json")), ids=lambda file: str(file.parent.name)
)
def test_stored_reports_have_the_verdict_of_their_numbers(file: Path) -> None:
    result = json.loads(file.read_text())
    for stored in result["tasks"].values():
        assert stored | judge(stored, result["budget_percent"]) == stored
    assert result["verdict"] == worst([stored["verdict"] for stored in result["tasks"].values()])
    assert headline(result) in file.with_suffix(".md").read_text()


def test_the_first_difference_of_two_arms_is_named() -> None:
    base = made_up(3, 0.0)
    base.losses[1] = np.nan  # a skipped step, in both
    assert compare_report.first_difference([base], [replace(base, losses=base.losses.copy())]) == ""
    other_loss = replace(base, losses=base.losses + [0, 0, 1])
    assert compare_report.first_difference([base], [other_loss]).startswith("seed 3, step 3: loss ")
    other_steps = replace(base, steps=base.steps + 1)
    assert "one logged at steps [1, 2, 3], the other at [2, 3, 4]" in compare_report.first_difference(
        [base], [other_steps]
    )
    columns = base.predictions | {"click_logit": base.predictions["click_logit"] + 1}
    difference = compare_report.first_difference([base], [replace(base, predictions=columns)])
    assert difference == "seed 3: predictions of the test split differ in click_logit"


def test_a_run_resumed_behind_its_last_step_has_the_speed_and_memory_of_its_log(tmp_path: Path) -> None:
    windows = [
        {"step": step, "split": "train", "time": 0.0, "values": {"loss": 0.5, "steps_per_s": speed,
         "examples_per_s": 2 * speed, "peak_memory_bytes": memory}}
        for step, speed, memory in ((1, 1.0, 7), (2, 4.0, 9), (3, 5.0, 9))
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(window)}\n" for window in windows))
    (tmp_path / "results.json").write_text(json.dumps({"step": 3, "peak_memory_bytes": 3}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "predictions/test").mkdir(parents=True)
    pq.write_table(pa.table({"row": [0], "click_logit": [0.1]}), tmp_path / "predictions/test/part-00000.parquet")
    results = compare_report.read_run(tmp_path, seed=0).results
    assert results == {"step": 3, "steps_per_s": 4.0, "examples_per_s": 8.0, "peak_memory_bytes": 9}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "0"], "the spread over seeds needs two of the baseline"),
        (["--seeds", "0", "1", "--baseline-seeds", "1"], "a seed is named twice"),
        (["--seeds", "0", "--baseline-seeds", "1", "--assert-equal"], "compares nothing at --baseline-seeds"),
    ],
)
def test_seeds_that_give_no_spread_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["+experiment=synthetic", *options])
    assert said in capsys.readouterr().err
