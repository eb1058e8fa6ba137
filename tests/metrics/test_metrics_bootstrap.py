"""Bootstrap intervals: estimates equal the metrics, widths equal theory, pairs cancel, degenerate input is NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from train.metrics import Interval, auc, bootstrap, gauc, metric_intervals, paired_gaps


def random_rows(seed=0, size=600, users=80):
    generator = np.random.default_rng(seed)
    labels = (generator.random(size) < 0.3).astype(np.float64)
    logits = np.round(generator.normal(size=size) + labels, 1)
    return labels, logits, generator.integers(0, users, size), generator.random(size) + 0.1


def test_estimates_are_the_metrics_of_the_rows():
    labels, logits, group, weights = random_rows()
    labels[:20], logits[:20] = math.nan, math.nan
    found = metric_intervals(labels, logits, base_rate=0.2, group=group, weights=weights, resamples=20)
    y, z, w, g = (torch.from_numpy(array) for array in (labels, logits, weights, group))
    assert found["auc"].estimate == pytest.approx(auc(z, y, w).item(), abs=1e-12)
    assert found["gauc"].estimate == pytest.approx(gauc(z, y, w, g).item(), abs=1e-12)
    observed = ~np.isnan(labels)
    loss = np.logaddexp(0, -(2 * labels[observed] - 1) * logits[observed])
    entropy = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    assert found["ne"].estimate == pytest.approx(np.average(loss, weights=weights[observed]) / entropy, abs=1e-12)
    assert all(value.low < value.estimate < value.high for value in found.values())


def test_a_resample_is_the_metric_of_the_drawn_rows():
    labels, logits, group, weights = random_rows(size=50, users=9)
    rows = bootstrap._Rows(labels, group, weights)
    arm = bootstrap._Arm(rows, logits)
    _, counts = rows.draws(resamples=3, seed=1)
    assert counts.sum(1).tolist() == [rows.num_units] * 3
    assert counts.max() > 1
    found = arm.metrics(counts, base_rate=0.3)
    for draw, count in enumerate(counts.astype(int)):
        # A user drawn twice is two users: copies get a group of their own.
        drawn = [(row, copy) for row in range(50) for copy in range(count[rows.unit[row]])]
        index, copy = torch.tensor(drawn).unbind(1)
        y, z, w, g = (torch.from_numpy(array)[index] for array in (labels, logits, weights, rows.unit))
        assert found["auc"][draw] == pytest.approx(auc(z, y, w).item(), abs=1e-12)
        assert found["gauc"][draw] == pytest.approx(gauc(z, y, w, g * 100 + copy).item(), abs=1e-12)


def test_width_of_a_mean_is_that_of_theory():
    labels, logits, _, _ = random_rows(size=2000)
    found = metric_intervals(labels, logits, base_rate=0.3, resamples=2000)["ne"]
    loss = np.logaddexp(0, -(2 * labels - 1) * logits)
    standard_error = loss.std() / math.sqrt(2000) / -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    # Percentiles of 2,000 resamples: about 3 % of sampling error at each end.
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_clusters_that_agree_widen_the_interval():
    labels, logits, _, _ = random_rows(size=100)
    copies = 9
    group = np.tile(np.arange(100), copies)
    labels, logits = np.tile(labels, copies), np.tile(logits, copies)
    by_row = metric_intervals(labels, logits, base_rate=0.3, resamples=500)["ne"]
    by_user = metric_intervals(labels, logits, base_rate=0.3, group=group, resamples=500)["ne"]
    # Nine copies of each row are no new evidence: the honest interval is sqrt(9) times as wide.
    assert (by_user.high - by_user.low) / (by_row.high - by_row.low) == pytest.approx(3, rel=0.2)


def test_paired_gap_is_far_narrower_than_its_arms():
    labels, logits, group, _ = random_rows()
    other = logits + 0.01 * np.random.default_rng(1).normal(size=logits.size) - 0.02
    gaps = paired_gaps(labels, logits, other, base_rate=0.3, group=group, resamples=300)
    a = metric_intervals(labels, logits, base_rate=0.3, group=group, resamples=300)
    b = metric_intervals(labels, other, base_rate=0.3, group=group, resamples=300)
    for name in ("ne", "auc", "gauc"):
        assert gaps[name].estimate == pytest.approx(b[name].estimate - a[name].estimate, abs=1e-12)
        assert gaps[name].high - gaps[name].low < 0.2 * (a[name].high - a[name].low)
    percent = 100 * (b["ne"].estimate / a["ne"].estimate - 1)
    assert gaps["ne_percent"].estimate == pytest.approx(percent, abs=1e-9)


def test_equal_arms_have_no_gap():
    labels, logits, group, _ = random_rows()
    gaps = paired_gaps(labels, logits, logits, base_rate=0.3, group=group, resamples=50)
    assert set(gaps) == {"ne", "ne_percent", "auc", "gauc"}
    assert all(gap == Interval(0, 0, 0) for gap in gaps.values())


def test_result_depends_on_the_seed_and_not_on_the_slices(monkeypatch):
    labels, logits, group, _ = random_rows()
    first = metric_intervals(labels, logits, base_rate=0.3, group=group, resamples=64)
    assert first != metric_intervals(labels, logits, base_rate=0.3, group=group, resamples=64, seed=1)
    monkeypatch.setattr(bootstrap, "ELEMENTS_AT_ONCE", 600 * 5)
    for name, value in metric_intervals(labels, logits, base_rate=0.3, group=group, resamples=64).items():
        # Matrix products of other shapes round differently.
        assert vars(value) == pytest.approx(vars(first[name]), abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "logits"),
    [([], []), ([math.nan, math.nan], [0.0, 1.0]), ([1.0, 1.0], [0.0, 1.0]), ([1.0, 0.0], [0.0, math.nan])],
    ids=["empty", "unobserved", "one class", "nan logit"],
)
def test_degenerate_rows_give_nan(labels, logits):
    found = metric_intervals(labels, logits, base_rate=0.3, group=np.zeros(len(labels), int), resamples=20)
    for name in ("auc", "gauc"):
        assert np.isnan([found[name].estimate, found[name].low, found[name].high]).all()
    assert math.isfinite(found["ne"].estimate) == (labels == [1.0, 1.0])
    assert math.isnan(metric_intervals([1.0, 0.0], [0.0, 1.0], base_rate=1.0, resamples=5)["ne"].low)


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\), expected that of the labels, \(3,\)"):
        metric_intervals([0, 1, 1], [0.1, 0.2], base_rate=0.3)
