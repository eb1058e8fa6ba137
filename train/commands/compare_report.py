"""The comparison's judgement and its report: gaps, intervals, seed spread, verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from train.commands.verdict import headline, judge, worst
from train.config.schema import TrackingConfig
from train.metrics.bootstrap import metric_intervals, paired_gaps
from train.metrics.predictions import read_predictions
from train.record.plots import plot_arms
from train.record.tracking import METRICS_FILE, Tracker, read_metrics


@dataclass(frozen=True)
class Run:
    """The files of a finished run."""

    seed: int
    results: dict[str, Any]
    about: dict[str, Any]
    steps: np.ndarray  # of the training log
    losses: np.ndarray
    predictions: dict[str, np.ndarray]
    tasks: list[str]


def read_run(run_dir: Path, seed: int) -> Run:
    """Read a run directory that `Trainer.run` completed."""
    training = [record for record in read_metrics(run_dir / METRICS_FILE) if record.split == "train"]
    predictions = read_predictions(run_dir / "predictions" / "test")
    results = json.loads((run_dir / "results.json").read_text())
    # In a resumed run, results.json has the speed of its last part only, which may have had no step.
    for name in ("steps_per_s", "examples_per_s"):
        logged = [record.values[name] for record in training if name in record.values]
        if logged:
            results.setdefault(name, float(np.median(logged)))
    peaks = [record.values["peak_memory_bytes"] for record in training if "peak_memory_bytes" in record.values]
    results["peak_memory_bytes"] = max([results["peak_memory_bytes"], *peaks])
    return Run(
        seed=seed,
        results=results,
        about=json.loads((run_dir / "config.json").read_text()),
        steps=np.array([record.step for record in training]),
        losses=np.array([record.values["loss"] for record in training]),
        predictions=predictions,
        tasks=[name.removesuffix("_logit") for name in predictions if name.endswith("_logit")],
    )


def first_difference(a_runs: list[Run], b_runs: list[Run]) -> str:
    """Where two arms first differ, in words; empty if losses and predictions are bitwise equal for every seed."""
    for a, b in zip(a_runs, b_runs, strict=True):
        if not np.array_equal(a.steps, b.steps):
            return f"seed {a.seed}: one logged at steps {a.steps.tolist()}, the other at {b.steps.tolist()}"
        unequal = np.flatnonzero((a.losses != b.losses) & ~(np.isnan(a.losses) & np.isnan(b.losses)))
        if unequal.size:
            at = unequal[0]
            return f"seed {a.seed}, step {a.steps[at]}: loss {a.losses[at]!r} against {b.losses[at]!r}"
        for name, column in a.predictions.items():
            if not np.array_equal(column, b.predictions[name], equal_nan=True):
                return f"seed {a.seed}: predictions of the test split differ in {name}"
    return ""


def compare(
    baseline: str,
    other: str,
    runs: dict[str, list[Run]],
    *,
    budget: float,
    resamples: int = 1000,
    mapped: Callable[..., Iterable[Any]] = map,
) -> dict[str, Any]:
    """Per task the gap of `other` to `baseline`, and the verdict of `verdict.judge`.

    A gap is 100 (NE_other - NE_baseline) / NE_baseline on the test split, positive when `other` is worse; the spread of
    the baseline against itself is its largest minus its smallest NE over its seeds, which may be more, in per cent of
    their mean. `mapped` may be the map of a pool of processes: intervals take `resamples` passes over the predictions.
    """
    by_seed = {run.seed: run for run in runs[baseline]}
    pairs = [(by_seed[run.seed], run) for run in runs[other]]
    names = pairs[0][0].tasks
    columns = [_columns(task, a, b, resamples) for task in names for a, b in pairs]
    rows = list(mapped(_compare_seed, columns))
    tasks = {
        task: _compare_task(task, runs[baseline], runs[other], rows[i * len(pairs) : (i + 1) * len(pairs)], budget)
        for i, task in enumerate(names)
    }
    first = pairs[0][0].about
    return {
        "baseline": baseline,
        "other": other,
        "seeds": [a.seed for a, _ in pairs],
        "baseline_seeds": list(by_seed),
        "steps": pairs[0][0].results["step"],
        "budget_percent": budget,
        "tasks": tasks,
        "arms": {name: _resources(arm) for name, arm in runs.items()},
        "verdict": worst([task["verdict"] for task in tasks.values()]),
        "passed": all(task["passed"] for task in tasks.values()),
        "versions": first["versions"],
        "model": first["config"]["model"]["name"],
        "data": first["config"]["data"]["name"],
    }


def _columns(task: str, a: Run, b: Run, resamples: int) -> dict[str, Any]:
    return {
        "seed": a.seed,
        "labels": a.predictions[f"{task}_label"],
        "baseline": a.predictions[f"{task}_logit"],
        "other": b.predictions[f"{task}_logit"],
        "options": {
            "base_rate": a.results["label_rates"][task],
            "group": a.predictions["group"],
            "weights": a.predictions.get("weight"),
            "resamples": resamples,
        },
    }


def _compare_seed(columns: dict[str, Any]) -> dict[str, Any]:
    """Intervals of both arms and of their gaps, of one task and seed."""
    labels, options = columns["labels"], columns["options"]
    row: dict[str, Any] = {"seed": columns["seed"]}
    for side in ("baseline", "other"):
        intervals = metric_intervals(labels, columns[side], **options)
        row[side] = {name: vars(interval) for name, interval in intervals.items()}
    gaps = paired_gaps(labels, columns["baseline"], columns["other"], **options)
    return row | {name: vars(interval) for name, interval in gaps.items()}


def _compare_task(
    task: str, a_runs: list[Run], b_runs: list[Run], per_seed: list[dict[str, Any]], budget: float
) -> dict[str, Any]:
    def metric(arm: list[Run], name: str) -> np.ndarray:
        return np.array([run.results["test"][f"{task}/{name}"] for run in arm], dtype=np.float64)

    ne = metric(a_runs, "ne")
    gap = float(np.mean([row["ne_percent"]["estimate"] for row in per_seed]))
    spread = float(100 * (ne.max() - ne.min()) / ne.mean())
    paired = [run for run in a_runs if run.seed in {other.seed for other in b_runs}]
    arms = {
        side: {name: _summary(metric(arm, name)) for name in ("ne", "auc", "gauc")}
        for side, arm in (("baseline", paired), ("other", b_runs))
    }
    task_result = {**arms, "ne_gap_percent": gap, "baseline_spread_percent": spread, "per_seed": per_seed}
    return task_result | judge(task_result, budget)


def _summary(values: np.ndarray) -> dict[str, float | None]:
    return {"mean": float(values.mean()), "std": float(values.std(ddof=1)) if len(values) > 1 else None}


def _resources(arm: list[Run]) -> dict[str, float]:
    return {
        name: float(np.median([run.results.get(name, np.nan) for run in arm]))  # a run of one step has no speed
        for name in ("steps_per_s", "examples_per_s", "peak_memory_bytes")
    } | {"skipped_steps": sum(run.results.get("skipped_steps", np.nan) for run in arm)}


def write(out: Path, stem: str, result: dict[str, Any], runs: dict[str, list[Run]]) -> str:
    """Write `<stem>.md` and its plot; returns the text."""
    baseline, other = result["baseline"], result["other"]
    alone = [seed for seed in result["baseline_seeds"] if seed not in result["seeds"]]
    further = f"; {baseline} alone at {_listed(alone)} too, for its spread" if alone else ""
    lines = [
        f"# {other} against {baseline}",
        "",
        headline(result),
        "",
        (
            f"Model `{result['model']}`, data `{result['data']}`, {result['steps']:,} steps, "
            f"{'seed' if len(result['seeds']) == 1 else 'seeds'} {_listed(result['seeds'])}{further}. "
            f"Same initial checkpoint and same batches for both arms of a seed; test split; "
            f"gap = 100 (NE {other} - NE {baseline}) / NE {baseline}, positive is worse."
        ),
        "",
        (
            f"| task | NE {baseline} | NE {other} | mean gap % | {baseline} spread % | AUC {baseline} | AUC {other} "
            f"| GAUC {baseline} | GAUC {other} | verdict |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, values in result["tasks"].items():
        cells = [f"{values['ne_gap_percent']:+.4f}", f"{values['baseline_spread_percent']:.4f}"]
        ne, auc, gauc = (
            [_mean_std(values[side][name]) for side in ("baseline", "other")] for name in ("ne", "auc", "gauc")
        )
        lines.append(f"| {' | '.join([task, *ne, *cells, *auc, *gauc, values['verdict']])} |")
    lines += ["", "By seed, with 95 % bootstrap intervals over users:", ""]
    lines += ["| task | seed | arm | NE | AUC | GAUC |", "|---|---|---|---|---|---|"]
    for task, values in result["tasks"].items():
        for row in values["per_seed"]:
            for name, side in ((baseline, "baseline"), (other, "other")):
                cells = [_interval(row[side][metric], ".5f") for metric in ("ne", "auc", "gauc")]
                lines.append(f"| {task} | {row['seed']} | {name} | {' | '.join(cells)} |")
    lines += ["", f"Gap of {other} to {baseline} by seed, both arms resampled together:", ""]
    lines += ["| task | seed | NE gap % | AUC gap | GAUC gap |", "|---|---|---|---|---|"]
    for task, values in result["tasks"].items():
        for row in values["per_seed"]:
            gaps = [
                _interval(row[name], form) for name, form in (("ne_percent", "+.4f"), ("auc", "+.5f"), ("gauc", "+.5f"))
            ]
            lines.append(f"| {task} | {row['seed']} | {' | '.join(gaps)} |")
    lines += ["", "| arm | steps/s | examples/s | peak memory MiB | steps skipped |", "|---|---|---|---|---|"]
    for name, arm in result["arms"].items():
        memory = arm["peak_memory_bytes"] / 2**20
        speed = f"{arm['steps_per_s']:.2f} | {arm['examples_per_s']:.0f}"
        lines.append(f"| {name} | {speed} | {memory:.0f} | {arm['skipped_steps']} |")
    quantized = [run.results["test_quantized"] for run in runs[other] if "test_quantized" in run.results]
    if quantized:
        for task in result["tasks"]:
            ne = np.mean([values[f"{task}/ne"] for values in quantized])
            lines += ["", f"Evaluated on MXFP8 operands as well, {other} has a mean NE of {ne:.5f} on {task}."]
    curves = {
        name: [(run.steps.tolist(), run.losses.tolist()) for run in arm if run.seed in result["seeds"]]
        for name, arm in runs.items()
    }
    plot = stem.replace("report", "loss", 1) + ".png"
    plot_arms(curves, baseline, out / plot)
    lines += ["", f"![training loss of both arms and their gap]({plot})", ""]
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".")
    text = "\n".join(lines) + "\n"
    (out / f"{stem}.md").write_text(text)
    return text


def track(out: Path, stem: str, result: dict[str, Any], runs: dict[str, list[Run]]) -> None:
    """The mean gap of the loss over the training, gaps of NE, spread and verdict as a W&B run of the arms' group."""
    baseline, other = runs[result["baseline"]], runs[result["other"]]
    settings = other[0].about["config"]["tracking"]
    name = f"{result['other']} against {result['baseline']}"
    about = {
        "group": out.name,
        "tags": ["report"],
        "name": name,
        "tensorboard": False,
        "progress": "never",
        "http_port": 0,
    }
    known = {each.name for each in fields(TrackingConfig)}
    tracking = TrackingConfig(**{**{key: value for key, value in settings.items() if key in known}, **about})
    if tracking.wandb == "disabled":
        return
    tracker = Tracker(out / "tracking" / stem, tracking, enabled=True)
    tracker.start({"comparison": {key: result[key] for key in ("baseline", "other", "seeds", "budget_percent")}},
                  total_steps=result["steps"])  # fmt: skip
    losses = {run.seed: dict(zip(run.steps.tolist(), run.losses.tolist(), strict=True)) for run in baseline}
    gaps: dict[int, list[float]] = {}
    for run in other:
        for step, loss in zip(run.steps.tolist(), run.losses.tolist(), strict=True):
            if losses[run.seed].get(step):
                gaps.setdefault(step, []).append(100 * (loss / losses[run.seed][step] - 1))
    for step, percents in sorted(gaps.items()):
        spread = {f"loss_gap_percent_{end}": float(pick(percents)) for end, pick in (("least", min), ("most", max))}
        tracker.log(step, "comparison", {"loss_gap_percent": float(np.mean(percents)), **spread}, shown=False)
    verdict = {"passed": float(result["passed"])}
    for task, values in result["tasks"].items():
        verdict |= {f"{task}/{key}": values[key] for key in ("ne_gap_percent", "baseline_spread_percent")}
        verdict[f"{task}/passed"] = float(values["passed"])
    tracker.log(result["steps"], "comparison", verdict, shown=False)
    tracker.finish()


def _mean_std(value: dict[str, float | None]) -> str:
    return f"{value['mean']:.5f}" + (f" ± {value['std']:.5f}" if value["std"] is not None else "")


def _listed(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


def _interval(value: dict[str, float], form: str) -> str:
    return f"{value['estimate']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"
