"""Two processes with uneven shards, one of them empty, agree with each other and with one process that sees all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from modules.loss import TaskLosses
from tests.modules.factories import random_batch, random_spec
from tests.processes import run_ranks
from train.metrics import MetricSet, Throughput, history_lengths, history_sums
from train.metrics.tasks import TaskMetrics

CPU = torch.device("cpu")
RATES = {"click": 0.3, "like": 0.1}


def rows():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(300, 2, generator=generator) < 0.3).float()
    # Ties, within a rank and across ranks.
    logits = (torch.randn(300, 2, generator=generator) + labels).mul(4).round() / 4
    labels[torch.rand(300, 2, generator=generator) < 0.2] = math.nan
    weights = torch.rand(300, 2, generator=generator) + 0.1
    # 20 users, every one of them on both ranks.
    return logits, labels, weights, torch.arange(300) % 20


def compute(batches, exact_auc):
    collection = MetricSet(list(RATES), RATES, CPU, exact_auc=exact_auc)
    for batch in batches:
        collection.update(*batch)
    curves = collection.histograms()
    return collection.compute(), torch.cat([curves["like"].positive, curves["like"].negative])


def shard(rank, split):
    whole = rows()
    mine = slice(0, split) if rank == 0 else slice(split, None)
    size = len(range(300)[mine])
    # A rank without rows never calls update.
    return list(zip(*(tensor[mine].split(max(1, size // 3)) for tensor in whole), strict=True)) if size else []


def within_requests(first, end):
    """Metrics of the requests from `first` on, of four rows each."""
    collection = MetricSet(list(RATES), RATES, CPU, exact_auc=True, top_k=[1, 3])
    if end > first:
        collection.update(*(tensor[4 * first : 4 * end] for tensor in rows()), torch.arange(end - first + 1) * 4)
    return collection.compute()


def real(first, end):
    """Metrics of real labels of rows first:end."""
    metrics = TaskMetrics(
        TaskLosses({"watch": {"loss": "squared"}}, ("watch",)), {}, CPU, max_candidates=1, exact_auc=True
    )
    logits, labels, weights, group = (tensor[first:end] for tensor in rows())
    if end > first:
        metrics.update(logits[:, 1:], labels[:, :1] + group[:, None], weights[:, :1], group)
    return metrics.compute()


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for exact_auc in (True, False):
        for split in (300, 211):
            results[exact_auc, split] = compute(shard(rank, split), exact_auc)
    for split in (75, 50):
        results["within", split] = within_requests(*[(0, split), (split, 75)][rank])
    for split in (300, 211):
        results["real", split] = real(*[(0, split), (split, 300)][rank])
    meter = Throughput(CPU)
    batch = random_batch(random_spec(num_events=1), candidates=[3, 1][: 2 - rank], lengths=[4, 2][: 2 - rank])
    meter.step(batch, history_sums(history_lengths(batch)))
    results[("throughput",)] = meter.compute(lambda *totals: math.fsum(totals))
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_rank")
    run_ranks(work, 2, folder)
    each = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {(rank, *key): value for rank in range(2) for key, value in each[rank].items()}


@pytest.mark.parametrize("exact_auc", [True, False])
@pytest.mark.parametrize("split", [300, 211], ids=["empty rank", "uneven"])
def test_ranks_agree_with_one_process(by_rank, exact_auc, split):
    expected, expected_histogram = compute([rows()], exact_auc)
    first, first_histogram = by_rank[0, exact_auc, split]
    second, second_histogram = by_rank[1, exact_auc, split]
    assert first == second
    assert torch.equal(first_histogram, second_histogram)
    # float64 sums of 300 terms in another order
    assert first == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(first_histogram, expected_histogram)


@pytest.mark.parametrize("split", [75, 50], ids=["empty rank", "uneven"])
def test_ranking_within_requests_is_that_of_one_process(by_rank, split):
    expected = within_requests(0, 75)
    assert expected["click/ranked_requests"] > 20
    assert by_rank[0, "within", split] == by_rank[1, "within", split]
    assert by_rank[0, "within", split] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("split", [300, 211], ids=["empty rank", "uneven"])
def test_metrics_of_real_labels_are_those_of_one_process(by_rank, split):
    expected = real(0, 300)
    assert 0 < expected["watch/xauc"] < 1
    assert by_rank[0, "real", split] == by_rank[1, "real", split]
    assert by_rank[0, "real", split] == pytest.approx(expected, rel=1e-12)


def test_throughput_counts_all_ranks(by_rank):
    first, second = by_rank[0, "throughput"], by_rank[1, "throughput"]
    assert first == second
    # Ranks hold 2 and 1 requests, 4 and 3 candidates, histories of 4, 2 and of 4 events.
    assert first["examples_per_s"] / first["requests_per_s"] == pytest.approx(7 / 3)
    assert first["requests_per_s"] / first["steps_per_s"] == pytest.approx(3)
    assert first["mean_history"] == pytest.approx(10 / 3)
    flops = 3 * (3 + 7 + 10 + (16 + 4 + 16)) / 2  # forward and backward, for each of two devices
    assert first["tflops_per_s"] * 1e12 / first["steps_per_s"] == pytest.approx(flops)


def test_averaging_ranks_would_have_been_wrong(by_rank):
    # What the tests above would not notice if users and ties did not span ranks.
    parts = [compute(shard(rank, 211), True)[0] for rank in (0, 1)]
    together = by_rank[0, True, 211][0]
    for name in ("click/auc", "click/gauc", "click/calibration"):
        assert abs(sum(part[name] for part in parts) / 2 - together[name]) > 1e-4
