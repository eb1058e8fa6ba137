"""Metrics of tasks that are not binary, against numpy; places in a catalogue against sorting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from modules.loss import TaskLosses
from train.metrics.catalogue import catalogue_means, catalogue_names, catalogue_sums
from train.metrics.tasks import TaskMetrics

CPU = torch.device("cpu")
CONFIG = {
    "rating": {"loss": "squared"},
    "genre": {"loss": "classes", "number": 3},
    "order": {"loss": "pairwise"},
}
TASKS = ("click", *CONFIG)


def test_every_kind_of_task_has_its_own_metrics() -> None:
    generator = np.random.default_rng(0)
    offsets = np.array([0, 3, 3, 7, 12])
    logits = generator.normal(size=(12, 6)).astype(np.float32)
    labels = np.stack(
        [generator.integers(2, size=12), generator.normal(3, 1, 12), np.arange(12) % 3, generator.integers(3, size=12)],
        axis=1,
    ).astype(np.float32)
    labels[2, 1] = labels[5, 2] = labels[8, 3] = np.nan
    weights = generator.uniform(0.5, 2, size=(12, 4)).astype(np.float32)
    metrics = TaskMetrics(TaskLosses(CONFIG, TASKS), {"click": 0.5}, CPU, max_candidates=5, exact_auc=True)
    for begin, end in itertools.pairwise((0, 3, 12)):  # two batches of whole requests
        inside = offsets[(offsets >= begin) & (offsets <= end)] - begin
        rows = (torch.from_numpy(x[begin:end]) for x in (logits, labels, weights))
        metrics.update(*rows, torch.zeros(end - begin, dtype=torch.int64), torch.from_numpy(inside))
    values = metrics.compute()
    assert "click/ne" in values
    seen = ~np.isnan(labels[:, 1])
    error, label, weight = logits[seen, 1] - labels[seen, 1], labels[seen, 1], weights[seen, 1]
    mse = np.average(error**2, weights=weight)
    variance = np.average((label - np.average(label, weights=weight)) ** 2, weights=weight)
    assert values["rating/rmse"] == pytest.approx(mse**0.5, rel=1e-5)
    assert values["rating/mae"] == pytest.approx(np.average(np.abs(error), weights=weight), rel=1e-5)
    assert values["rating/nmse"] == pytest.approx(mse / variance, rel=1e-4)
    assert values["rating/examples"] == 11
    rows = list(zip(logits[seen, 1], label, weight, strict=True))
    pairs = [(a[2] * b[2], (a[0] > b[0]) + 0.5 * (a[0] == b[0])) for a in rows for b in rows if a[1] > b[1]]
    share = sum(each * right for each, right in pairs) / sum(each for each, _ in pairs)
    assert values["rating/xauc"] == pytest.approx(share, rel=1e-5)
    seen = ~np.isnan(labels[:, 2])
    of_classes, classes, weight = logits[seen, 2:5].astype(np.float64), labels[seen, 2].astype(int), weights[seen, 2]
    log_shares = of_classes - np.log(np.exp(of_classes).sum(1, keepdims=True))
    loss = -np.average(log_shares[np.arange(11), classes], weights=weight)
    shares = np.bincount(classes, weights=weight) / weight.sum()
    assert values["genre/log_loss"] == pytest.approx(loss, rel=1e-5)
    assert values["genre/accuracy"] == pytest.approx(
        np.average(of_classes.argmax(1) == classes, weights=weight), rel=1e-5
    )
    assert values["genre/ne"] == pytest.approx(loss / -(shares * np.log(shares)).sum(), rel=1e-5)
    total = right = 0.0
    for begin, end in itertools.pairwise(offsets):
        rows = [c for c in range(begin, end) if not np.isnan(labels[c, 3])]
        pairs = [(i, j) for i in rows for j in rows if labels[i, 3] > labels[j, 3]]
        if pairs:
            weight = np.mean([weights[c, 3] for c in rows])
            total += weight
            right += weight * np.mean([logits[i, 5] > logits[j, 5] for i, j in pairs])
    assert values["order/pair_accuracy"] == pytest.approx(right / total, rel=1e-5)
    assert metrics.best == {"rating": ("nmse", False), "genre": ("ne", False), "order": ("pair_accuracy", True)}
    metrics.reset()
    assert all(
        math.isnan(metrics.compute()[name])
        for name in ("rating/rmse", "rating/xauc", "genre/ne", "order/pair_accuracy")
    )


def test_labels_that_are_all_equal_have_no_nmse() -> None:
    metrics = TaskMetrics(
        TaskLosses({"r": {"loss": "huber"}}, ("r",)), {"r": 3.0}, CPU, max_candidates=1, exact_auc=True
    )
    metrics.update(torch.zeros(4, 1), torch.full((4, 1), 0.1), torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
    values = metrics.compute()
    assert math.isnan(values["r/nmse"])
    assert values["r/rmse"] == pytest.approx(0.1)
    metrics.update(torch.full((1, 1), torch.nan), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    assert math.isinf(metrics.compute()["r/nmse"])


def test_places_in_a_catalogue_are_those_of_sorting_and_ties_an_expectation() -> None:
    top_k = [1, 3]
    greater, tied = torch.tensor([0, 2, 1, 5, 0]), torch.tensor([0, 0, 2, 1, 9])
    weights, known = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]), torch.tensor([True] * 4 + [False])
    sums = catalogue_sums(greater, tied, known, weights, top_k)
    expected = dict.fromkeys(catalogue_names(top_k), 0.0)
    for g, t, w in zip(greater[:4].tolist(), tied[:4].tolist(), weights.tolist(), strict=False):
        for rank in range(g + 1, g + t + 2):  # each as likely as the others
            share = w / (t + 1)
            expected["mrr"] += share / rank
            for k in top_k:
                expected[f"mrr@{k}"] += share * (rank <= k) / rank
                expected[f"hr@{k}"] += share * (rank <= k)
                expected[f"ndcg@{k}"] += share * (rank <= k) / math.log2(rank + 1)
    assert sums[:2].tolist() == [5, 5.5]
    assert sums[2:].tolist() == pytest.approx(list(expected.values()))


def test_of_requests_with_several_targets_ndcg_and_recall_are_means_over_requests() -> None:
    top_k = [1, 3]
    greater, tied = torch.tensor([0, 3, 1, 0, 7]), torch.tensor([0, 0, 1, 0, 0])
    weights, known = torch.tensor([1.0, 1.0, 1.0, 2.0, 0.5]), torch.tensor([True] * 4 + [False])
    requests = [[0, 1, 2], [3], [4]]
    of_request = torch.tensor([3, 3, 3, 1, 1])
    sums = catalogue_sums(greater, tied, known, weights, top_k, of_request)
    values = catalogue_means(sums.tolist(), top_k, several=True)
    # By hand: the targets of the first request have ranks 1, 4, and 2 or 3; the second's rank 1; the third's none.
    weight = [1.0, 2.0, 0.5]
    ranks = [[[1, 4, 2], [1, 4, 3]], [[1]], [[math.inf]]]  # orders that are as likely
    for k in top_k:
        recall = [np.mean([[rank <= k for rank in order] for order in orders]) for orders in ranks]
        best = [sum(1 / math.log2(place + 2) for place in range(min(k, len(each)))) for each in requests]
        gains = [
            np.mean([sum(1 / math.log2(rank + 1) for rank in order if rank <= k) for order in orders])
            for orders in ranks
        ]
        assert values[f"recall@{k}"] == pytest.approx(np.average(recall, weights=weight))
        assert values[f"ndcg@{k}"] == pytest.approx(np.average(np.array(gains) / best, weights=weight))
    assert values["mrr"] == pytest.approx((1 + 1 / 4 + (1 / 2 + 1 / 3) / 2 + 2) / 5.5)
    assert values["mrr@3"] == pytest.approx((1 + (1 / 2 + 1 / 3) / 2 + 2) / 5.5)
    assert values["examples"] == 5
    alone = catalogue_sums(greater, tied, known, weights, top_k)
    each = catalogue_sums(greater, tied, known, weights, top_k, torch.ones(5, dtype=torch.int64))
    one, several = catalogue_means(alone.tolist(), top_k), catalogue_means(each.tolist(), top_k, several=True)
    assert {name: several[name] for name in one} == pytest.approx(one)
    assert all(several[f"recall@{k}"] == pytest.approx(one[f"hr@{k}"]) for k in top_k)
