"""Trials of a sweep or a search: what they had, how they did, and the tables of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from train.process.jobs import Job

SEED = "runtime.seed"
VALID = "best validation NE"
# Metrics that are the same in all trials, or that NE implies.
IN_CSV = ("examples", "label_rate", "log_loss", "ne_own_rate")


@dataclass
class Trial(Job):
    """A run with values of its own for some keys."""

    values: dict[str, str] = field(default_factory=dict)  # key -> value
    metrics: dict[str, float] = field(default_factory=dict)  # of the test split
    best_ne: float | None = None  # of the validations

    def take(self, results: dict[str, Any]) -> None:
        self.metrics, self.best_ne = dict(results.get("test", {})), results.get("best_ne")

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def write_tables(out: Path, trials: list[Trial]) -> str:
    """Write `results.csv`, one row a trial in the order of the grid, and `results.md`, best first; returns the latter.

    Where seeds are an axis the markdown has a second table, of means over them. It leaves out the metrics in `IN_CSV`.
    Its last line is the setting with the smallest (mean) NE in validation, with its test metrics.
    """
    validated = [VALID] * any(trial.best_ne is not None for trial in trials)
    metrics = sorted({name for trial in trials for name in trial.metrics})
    shown = [name for name in metrics if name.rpartition("/")[2] not in IN_CSV]

    def table(trials: list[Trial], names: list[str]) -> tuple[list[str], list[list[str | float | None]]]:
        rows = [
            [
                *trial.values.values(),
                trial.status,
                trial.seconds,
                *[trial.best_ne] * len(validated),
                *map(trial.metrics.get, names),
            ]
            for trial in trials
        ]
        return [*trials[0].values, "status", "seconds", *validated, *names], rows

    with (out / "results.csv").open("w", newline="") as file:
        header, rows = table(trials, metrics)
        csv.writer(file).writerows([header, *rows])
    text = _markdown(*table(sorted(trials, key=_rank), shown))
    settings = _settings(trials)
    if SEED in trials[0].values:
        text += "\nMean ± standard deviation over seeds:\n\n" + _markdown(
            [*_axes(trials), "seeds", *validated, *shown],
            (
                [*values, str(len(group)), *[_best_ne(group)] * len(validated), *_means(group, shown)]
                for values, group in settings
            ),
        )
    if validated:
        values, group = settings[0]
        named = (
            " ".join(f"{key}={value}" for key, value in zip(_axes(trials), values, strict=True)) or "the one setting"
        )
        test = ", ".join(f"{name} {mean}" for name, mean in zip(shown, _means(group, shown), strict=True) if mean)
        text += f"\nChosen by validation: {named} (NE {_best_ne(group)}). On the test split: {test or 'nothing'}.\n"
    (out / "results.md").write_text(text)
    return text


def _axes(trials: list[Trial]) -> list[str]:
    return [key for key in trials[0].values if key != SEED]


def _rank(trial: Trial) -> tuple[bool, float]:
    """Sorts by validation; trials without one, such as those that failed, come last."""
    return trial.best_ne is None, trial.best_ne or 0.0


def _settings(trials: list[Trial]) -> list[tuple[tuple[str, ...], list[Trial]]]:
    """Values of the axes but the seed, and the finished trials that have them, the smallest mean NE first."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        if trial.status == "ok":
            groups.setdefault(tuple(trial.values[key] for key in _axes(trials)), []).append(trial)
    return sorted(groups.items(), key=lambda setting: _rank(_mean_trial(setting[1])))


def _mean_trial(group: list[Trial]) -> Trial:
    found = [trial.best_ne for trial in group if trial.best_ne is not None]
    return replace(group[0], best_ne=mean(found) if found else None)


def _best_ne(group: list[Trial]) -> str:
    return _spread([trial.best_ne for trial in group])


def _means(group: list[Trial], metrics: list[str]) -> list[str]:
    return [_spread([trial.metrics.get(name) for trial in group]) for name in metrics]


def _spread(values: list[float | None]) -> str:
    """Mean and deviation of the values that there are."""
    found = [value for value in values if value is not None]
    spread = f" ± {stdev(found):.2g}" if len(found) > 1 else ""
    return f"{mean(found):.5g}{spread}" if found else ""


def _markdown(header: list[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return (value or "").replace("|", "\\|")
