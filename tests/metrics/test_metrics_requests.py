"""NDCG, recall and MRR within requests: against scikit-learn, and against every order of tied candidates."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from train.metrics import MetricSet, ranking_names, ranking_sums

CPU = torch.device("cpu")
TOP_K = (1, 3, 10)
RATES = {"click": 0.3, "like": 0.1}


def request_rows(seed: int = 0, requests: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with ties, labels of which some are not observed, weights and offsets of requests of 0 to 12 rows."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.nn.functional.pad(torch.randint(13, (requests,), generator=generator).cumsum(0), (1, 0))
    size = int(offsets[-1])
    labels = (torch.rand(size, generator=generator) < 0.3).float()
    scores = (torch.randn(size, generator=generator) * 2).round()
    labels[torch.rand(size, generator=generator) < 0.1] = math.nan
    return scores, labels, torch.rand(size, generator=generator) + 0.5, offsets


def means(scores: Tensor, labels: Tensor, weights: Tensor, offsets: Tensor, top_k=TOP_K) -> dict[str, float]:
    requests, weight, *sums = ranking_sums(scores, labels, weights, offsets, top_k).tolist()
    return {"requests": requests, "weight": weight} | {
        name: value / weight if weight else math.nan for name, value in zip(ranking_names(top_k), sums, strict=True)
    }


def of_order(labels: list[float], k: int) -> tuple[float, float, float, float]:
    """(1 / rank of the first positive, mean over all, NDCG@k, recall@k) of labels in the order that is shown."""
    gains = [label / math.log2(2 + rank) for rank, label in enumerate(labels)]
    best = [1 / math.log2(2 + rank) for rank in range(int(sum(labels)))]
    inverse = [label / (1 + rank) for rank, label in enumerate(labels)]
    return (
        1 / (1 + labels.index(1)),
        sum(inverse) / sum(labels),
        sum(gains[:k]) / sum(best[:k]),
        sum(labels[:k]) / sum(labels),
    )


one_request = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0])), min_size=2, max_size=6)


@settings(max_examples=80, deadline=None)
@given(one_request, st.integers(1, 7))
def test_values_are_the_mean_over_all_orders_of_ties(rows, k):
    scores, labels = torch.tensor([row[0] for row in rows]).float(), torch.tensor([row[1] for row in rows])
    values = means(scores, labels, torch.ones(len(rows)), torch.tensor([0, len(rows)]), [k])
    if not 0 < labels.sum() < len(rows):
        assert values["requests"] == 0
        return
    orders = [order for order in permutations(rows) if all(a[0] >= b[0] for a, b in pairwise(order))]
    shown = [of_order([label for _, label in order], k) for order in orders]
    expected = [mean(values) for values in zip(*shown, strict=True)]
    assert [values["mrr"], values["mrr_all"], values[f"ndcg@{k}"], values[f"recall@{k}"]] == pytest.approx(
        expected, abs=1e-12
    )


def test_ndcg_equals_sklearn_by_request():
    scores, labels, weights, offsets = request_rows()
    expected: dict[int, list[float]] = {k: [] for k in TOP_K}
    weight_of = []
    for first, end in pairwise(offsets.tolist()):
        seen = ~labels[first:end].isnan()
        y, z = labels[first:end][seen].numpy(), scores[first:end][seen].numpy()
        if 0 < y.sum() < len(y):
            weight_of.append(weights[first:end][seen].double().mean().item())
            for k in TOP_K:
                expected[k].append(ndcg_score([y], [z], k=k))
    assert 0 < len(weight_of) < len(offsets) - 1  # some requests are of one class
    values = means(scores, labels, weights, offsets)
    assert values["requests"] == len(weight_of)
    assert values["weight"] == pytest.approx(sum(weight_of))
    for k in TOP_K:
        products = [w * value for w, value in zip(weight_of, expected[k], strict=True)]
        assert values[f"ndcg@{k}"] == pytest.approx(sum(products) / sum(weight_of), abs=1e-12)


def test_a_perfect_order_is_one_and_the_reverse_counts_from_below():
    labels, offsets = torch.tensor([0.0, 1, 1, 0, 0, 1]), torch.tensor([0, 4, 6])
    perfect = means(labels, labels, torch.ones(6), offsets)
    assert perfect == {"requests": 2, "weight": 2, "mrr": 1, "mrr_all": 0.875} | {f"ndcg@{k}": 1 for k in TOP_K} | {
        "recall@1": 0.75, "recall@3": 1, "recall@10": 1,
    }  # fmt: skip
    reverse = means(-labels, labels, torch.ones(6), offsets)
    assert reverse["mrr"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert reverse["recall@1"] == 0


def test_a_large_tie_is_a_random_order():
    labels = torch.zeros(5000)
    labels[17] = 1
    values = means(torch.zeros(5000), labels, torch.ones(5000), torch.tensor([0, 5000]))
    harmonic = sum(1 / rank for rank in range(1, 5001))
    assert values["mrr"] == pytest.approx(harmonic / 5000, rel=1e-9)
    assert values["recall@10"] == pytest.approx(10 / 5000)


def test_neither_the_order_of_rows_nor_unobserved_ones_change_anything():
    scores, labels, weights, offsets = request_rows()
    expected = means(scores, labels, weights, offsets)
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    order = torch.randperm(len(scores))
    order = order[owner[order].argsort(stable=True)]
    assert means(scores[order], labels[order], weights[order], offsets) == pytest.approx(expected, abs=1e-12)
    hidden = labels.isnan()
    scores[hidden] = math.nan
    weights[hidden] = 9
    assert means(scores, labels, weights, offsets) == expected
    labels[hidden], weights[hidden] = 1, 0
    assert means(scores, labels, weights, offsets) == expected


def test_a_nan_score_shows_in_every_value():
    values = means(torch.tensor([math.nan, 0]), torch.tensor([0.0, 1]), torch.ones(2), torch.tensor([0, 2]))
    assert values.pop("requests") == values.pop("weight") == 1
    assert all(math.isnan(value) for value in values.values())


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 1, 2]], ids=["no request", "no candidate", "one each"])
def test_requests_without_a_choice_are_left_out(offsets):
    size = offsets[-1]
    assert ranking_sums(torch.zeros(size), torch.ones(size), torch.ones(size), torch.tensor(offsets), TOP_K).eq(0).all()


def metric_set(**settings) -> MetricSet:
    return MetricSet(list(RATES), RATES, CPU, exact_auc=True, **settings)


def test_metric_set_has_them_beside_the_others():
    scores, labels, weights, offsets = request_rows()
    rows = [torch.stack(pair, 1) for pair in ((scores, -scores), (labels, labels), (weights, weights))]
    group = torch.zeros(len(scores), dtype=torch.int64)
    plain, ranked, parts = metric_set(), metric_set(top_k=[3, 1, 3]), metric_set(top_k=[1, 3])
    plain.update(*rows, group)
    ranked.update(*rows, group, offsets)
    cut = int(offsets[40])
    for part, bounds in ((slice(cut), offsets[:41]), (slice(cut, None), offsets[40:] - cut)):
        parts.update(*(row[part] for row in rows), group[part], bounds)
    values = ranked.compute()
    assert parts.compute() == pytest.approx(values, abs=1e-12)
    for task, sign in (("click", 1), ("like", -1)):
        expected = means(sign * scores, labels, weights, offsets, [1, 3])
        assert values.pop(f"{task}/ranked_requests") == expected["requests"]
        for name in ranking_names([1, 3]):
            assert values.pop(f"{task}/{name}") == pytest.approx(expected[name], abs=1e-12)
    assert values == plain.compute()
    ranked.reset()
    assert math.isnan(ranked.compute()["click/ndcg@3"])


def test_metric_set_asks_for_the_requests():
    row = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"candidate_offsets is None; top_k=\[5\] needs those of the batch"):
        metric_set(top_k=[5]).update(row, row, row, torch.zeros(1, dtype=torch.int64))


def test_update_does_not_sync_with_the_host():
    with FakeTensorMode():
        rows = torch.zeros(5, 2)
        group = torch.zeros(5, dtype=torch.int64)
        metric_set(top_k=[1, 3]).update(rows, rows, rows, group, torch.zeros(4, dtype=torch.int64))
