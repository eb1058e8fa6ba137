"""PNG plots of a run and of the comparison of arms. Figures are drawn on Agg, without a display or pyplot's globals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from train.metrics.calibration import calibration_curve
from train.metrics.histogram import ScoreHistogram
from train.record.tracking import Record

Floats = NDArray[np.float64]
Curve = tuple[Sequence[int], Sequence[float]]  # steps, values

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
SCORE_BARS = 50


def series(records: Sequence[Record], split: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of a split, in the order of the records that have it."""
    found = [
        (record.step, record.values[name]) for record in records if record.split == split and name in record.values
    ]
    return [step for step, _ in found], [value for _, value in found]


def plot_training(records: Sequence[Record], path: Path) -> None:
    """Training loss, and NE of every task in training and validation, over steps."""
    figure, (loss, ne) = _panels(2)
    steps, values = series(records, "train", "loss")
    loss.plot(steps, values, color=COLORS[0], alpha=0.35, linewidth=1, label="train")
    loss.plot(steps, smooth(values), color=COLORS[0], linewidth=2, label="train, smoothed")
    _focus(loss)
    _label(loss, "Training loss", "step", "loss (nats)")
    tasks = sorted({name.removesuffix("/ne") for record in records for name in record.values if name.endswith("/ne")})
    for task, color in zip(tasks, _cycle(len(tasks)), strict=True):
        steps, values = series(records, "train", f"{task}/ne")
        ne.plot(steps, smooth(values), color=color, alpha=0.5, linewidth=1, label=f"{task}, train, smoothed")
        ne.plot(*series(records, "valid", f"{task}/ne"), color=color, marker="o", label=f"{task}, validation")
    ne.axhline(1, color="grey", linestyle=":", linewidth=1)
    _focus(ne)
    _label(ne, "Normalised entropy (1 = constant predictor)", "step", "NE")
    _save(figure, path)


def plot_calibration(histograms: Mapping[str, ScoreHistogram], path: Path) -> None:
    """Observed rate over mean prediction of score ranges of equal weight, by task."""
    figure, (axes,) = _panels(1, height=5)
    top = 0.0
    for (task, histogram), color in zip(histograms.items(), _cycle(len(histograms)), strict=True):
        curve = calibration_curve(histogram)
        axes.plot(curve.predicted, curve.observed, marker="o", markersize=4, color=color, label=task)
        top = max([top, *curve.predicted.tolist(), *curve.observed.tolist()])
    axes.plot([0, top], [0, top], color="grey", linestyle=":", linewidth=1, label="calibrated")
    _label(axes, "Calibration", "mean prediction", "observed rate")
    _save(figure, path)


def plot_scores(histograms: Mapping[str, ScoreHistogram], path: Path) -> None:
    """Share of the positives and of the negatives over the predicted probability, one panel a task."""
    figure, panels = _panels(len(histograms))
    for axes, (task, histogram) in zip(panels, histograms.items(), strict=True):
        edges = histogram.logit_edges.sigmoid().numpy()
        below = _cumulative_share(histogram.positive + histogram.negative)
        # Click rates are small: the axis ends where nearly all scores have come.
        bars = np.linspace(0, edges[np.searchsorted(below, 0.999).clip(max=len(edges) - 1)], SCORE_BARS + 1)
        for name, weight, color in (
            ("negative", histogram.negative, COLORS[0]),
            ("positive", histogram.positive, COLORS[1]),
        ):
            share = np.diff(np.interp(bars, edges, _cumulative_share(weight)))
            axes.stairs(share, bars, fill=True, alpha=0.45, color=color, label=f"{name} ({weight.sum():,.0f})")
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        _label(axes, f"Scores: {task}", "predicted probability", "share of the class")
    _save(figure, path)


def plot_arms(arms: Mapping[str, Sequence[Curve]], baseline: str, path: Path) -> None:
    """Training loss of several arms over the same steps, and below them the gap of each to the baseline in percent.

    An arm has one curve for each seed; their smoothed mean and their range are drawn. The band in the lower panel is
    how far the baseline's seeds are from its own mean. Raises ValueError when the curves' steps differ.
    """
    steps = np.asarray(arms[baseline][0][0])
    values: dict[str, Floats] = {}
    for name, curves in arms.items():
        if any(list(curve[0]) != steps.tolist() for curve in curves):
            raise ValueError(f"arm {name!r} was recorded at other steps than {baseline!r}: gaps need the same steps")
        values[name] = np.stack([smooth(curve[1]) for curve in curves])
    figure, (curves_axes, gap_axes) = _panels(2, vertical=True)
    reference = values[baseline].mean(0)
    for (name, per_seed), color in zip(values.items(), _cycle(len(values)), strict=True):
        mean, percent = per_seed.mean(0), 100 * (per_seed / reference - 1)
        seeds = f", {len(per_seed)} seeds" if len(per_seed) > 1 else ""
        # Arms that agree cover each other: the baseline is drawn so that it shows behind them.
        width, alpha = (5, 0.4) if name == baseline else (1.5, 1)
        curves_axes.plot(steps, mean, color=color, linewidth=width, alpha=alpha, label=f"{name}{seeds}")
        curves_axes.fill_between(steps, per_seed.min(0), per_seed.max(0), color=color, alpha=0.15, linewidth=0)
        if name == baseline and len(per_seed) > 1:
            low, high = percent.min(0), percent.max(0)
            gap_axes.fill_between(
                steps, low, high, color="grey", alpha=0.3, linewidth=0, label=f"{name}, range of seeds"
            )
        if name != baseline:
            gap_axes.plot(steps, percent.mean(0), color=color, label=f"{name} - {baseline}")
    gap_axes.axhline(0, color="grey", linestyle=":", linewidth=1)
    _label(curves_axes, "Training loss by arm, smoothed", "", "loss")
    _label(gap_axes, f"Gap to {baseline}", "step", "loss gap (%)")
    _save(figure, path)


def plot_run(records: Sequence[Record], histograms: Mapping[str, ScoreHistogram], folder: Path) -> list[Path]:
    """Plots of a finished run: `training.png` and, with histograms, `calibration.png` and `scores.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "training.png"]
    plot_training(records, paths[0])
    if histograms:
        paths += [folder / "calibration.png", folder / "scores.png"]
        plot_calibration(histograms, paths[1])
        plot_scores(histograms, paths[2])
    return paths


def smooth(values: Sequence[float], half_life: float = 4) -> Floats:
    """Average of each value's neighbourhood, weights halving every `half_life` records to both sides; skips NaN."""
    reach = round(8 * half_life)
    kernel = 0.5 ** (np.abs(np.arange(-reach, reach + 1)) / half_life)
    given = np.asarray(values, dtype=np.float64)
    known = np.isfinite(given)
    total, weight = (
        np.convolve(part, kernel)[reach : reach + given.size] if given.size else given
        for part in (np.where(known, given, 0), known)
    )
    return np.divide(total, weight, out=np.full_like(given, np.nan), where=weight > 0)


def _cumulative_share(weight: Tensor) -> Floats:
    """[bins + 1]: share of the weight below each edge; zeros where there is none."""
    total = float(weight.sum())
    return np.concatenate([[0.0], weight.cumsum(0).numpy() / (total or 1.0)])


def plot_ratios(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time and, where it was measured, memory of `train.commands.ratio` over candidates a request, by arm."""
    kinds = [("ms", "ms")] + [("peak_mib", "peak MiB")] * (rows[0]["step"]["peak_mib"] is not None)
    figure, panels = _panels(2 * len(kinds))
    panel = iter(panels)
    for part, title in (("forward", "Forward"), ("step", "Forward and backward")):
        for field, unit in kinds:
            axes = next(panel)
            for arm, color in zip(dict.fromkeys(row["arm"] for row in rows), COLORS, strict=False):
                points = [(row["ratio"], row[part]) for row in rows if row["arm"] == arm]
                ratios = [ratio for ratio, _ in points]
                axes.plot(ratios, [values[field] for _, values in points], marker="o", color=color, label=arm)
                if field == "ms" and points[0][1]["graph_ms"] is not None:
                    times = [values["graph_ms"] for _, values in points]
                    axes.plot(ratios, times, marker="o", color=color, linestyle=":", label=f"{arm}, as a graph")
            axes.set(xscale="log", yscale="log")
            _label(axes, title, "candidates a request", unit)
    _save(figure, path)


def plot_latency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Milliseconds of `train.commands.score` over the candidates of a request."""
    figure, (axes,) = _panels(1)
    fields = {
        "broadcast_ms": "a copy of the request for every candidate, eager",
        "eager_ms": "no copies, eager",
        "exported_ms": "no copies, exported",
    }
    for (field, label), color in zip(fields.items(), COLORS, strict=False):
        points = [(row["candidates"], row[field]) for row in rows if field in row]
        axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    axes.set(xscale="log", yscale="log")
    _label(axes, "Scores of one request", "candidates", "ms")
    _save(figure, path)


def plot_scaling_law(
    points: Mapping[str, Sequence[tuple[float, float]]], lines: Mapping[str, tuple[float, float]], path: Path
) -> None:
    """NE over FLOPs of an example by model: a point a run, and the line of `launch.scaling_law` (intercept, slope)."""
    figure, (axes,) = _panels(1, height=5)
    for (name, runs), color in zip(points.items(), _cycle(len(points)), strict=True):
        flops, ne = np.array(runs).T
        axes.scatter(flops, ne, s=18, color=color, alpha=0.7)
        ends = np.array([flops.min(), flops.max()])
        intercept, slope = lines[name]
        label = f"{name}: {slope:+.4f} for ten times as many"
        axes.plot(ends, intercept + slope * np.log10(ends), color=color, label=label)
    axes.set(xscale="log")
    _label(axes, "NE of the best validation", "FLOPs of training an example", "NE")
    _save(figure, path)


def _panels(count: int, *, height: float = 4, vertical: bool = False) -> tuple[Figure, list[Axes]]:
    rows, columns = (count, 1) if vertical else (1, count)
    size = (8, 0.75 * height * rows) if vertical else (6 * columns, height)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=vertical)
    return figure, list(axes.flat)


def _focus(axes: Axes) -> None:
    """Cut the axis below the highest values: in its first steps a run is far above where it spends its time."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    values = values[np.isfinite(values)]
    if values.size and values.max() > values.min():
        low, high = np.quantile(values, [0, 0.97])
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
