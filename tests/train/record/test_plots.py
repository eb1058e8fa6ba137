"""Plots: what is drawn, and that a readable PNG comes of it. Whether it is legible was looked at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from train.metrics import ScoreHistogram, score_histogram
from train.record.plots import (
    plot_arms,
    plot_calibration,
    plot_run,
    plot_scaling_law,
    plot_scores,
    plot_training,
    series,
    smooth,
    wilson,
)
from train.record.tracking import Record


def records(steps=60):
    made = [
        Record(step, "train", 0.0, {"loss": 0.7 - step / 500, "click/ne": 1 - step / 600, "like/ne": math.nan})
        for step in range(steps)
    ]
    return made + [Record(59, "valid", 0.0, {"click/ne": 0.95, "like/ne": 0.97})]


def histograms():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator) - 2
    labels = (torch.rand(5000, generator=generator) < logits.sigmoid()).float()
    return {"click": score_histogram(logits, labels), "like": score_histogram(logits - 3, labels)}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures, save = [], Figure.savefig

    def keep(figure, path, **options):
        figures.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def is_picture(path):
    pixels = imread(path)
    return min(pixels.shape[:2]) > 200 and pixels[..., :3].std() > 0.01


def line(axes, label):
    return next(found for found in axes.lines if found.get_label() == label)


def test_series_skips_records_without_the_metric():
    assert series(records(3), "valid", "click/ne") == ([59], [0.95])
    assert series(records(3), "valid", "loss") == ([], [])


def test_smooth_has_no_bias_at_the_ends_and_skips_nan():
    assert smooth([2.0] * 5).tolist() == pytest.approx([2.0] * 5)
    halved = smooth([1.0, 0.0], half_life=1)
    assert halved.tolist() == pytest.approx([2 / 3, 1 / 3])
    with_gap = smooth([math.nan, 1.0, math.nan])
    assert with_gap.tolist() == pytest.approx([1, 1, 1])
    assert smooth([]).size == 0
    assert math.isnan(smooth([math.nan])[0])


def test_training_plot(tmp_path, drawn):
    made = [*records(), Record(30, "valid", 0.0, {"click/ne": 1.4, "like/ne": 0.96})]
    plot_training(made, tmp_path / "plot.png", 30, early=True)
    loss, click, like = drawn[0].axes
    assert len(line(loss, "train, smoothed").get_xdata()) == 60
    assert line(click, "validation").get_ydata().tolist() == [0.95, 1.4]
    assert click.get_ylim()[1] > 1.4  # what decides is never cut off
    for axes in (loss, click, like):
        assert line(axes, "best, step 30").get_xdata() == [30, 30]
        assert line(axes, "stopped early, step 59").get_xdata() == [59, 59]
    assert [axes.get_title() for axes in (click, like)] == ["click", "like"]
    assert like.get_ylabel() == "NE (lower is better)"
    assert is_picture(tmp_path / "plot.png")
    plot_training(records(), tmp_path / "plot.png")
    assert not [each for each in drawn[1].axes[0].lines if str(each.get_label()).startswith(("best", "stopped"))]


def test_calibration_plot_lies_on_the_diagonal(tmp_path, drawn):
    plot_calibration(histograms(), tmp_path / "plot.png")
    axes, like = drawn[0].axes
    click = line(axes, "observed, 95 %")
    # 250 rows a point at a rate of at most 0.5: a standard error of 0.03; four of them.
    np.testing.assert_allclose(click.get_xdata(), click.get_ydata(), atol=0.13)
    assert axes.get_xscale() == like.get_yscale() == "log"
    assert like.get_title().startswith("like: 5,000 rows, ")
    assert is_picture(tmp_path / "plot.png")


def test_intervals_of_rates_are_those_of_wilson():
    low, high = wilson(np.array([0.0, 0.1]), np.array([100.0, 100.0]))
    # statsmodels.stats.proportion.proportion_confint(method="wilson")
    np.testing.assert_allclose(low, [0, 0.05522914], atol=1e-4)
    np.testing.assert_allclose(high, [0.03699480, 0.17436570], atol=1e-4)


def test_lines_end_where_ne_stops_falling(tmp_path, drawn):
    points = {"u": [(1e6, 0.9), (1e7, 0.8), (1e8, 0.7), (1e9, 0.85)], "none": [(1e6, 0.8), (1e7, 0.9), (1e8, 0.9)]}
    plot_scaling_law(points, {"u": (1.5, -0.1, 1e8), "none": None}, tmp_path / "law.png")
    (axes,) = drawn[0].axes
    assert line(axes, "u: -0.1000 for ten times as many").get_xdata().max() == 1e8
    assert line(axes, "u").get_xdata().max() == 1e9
    assert not [each for each in axes.lines if str(each.get_label()).startswith("none:")]


def test_score_plot_shares_add_up(tmp_path, drawn):
    plot_scores(histograms(), tmp_path / "plot.png")
    click, like = drawn[0].axes
    for patch in (*click.patches, *like.patches):
        # The axis ends at the 99.9 % quantile of both classes; positives score high, so more of theirs lie beyond.
        assert patch.get_data().values.sum() == pytest.approx(1, abs=0.01)
    assert click.patches[0].get_data().edges[-1] > like.patches[0].get_data().edges[-1]
    assert is_picture(tmp_path / "plot.png")


def test_arms_plot_shows_curves_and_gap(tmp_path, drawn):
    steps = list(range(50))
    base = [[0.7 + seed - step / 500 for step in steps] for seed in (-0.1, 0.1)]
    arms = {
        "bf16": [(steps, curve) for curve in base],
        "mxfp8": [(steps, [1.01 * value for value in curve]) for curve in base],
    }
    plot_arms(arms, "bf16", tmp_path / "plot.png")
    curves, gap = drawn[0].axes
    # The mean of the two seeds is a straight line, which smoothing leaves as it is in the middle.
    assert line(curves, "bf16, 2 seeds").get_ydata()[24:26].mean() == pytest.approx(0.7 - 24.5 / 500)
    np.testing.assert_allclose(line(gap, "mxfp8 - bf16").get_ydata(), 1.0, atol=1e-9)
    assert is_picture(tmp_path / "plot.png")


def test_arms_of_other_steps_are_refused(tmp_path):
    arms = {"bf16": [([0, 1], [1.0, 1.0])], "mxfp8": [([0, 2], [1.0, 1.0])]}
    with pytest.raises(ValueError, match=r"arm 'mxfp8' was recorded at other steps than 'bf16'"):
        plot_arms(arms, "bf16", tmp_path / "plot.png")


def test_a_run_without_anything_to_show_still_gets_its_plots(tmp_path):
    none, some = torch.zeros(16).double(), torch.ones(16).double()
    unseen, all_positive = ScoreHistogram(none, none), ScoreHistogram(some, none)
    paths = plot_run([], {"click": unseen, "like": all_positive}, tmp_path / "plots")
    assert [path.name for path in paths] == ["training.png", "calibration.png", "scores.png"]
    assert all(path.exists() for path in paths)


def test_a_run_without_evaluation_has_its_training_plot(tmp_path):
    assert plot_run(records(), {}, tmp_path) == [tmp_path / "training.png"] == list(tmp_path.iterdir())
