"""Negative down-sampling: what is kept, the weights that make up for the rest, and that nothing else decides it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from modules.batch import RequestBatch
from modules.loss import ranking_loss
from tests.data.sources import JitteredSource
from tests.modules.factories import random_batch, random_spec
from tests.modules.test_batch import assert_same
from train.config.schema import SyntheticConfig
from train.data import SyntheticSource
from train.data.loading.loader import LoaderOptions, build_loader
from train.data.loading.sampling import sample_negatives, uniform
from train.metrics import MetricSet

SPEC = random_spec()
RATE = 0.25


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return JitteredSource(SyntheticConfig(num_requests=1000, eval_requests=100, candidates=6))


def load(source: SyntheticSource, **changes) -> list[RequestBatch]:
    settings = {
        "batch_size": 60, "seed": 0, "rank": 0, "world_size": 1, "shuffle": True, "num_workers": 0, "prefetch": 2,
        "negative_rate": RATE,
    }  # fmt: skip
    return list(build_loader(source, "train", LoaderOptions(**(settings | changes))))


def rows(batches: list[RequestBatch]) -> list[int]:
    return [row for batch in batches for row in batch.row.tolist()]


def with_labels(batch: RequestBatch, labels: Tensor) -> RequestBatch:
    batch.labels, batch.row = labels, torch.arange(len(labels))
    return batch


def test_positives_of_any_task_stay_and_kept_negatives_stand_for_the_others():
    counts = [3, 0, 5, 1, 2, 4] * 50
    labels = (torch.rand(sum(counts), 2, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    labels[::7, 1] = math.nan
    batch = with_labels(random_batch(SPEC, counts), labels)
    batch.weights = torch.rand_like(labels) + 0.5
    positive = (labels == 1).any(1)
    sampled = sample_negatives(batch, RATE, seed=0, epoch=0)
    kept = sampled.row
    assert torch.isin(positive.nonzero().squeeze(1), kept).all()
    share = (~positive[kept]).sum() / (~positive).sum()
    assert share.item() == pytest.approx(RATE, abs=4 * math.sqrt(RATE * (1 - RATE) / (~positive).sum()))
    factor = torch.where(positive[kept], 1, 1 / RATE)[:, None]
    torch.testing.assert_close(sampled.weights, batch.weights[kept] * factor)


def test_what_is_left_of_a_request_is_as_it_was():
    batch = random_batch(SPEC, counts := [3, 0, 5, 1, 2, 4] * 5)
    labels = torch.zeros(sum(counts), 2)
    batch = with_labels(batch, labels)
    batch.request_time = torch.arange(len(counts))  # a name of each request
    sampled = sample_negatives(batch, RATE, seed=1, epoch=0)
    assert 0 < sampled.num_requests < sampled.num_candidates < batch.num_candidates
    assert (sampled.candidate_offsets.diff() > 0).all()
    each, whole = sampled.expand(), batch.expand()
    for name in ("request_sparse", "candidate_sparse", "histories", "history_times"):
        mine, theirs = getattr(each, name), getattr(whole, name)
        for key in mine.keys():
            expected = [theirs[key].to_dense()[row].tolist() for row in sampled.row.tolist()]
            assert [ids.tolist() for ids in mine[key].to_dense()] == expected
    for name in ("request_dense", "candidate_dense", "request_time", "labels", "group"):
        assert getattr(each, name).equal(getattr(whole, name)[sampled.row])


def test_a_batch_without_any_candidate_left_is_empty(source):
    batches = load(source, batch_size=1, start=900, negative_rate=1e-9)
    assert len(batches) == 100
    empty = next(batch for batch in batches if batch.num_candidates == 0)
    assert empty.num_requests == 1
    assert empty.request_sparse.values().tolist() == [0] * len(source.spec.request)


def test_a_draw_depends_on_seed_epoch_and_row_alone(source):
    whole = load(source)
    order = rows(whole)
    assert load(source, num_workers=2)[3].row.equal(whole[3].row)
    for mine, theirs in zip(load(source, start=5 * 60), whole[5:], strict=True):
        assert_same(mine, theirs)
    ranks = [load(source, batch_size=20, rank=rank, world_size=3, start=300) for rank in range(3)]
    assert order == rows(whole[:5]) + [row for step in zip(*ranks, strict=True) for row in rows(list(step))]
    for other in ({"epoch": 1}, {"seed": 1}):  # the source's order is one and the same
        assert 0 < len({*rows(load(source, **other))} ^ {*order}) < len(order)


def test_draws_are_uniform_and_never_change():
    draws = uniform(torch.arange(100_000), 0, 0)
    assert draws.mean().item() == pytest.approx(0.5, abs=0.005)
    assert 0 <= draws.min() < draws.max() < 1
    assert draws.histc(10, 0, 1).sub(10_000).abs().max() < 500
    # Pinned: a run that is resumed draws again.
    assert draws[:2].tolist() == [0.9011547837836906, 0.023278059725723055]


def test_loss_and_training_metrics_are_those_of_all_rows_on_average(source):
    batch = source.batch("train", np.arange(1000))

    def measured(batch: RequestBatch) -> Tensor:
        logits = batch.row[:, None] % 7 * torch.tensor([0.3, -0.2]) - 1  # a model's, of whatever it sees
        loss, weight = ranking_loss(logits, batch.labels, batch.weights)
        metrics = MetricSet(source.spec.tasks, source.label_rates(), torch.device("cpu"), exact_auc=False)
        metrics.update(logits, batch.labels, batch.weights, batch.group)
        values = metrics.compute()
        names = ("click/ne", "like/ne", "click/calibration", "like/calibration", "click/auc", "like/label_rate")
        return torch.tensor([loss.item(), weight.item() / 1000, *(values[name] for name in names)])

    drawn = torch.stack([measured(sample_negatives(batch, RATE, seed=0, epoch=epoch)) for epoch in range(50)])
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert ((drawn.mean(0) - measured(batch)).abs() < 4 * error).all()
    assert (drawn.std(0) > 0).all()


def test_a_constant_prediction_is_the_recalibrated_one_of_he_et_al():
    labels = (torch.rand(5000, 1, generator=torch.Generator().manual_seed(0)) < 0.05).float()
    batch = with_labels(random_batch(random_spec(tasks=("click",)), [1] * 5000, lengths=[0] * 5000), labels)
    sampled = sample_negatives(batch, RATE, seed=0, epoch=0)
    p = sampled.labels.mean().item()  # what training without weights would predict
    best = (sampled.weights * sampled.labels).sum() / sampled.weights.sum()  # minimises the weighted loss
    assert best.item() == pytest.approx(p / (p + (1 - p) / RATE), rel=1e-5)
    assert best.item() == pytest.approx(labels.mean().item(), rel=0.05)
    assert p > 3 * labels.mean()
