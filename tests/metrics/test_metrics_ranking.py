"""AUC, GAUC, AUPRC, XAUC and log loss against scikit-learn and against the sum over all pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.metrics import log_loss as sklearn_log_loss
from torchrec.metrics import auprc as torchrec_auprc
from torchrec.metrics import gauc as torchrec_gauc
from torchrec.metrics import ne
from torchrec.metrics import rauc as torchrec_rauc
from torchrec.metrics import xauc as torchrec_xauc

from train.metrics import (
    ScoreHistogram,
    auc,
    auprc,
    binary_entropy,
    calibration_curve,
    gauc,
    gauc_means,
    log_loss,
    normalized_entropy,
    recalibrated_log_loss,
    score_histogram,
    segment_auc,
    streaming_auc,
    streaming_auc_bound,
    xauc,
)

# Sums of about 1e3 float64 terms in another order than scikit-learn's.
EXACT = 1e-12


def random_rows(seed, size, *, ties=False, weighted=False, groups=7):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(size, generator=generator) < 0.3).float()
    scores = torch.randn(size, generator=generator) + labels
    if ties:
        scores = (scores * 2).round() / 2
    weights = torch.rand(size, generator=generator) + 0.1 if weighted else torch.ones(size)
    group = torch.randint(-3, groups - 3, (size,), generator=generator) * 1_000_003
    return scores, labels, weights, group


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_auc_equals_sklearn(ties, weighted):
    scores, labels, weights, _ = random_rows(0, 1000, ties=ties, weighted=weighted)
    expected = roc_auc_score(labels, scores, sample_weight=weights.double())
    assert auc(scores, labels, weights).item() == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gauc_equals_sklearn_by_user(ties, weighted):
    scores, labels, weights, group = random_rows(1, 300, ties=ties, weighted=weighted, groups=60)
    total = weight_sum = 0.0
    each = []
    for user in group.unique():
        of_user = group == user
        if labels[of_user].unique().numel() == 2:
            weight = weights[of_user].double().sum().item()
            user_auc = roc_auc_score(labels[of_user], scores[of_user], sample_weight=weights[of_user].double())
            total, weight_sum = total + weight * user_auc, weight_sum + weight
            each.append(user_auc)
    assert 0 < weight_sum < weights.sum()  # some users have one class only
    assert gauc(scores, labels, weights, group).item() == pytest.approx(total / weight_sum, abs=EXACT)
    means = gauc_means(scores, labels, weights, group).tolist()
    assert means == pytest.approx([total / weight_sum, np.mean(each)], abs=EXACT)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_auprc_equals_sklearn(ties, weighted):
    scores, labels, weights, _ = random_rows(2, 1000, ties=ties, weighted=weighted)
    weights[::7] = 0
    weights[scores == scores.max()] = 0  # at the top, where precision is 0 / 0
    expected = average_precision_score(labels, scores, sample_weight=weights.double())
    assert auprc(scores, labels, weights).item() == pytest.approx(expected, abs=EXACT)


def test_what_the_table_of_names_says_equals_torchrec_does():
    scores, labels, weights, group = random_rows(5, 300, ties=False, weighted=True, groups=40)
    order = group.argsort(stable=True)
    y, p, w = (each[order].double()[None] for each in (labels, scores.sigmoid(), weights))
    ce = ne.compute_cross_entropy(y, p, w, 0.0).sum(1)
    own = ne.compute_ne(ce, w.sum(1), (w * y).sum(1), (w * (1 - y)).sum(1), 0.0)
    groups = torchrec_gauc.get_auc_states(y.float(), p.float(), w.float(), group.unique(return_counts=True)[1])
    minutes = scores + scores.roll(1)  # no two equal
    pairs = torchrec_xauc.get_xauc_states(minutes[None], scores[None], weights[None])
    ones = torch.ones(300)
    rank_auc = torchrec_rauc.compute_rauc(1, [scores[None]], [minutes[None]], [ones[None]])
    loss, rate = (weights * log_loss(scores, labels)).sum() / weights.sum(), (weights * labels).sum() / weights.sum()
    for ours, theirs in (
        (normalized_entropy(loss.item(), rate.item()), own),
        (auprc(scores, labels, weights), torchrec_auprc.compute_auprc(1, p, y, w)),
        (gauc_means(scores, labels, weights, group)[1], groups["auc_sum"] / groups["num_samples"]),
        (xauc(scores, minutes, weights), pairs["error_sum"] / pairs["weighted_num_pairs"]),
        (xauc(scores, minutes, ones), rank_auc),
    ):
        assert float(ours) == pytest.approx(theirs.item(), abs=1e-6)  # some of theirs are float32


def test_auprc_of_one_class():
    scores = torch.tensor([0.1, 0.2])
    assert auprc(scores, torch.ones(2), torch.ones(2)) == 1
    assert auprc(scores, torch.zeros(2), torch.ones(2)).isnan()
    assert auprc(scores, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).isnan()


real_rows = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([0.0, 0.5, 7.0, 30.0, 31.0, 90.0, -4.0, math.nan]),
        st.sampled_from([0.0, 1.0, 2.5]),
    ),
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(real_rows)
def test_xauc_equals_the_sum_over_pairs(rows):
    scores, labels, weights = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    right = pairs = 0.0
    for score, label, weight in rows:
        for other_score, other_label, other_weight in rows:
            if label > other_label:
                pairs += weight * other_weight
                right += weight * other_weight * ((score > other_score) + 0.5 * (score == other_score))
    expected = right / pairs if pairs else math.nan
    assert xauc(scores, labels, weights).item() == pytest.approx(expected, abs=EXACT, nan_ok=True)


def test_xauc_of_two_labels_is_auc_and_a_nan_score_shows():
    scores, labels, weights, _ = random_rows(3, 500, ties=True, weighted=True)
    assert xauc(scores, labels * 60, weights).item() == pytest.approx(auc(scores, labels, weights).item(), abs=EXACT)
    scores[0] = math.nan
    assert xauc(scores, labels, weights).isnan()
    labels[0] = math.nan
    assert not xauc(scores, labels, weights).isnan()


@pytest.mark.parametrize("shift", [0.0, -3.0, 200.0])
def test_recalibrated_log_loss_is_that_of_the_best_constant(shift):
    scores, labels, weights, _ = random_rows(4, 400, ties=True, weighted=True)
    labels[::9], weights[::8] = math.nan, 0
    seen = ~labels.isnan()
    y, z, w = labels[seen], scores[seen].double(), weights[seen].double()

    def loss(constant: float) -> float:
        return ((w * log_loss(z + constant, y)).sum() / w.sum()).item()

    best = minimize_scalar(loss, bounds=(-5, 5), options={"xatol": 1e-9})
    scores[0] = math.nan  # its label was not observed
    # float32 logits around 200 are rounded by 2^-17; half of that enters the loss, averaged.
    tolerance = 1e-10 if shift < 100 else 2**-17
    assert recalibrated_log_loss(scores + shift, labels, weights).item() == pytest.approx(best.fun, abs=tolerance)


def test_negatives_that_were_sampled_need_no_rate_for_the_recalibrated_loss():
    # He et al.: trained on a tenth of the negatives, p becomes p / (p + (1 - p) / w), w = 0.1.
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(50_000, generator=generator, dtype=torch.float64) * 0.3
    labels = (torch.rand(50_000, generator=generator) < p).float()
    sampled, ones = p / (p + (1 - p) * 0.1), torch.ones(50_000)
    expected = log_loss((sampled / (sampled + (1 - sampled) / 0.1)).logit(), labels).mean()
    found = recalibrated_log_loss(sampled.logit(), labels, ones)
    # Correct probabilities: the best constant is within sampling noise of theirs, and the loss is flat there.
    assert expected - 1e-4 < found <= expected
    assert log_loss(sampled.logit(), labels).mean() > 1.5 * expected


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([], []), ([0.3, 0.1], [1.0, 1.0]), ([0.3], [0.0]), ([0.3, math.nan], [1.0, 0.0]), ([0.3, 1.0], [1.0, math.nan])],
)
def test_recalibrated_log_loss_without_meaning_is_nan(logits, labels):
    labels = torch.tensor(labels)
    assert recalibrated_log_loss(torch.tensor(logits), labels, torch.ones_like(labels)).isnan()


rows = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.0, math.nan]), st.integers(0, 3)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_segment_auc_equals_the_sum_over_pairs(rows):
    scores, labels, group = (torch.tensor([row[i] for row in rows], dtype=torch.float32) for i in range(3))
    group = group.long()
    values, weights = segment_auc(scores, labels, torch.ones_like(scores), group)
    for user, value, weight in zip(group.unique(), values, weights, strict=True):
        positive, negative = scores[(group == user) & (labels == 1)], scores[(group == user) & (labels == 0)]
        gap = positive[:, None] - negative
        wins = ((gap > 0).double() + 0.5 * (gap == 0)).sum()
        assert weight == positive.numel() + negative.numel()
        torch.testing.assert_close(value, wins / gap.numel(), equal_nan=True)


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        ([], []),
        ([0.3], [1.0]),
        ([0.3, 0.4], [1.0, 1.0]),
        ([0.3, 0.4], [0.0, 0.0]),
        ([0.3, 0.4], [1.0, math.nan]),
        ([0.3, math.nan], [1.0, 0.0]),
    ],
    ids=["empty", "one row", "positives", "negatives", "unobserved", "nan score"],
)
def test_ranking_without_meaning_is_nan(scores, labels):
    scores, labels = torch.tensor(scores), torch.tensor(labels)
    weights, group = torch.ones_like(labels), torch.zeros(len(labels), dtype=torch.int64)
    assert auc(scores, labels, weights).isnan()
    assert gauc_means(scores, labels, weights, group).isnan().all()


def test_equal_scores_have_auc_one_half():
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    zeros = torch.zeros(5)
    assert auc(zeros, labels, torch.ones(5)) == 0.5
    assert gauc(zeros, labels, torch.ones(5), torch.tensor([1, 1, 1, 2, 2])) == 0.5
    assert streaming_auc(score_histogram(zeros, labels)) == 0.5


def test_unobserved_rows_change_nothing_even_with_nan_scores():
    scores, labels, weights, group = random_rows(2, 200)
    hidden = torch.cat([torch.full((50,), torch.nan), torch.randn(50)])
    nowhere = torch.full((100,), torch.nan)
    more = (
        torch.cat([scores, hidden]),
        torch.cat([labels, nowhere]),
        torch.cat([weights, torch.ones(100)]),
    )
    assert auc(*more) == auc(scores, labels, weights)
    assert gauc(*more, torch.cat([group, group[:100]])) == gauc(scores, labels, weights, group)


def test_saturated_scores_keep_their_order():
    # As float32 probabilities all four would be 1; logits still rank them.
    scores, labels = torch.tensor([20.0, 30.0, 40.0, 50.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(scores, labels, torch.ones(4)) == 1


@pytest.mark.parametrize("num_bins", [8, 64, 8192])
@pytest.mark.parametrize("shift", [0.0, -5.0])
def test_streaming_auc_is_within_its_bound(num_bins, shift):
    scores, labels, weights, _ = random_rows(3, 4000, weighted=True)
    histogram = score_histogram(scores + shift, labels, weights, num_bins)
    error = (streaming_auc(histogram) - auc(scores, labels, weights)).abs()
    bound = streaming_auc_bound(histogram)
    assert error <= bound
    if num_bins == 8192:
        assert bound < 1e-3
    if num_bins == 8:
        assert error > 1e-3  # the bound has something to bound


def test_streaming_auc_of_one_class_is_nan():
    histogram = score_histogram(torch.randn(5), torch.ones(5))
    assert streaming_auc(histogram).isnan()
    assert streaming_auc_bound(histogram).isnan()


def test_streaming_auc_bound_is_reached():
    # Both classes in one bin, perfectly separated inside it: 1 exactly, 0.5 streaming.
    scores, labels = torch.tensor([0.0, 1e-4]), torch.tensor([0.0, 1.0])
    histogram = score_histogram(scores, labels)
    assert auc(scores, labels, torch.ones(2)) - streaming_auc(histogram) == streaming_auc_bound(histogram) == 0.5


def test_histogram_counts_every_observed_row_and_merges_by_addition():
    logits = torch.tensor([-math.inf, -99.0, 0.1, 99.0, math.inf, math.nan, 0.2])
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, math.nan])
    whole = score_histogram(logits, labels)
    assert whole.positive.sum() == whole.negative.sum() == 3
    assert whole.positive[0] == whole.negative[0] == whole.positive[-1] == whole.negative[-1] == 1
    first, second = score_histogram(logits[:3], labels[:3]), score_histogram(logits[3:], labels[3:])
    torch.testing.assert_close(first.positive + second.positive, whole.positive)


def test_log_loss_equals_sklearn():
    logits, labels, weights, _ = random_rows(4, 500, weighted=True)
    ours = (weights * log_loss(logits, labels)).sum() / weights.double().sum()
    expected = sklearn_log_loss(labels, torch.sigmoid(logits.double()), sample_weight=weights.double())
    assert ours.item() == pytest.approx(expected, abs=EXACT)


def test_log_loss_of_extreme_logits():
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4, math.inf, math.inf])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    assert log_loss(logits, labels).tolist() == [0, 0, 1e4, 1e4, 0, math.inf]


def test_normalized_entropy_divides_by_the_entropy_of_the_training_rate():
    assert binary_entropy(0.5) == pytest.approx(math.log(2))
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    constant = torch.full((4,), 0.25).logit()
    mean = log_loss(constant, labels).mean().item()
    # float32 logit of 0.25
    assert normalized_entropy(mean, 0.25) == pytest.approx(1, abs=1e-7)
    assert normalized_entropy(mean, 0.1) == pytest.approx(mean / -(0.1 * math.log(0.1) + 0.9 * math.log(0.9)))
    assert math.isnan(normalized_entropy(mean, 0.0))
    assert math.isnan(normalized_entropy(mean, 1.0))


def test_calibration_curve_follows_calibrated_scores():
    generator = torch.Generator().manual_seed(5)
    probability = torch.rand(20_000, generator=generator)
    labels = (torch.rand(20_000, generator=generator) < probability).float()
    curve = calibration_curve(score_histogram(probability.logit(), labels), points=10)
    assert curve.predicted.numel() == 10
    # 2,000 rows a point: a standard error of at most 0.011; four of them.
    torch.testing.assert_close(curve.observed, curve.predicted, atol=0.045, rtol=0)
    # Middle of each tenth of a uniform distribution, up to the width of a bin and sampling.
    torch.testing.assert_close(curve.predicted, torch.arange(0.05, 1, 0.1).double(), atol=0.01, rtol=0)
    assert curve.weight.sum() == 20_000


def test_calibration_curve_of_few_or_no_rows():
    one = calibration_curve(score_histogram(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])))
    assert one.observed.tolist() == pytest.approx([1 / 3])
    assert one.predicted.tolist() == pytest.approx([0.5], abs=1e-3)  # half a bin
    empty = calibration_curve(ScoreHistogram(torch.zeros(16).double(), torch.zeros(16).double()))
    assert empty.observed.numel() == 0


def test_segments_of_very_different_weight_do_not_disturb_each_other():
    # Prefix sums run over all rows; a user behind 1e9 of weight still gets a sound AUC.
    scores, labels, _, _ = random_rows(6, 200)
    weights = torch.cat([torch.full((100,), 1e7), torch.ones(100)])
    group = torch.arange(2).repeat_interleave(100)
    value, _ = segment_auc(scores, labels, weights, group)
    expected = roc_auc_score(labels[100:], scores[100:])
    # 1e9 * 2^-53 of rounding against pair sums of about 1e3
    assert value[1].item() == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(value.numpy()).all()
