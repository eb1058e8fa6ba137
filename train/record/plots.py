"""PNG plots of a run and of the comparison of arms. Figures are drawn on Agg, without a display or pyplot's globals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
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


def plot_training(records: Sequence[Record], path: Path, best_step: int = 0, *, early: bool = False) -> None:
    """Training loss, and in a panel for each task its NE (nmse of real numbers) in training and validation, over steps.

    `best_step` (0: none) is marked as the checkpoint that is tested, and the last step of a run that stopped `early`.
    """
    names = {name for record in records for name in record.values if name.endswith(("/ne", "/nmse"))}
    figure, (loss, *panels) = _panels(1 + len(names))
    steps, values = series(records, "train", "loss")
    loss.plot(steps, values, color=COLORS[0], alpha=0.35, linewidth=1, label="train")
    loss.plot(steps, smooth(values), color=COLORS[0], linewidth=2, label="train, smoothed")
    for axes, name in zip(panels, sorted(names), strict=True):
        task, _, metric = name.rpartition("/")
        steps, values = series(records, "train", name)
        axes.plot(steps, smooth(values), color=COLORS[0], alpha=0.6, linewidth=1.5, label="train, smoothed")
        axes.plot(*series(records, "valid", name), color=COLORS[1], marker="o", label="validation")
        metric = metric.upper() if metric == "ne" else metric
        _focus(axes, whole=axes.lines[-1])
        if axes.get_ylim()[1] > 0.97:
            axes.axhline(1, color="grey", linestyle=":", linewidth=1, label="constant predictor")
        _label(axes, task, "step", f"{metric} (lower is better)")
    _focus(loss)
    _label(loss, "Training loss", "step", "loss (nats)")
    last = max((record.step for record in records), default=0)
    for axes in (loss, *panels):
        if best_step:
            axes.axvline(best_step, color=COLORS[2], linestyle="--", linewidth=1, label=f"best, step {best_step:,}")
        if early:
            axes.axvline(last, color="grey", linestyle="-.", linewidth=1, label=f"stopped early, step {last:,}")
        _legend(axes)
    _save(figure, path)


def plot_calibration(histograms: Mapping[str, ScoreHistogram], path: Path) -> None:
    """Observed rate over mean prediction of score ranges of equal weight, one panel a task, on logarithmic axes.

    Bars are 95 % intervals (Wilson) of ranges that have as many rows as weight. A range without a positive is drawn at
    half a positive, hollow.
    """
    figure, panels = _panels(len(histograms), height=4.5)
    for axes, (task, histogram) in zip(panels, histograms.items(), strict=True):
        curve = calibration_curve(histogram)
        predicted, observed, weight = (part.numpy() for part in (curve.predicted, curve.observed, curve.weight))
        low, high = wilson(observed, weight)
        shown = np.maximum(observed, 0.5 / np.maximum(weight, 1))
        axes.vlines(predicted, np.minimum(np.maximum(low, 0.2 * shown), shown), high, color=COLORS[0], alpha=0.5)
        axes.plot(predicted, shown, color=COLORS[0], alpha=0.3, linewidth=1)
        some = observed > 0
        axes.plot(predicted[some], shown[some], "o", markersize=4, color=COLORS[0], label="observed, 95 %")
        if not some.all():
            axes.plot(predicted[~some], shown[~some], "o", markersize=4, mfc="none", color=COLORS[0], label="none seen")
        if predicted.size:
            ends = np.array([predicted.min(), predicted.max()])
            axes.plot(ends, ends, color="grey", linestyle=":", linewidth=1, label="calibrated")
            axes.set(xscale="log", yscale="log")
            plain_ticks(axes.xaxis, axes.yaxis)
        rows, positives = (float(part.sum()) for part in (histogram.positive + histogram.negative, histogram.positive))
        title = f"{task}: {rows:,.0f} rows, {positives:,.0f} positive"
        _label(axes, title, "mean prediction", "observed rate")
    _save(figure, path)


def wilson(rate: Floats, count: Floats, z: float = 1.96) -> tuple[Floats, Floats]:
    """The 95 % interval of a rate that was seen in `count` rows (Wilson 1927)."""
    count = np.maximum(count, 1e-9)
    middle = rate + z**2 / (2 * count)
    half = z * np.sqrt(np.maximum(rate * (1 - rate), 0) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return np.maximum((middle - half) / scale, 0), (middle + half) / scale


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


def plot_run(
    records: Sequence[Record],
    histograms: Mapping[str, ScoreHistogram],
    folder: Path,
    best_step: int = 0,
    *,
    early: bool = False,
) -> list[Path]:
    """Plots of a finished run: `training.png` and, with histograms, `calibration.png` and `scores.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "training.png"]
    plot_training(records, paths[0], best_step, early=early)
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


def plot_scaling_law(
    points: Mapping[str, Sequence[tuple[float, float]]],
    lines: Mapping[str, tuple[float, float, float] | None],
    path: Path,
) -> None:
    """NE over FLOPs of an example by model: a point a run, the means of sizes joined, and the line of
    `launch.scaling_law` (intercept, slope, the FLOPs up to which it was fitted), if it has one."""
    figure, (axes,) = _panels(1, height=5)
    for (name, runs), color in zip(points.items(), _cycle(len(points)), strict=True):
        flops, ne = np.array(sorted(runs)).T
        sizes = np.unique(flops)
        axes.scatter(flops, ne, s=18, color=color, alpha=0.7)
        axes.plot(sizes, [ne[flops == size].mean() for size in sizes], color=color, linewidth=1, label=name)
        if (line := lines[name]) is not None:
            intercept, slope, until = line
            ends = np.array([flops.min(), until])
            label = f"{name}: {slope:+.4f} for ten times as many"
            axes.plot(ends, intercept + slope * np.log10(ends), color=color, linestyle="--", linewidth=2, label=label)
    axes.set(xscale="log")
    _label(axes, "NE of the best validation", "FLOPs of training an example", "NE (lower is better)")
    _save(figure, path)


def _panels(count: int, *, height: float = 4, vertical: bool = False) -> tuple[Figure, list[Axes]]:
    """`count` axes, one below the other or in rows of at most three."""
    columns = 1 if vertical else 2 if count == 4 else max(1, min(3, count))
    rows = -(-max(count, 1) // columns)
    size = (8, 0.75 * height * rows) if vertical else (6 * columns, height * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=vertical).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def plain_ticks(*logarithmic: Axis) -> None:
    """Numbers such as 0.02, 6 or 3,000 at the ticks of these axes, in place of powers of ten."""
    for axis in logarithmic:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _focus(axes: Axes, whole: Line2D | None = None) -> None:
    """Cut the axis below the highest values: in its first steps a run is far above where it spends its time. All of the
    line `whole` is seen."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    values = values[np.isfinite(values)]
    if values.size and values.max() > values.min():
        low, high = np.quantile(values, [0, 0.97])
        if whole is not None:
            seen = np.asarray(whole.get_ydata(), dtype=np.float64)
            high = max([high, *seen[np.isfinite(seen)].tolist()])
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
