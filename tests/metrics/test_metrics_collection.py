"""MetricSet in one process: against scikit-learn, in degenerate cases, and without host syncs."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torch._subclasses.fake_tensor import FakeTensorMode

from train.metrics import MetricSet, gauc_means, recalibrated_log_loss
from train.metrics.collection import BUILT_IN

CPU = torch.device("cpu")
RATES = {"click": 0.3, "like": 0.1}


def rows(seed=0, size=400, tasks=2):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(size, tasks, generator=generator) < 0.3).float()
    logits = torch.randn(size, tasks, generator=generator) + labels
    weights = torch.rand(size, tasks, generator=generator) + 0.1
    labels[torch.rand(size, tasks, generator=generator) < 0.2] = math.nan
    return logits, labels, weights, torch.randint(0, 40, (size,), generator=generator)


def metrics(*batches, exact_auc=True, rates=RATES):
    collection = MetricSet(list(rates), rates, CPU, exact_auc=exact_auc)
    for batch in batches:
        collection.update(*batch)
    return collection.compute()


def test_values_equal_sklearn():
    logits, labels, weights, group = rows()
    values = metrics((logits, labels, weights, group))
    for column, task in enumerate(RATES):
        seen = ~labels[:, column].isnan()
        y, z, w = (tensor[seen, column].double() for tensor in (labels, logits, weights))
        p, rate = z.sigmoid(), RATES[task]
        loss, own = log_loss(y, p, sample_weight=w), ((w * y).sum() / w.sum()).item()
        whole = logits[:, column], labels[:, column], weights[:, column]
        expected = {
            "log_loss": loss,
            "ne": loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)),
            "ne_own_rate": loss / -(own * math.log(own) + (1 - own) * math.log(1 - own)),
            "auc": roc_auc_score(y, z, sample_weight=w),
            "auprc": average_precision_score(y, z, sample_weight=w),
            "gauc_unweighted": gauc_means(*whole, group)[1].item(),
            "calibration": ((w * p).sum() / (w * y).sum()).item(),
            "label_rate": own,
            "examples": int(seen.sum()),
        }
        for name, value in expected.items():
            # float64 sums of a few hundred terms in another order
            assert values[f"{task}/{name}"] == pytest.approx(value, abs=1e-12), name
        recalibrated = recalibrated_log_loss(*whole).item() / loss
        assert values[f"{task}/ne_recalibrated"] == pytest.approx(recalibrated * values[f"{task}/ne"])


def test_no_metric_of_one_s_own_can_have_a_built_in_name():
    *row, group = rows()
    found = set()
    for exact_auc in (True, False):
        collection = MetricSet(list(RATES), RATES, CPU, exact_auc=exact_auc, top_k=[1])
        collection.update(*row, group, torch.tensor([0, len(group)]))
        found |= {name.partition("/")[2] for name in collection.compute()}
    assert {name for name in found if name.isidentifier()} == set(BUILT_IN)


def test_batches_add_up_to_the_whole():
    whole = rows()
    parts = list(zip(*(tensor.split([7, 0, 1, 392]) for tensor in whole), strict=True))
    for exact_auc in (True, False):
        assert metrics(*parts, exact_auc=exact_auc) == pytest.approx(metrics(whole, exact_auc=exact_auc), abs=1e-12)


def test_streaming_is_close_to_exact_and_says_how_close():
    exact, streaming = metrics(rows(), exact_auc=True), metrics(rows(), exact_auc=False)
    assert "click/gauc" not in streaming
    for task in RATES:
        assert abs(exact[f"{task}/auc"] - streaming[f"{task}/auc"]) <= streaming[f"{task}/auc_error_bound"] < 1e-3
        assert exact[f"{task}/ne"] == streaming[f"{task}/ne"]


def test_reset_forgets():
    collection = MetricSet(["click"], {"click": 0.5}, CPU, exact_auc=True)
    collection.update(*rows(seed=1, tasks=1))
    collection.reset()
    collection.update(*rows(seed=2, tasks=1))
    expected = metrics(rows(seed=2, tasks=1), rates={"click": 0.5})
    assert collection.compute() == expected


@pytest.mark.parametrize("exact_auc", [True, False])
def test_no_rows(exact_auc):
    values = metrics(exact_auc=exact_auc)
    assert values.pop("click/examples") == values.pop("like/examples") == 0
    assert values
    assert all(math.isnan(value) for value in values.values())


@pytest.mark.parametrize("exact_auc", [True, False])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_row_of_one_class(exact_auc, label):
    row = (torch.zeros(1, 1), torch.full((1, 1), label), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    values = metrics(row, exact_auc=exact_auc, rates={"click": 0.5})
    assert values["click/log_loss"] == pytest.approx(math.log(2))
    assert values["click/ne"] == pytest.approx(1)
    assert values["click/label_rate"] == label
    assert math.isnan(values["click/auc"])
    assert math.isnan(values["click/calibration"]) if label == 0 else values["click/calibration"] == 0.5


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_training_data_of_one_class_has_no_ne(rate):
    values = metrics(rows(), rates={"click": rate, "like": 0.5})
    assert math.isnan(values["click/ne"])
    assert math.isfinite(values["like/ne"])
    assert math.isfinite(values["click/log_loss"])


@pytest.mark.parametrize("exact_auc", [True, False])
def test_a_nan_logit_shows_where_its_label_was_observed_and_nowhere_else(exact_auc):
    logits, labels, weights, group = rows()
    logits, labels = logits.clone(), labels.clone()
    labels[0], labels[1] = torch.tensor([0.0, math.nan]), math.nan
    before = metrics((logits, labels, weights, group), exact_auc=exact_auc)
    logits[:2] = math.nan
    after = metrics((logits, labels, weights, group), exact_auc=exact_auc)
    exact = ("gauc", "gauc_unweighted", "auprc", "ne_recalibrated")
    ranking = ("auc", *exact) if exact_auc else ("auc",)
    assert all(math.isnan(after[f"click/{name}"]) for name in ("log_loss", "ne", "calibration", *ranking))
    assert {k: v for k, v in after.items() if k.startswith("like")} == {
        k: v for k, v in before.items() if k.startswith("like")
    }


@pytest.mark.parametrize("exact_auc", [True, False])
def test_update_does_not_sync_with_the_host(exact_auc):
    # Fake tensors have no data: whatever would read one on the host raises.
    with FakeTensorMode():
        collection = MetricSet(list(RATES), RATES, CPU, exact_auc=exact_auc)
        logits = torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True)
        collection.update(logits, torch.zeros(5, 2), torch.ones(5, 2), torch.zeros(5, dtype=torch.int64))


def test_histograms_hold_every_observed_row():
    logits, labels, weights, group = rows()
    collection = MetricSet(list(RATES), RATES, CPU, exact_auc=False)
    collection.update(logits, labels, weights, group)
    histogram = collection.histograms()["like"]
    assert histogram.positive.sum() == pytest.approx(weights[:, 1][labels[:, 1] == 1].sum().item(), rel=1e-6)
    assert histogram.negative.sum() == pytest.approx(weights[:, 1][labels[:, 1] == 0].sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("rates", "message"),
    [({"click": 0.3}, r"base_rates lacks \['like'\]"), ({"click": 0.3, "like": 3.0}, "'like'.*3.0")],
)
def test_base_rates_are_checked(rates, message):
    with pytest.raises(ValueError, match=message):
        MetricSet(["click", "like"], rates, CPU, exact_auc=True)


def test_shapes_are_checked():
    collection = MetricSet(["click"], {"click": 0.3}, CPU, exact_auc=True)
    with pytest.raises(ValueError, match=r"labels has shape \[3\], expected .* \[3, 1\]"):
        collection.update(torch.zeros(3, 1), torch.zeros(3), torch.ones(3, 1), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("metric", "kind", "message"),
    [
        (
            lambda logits, labels, weights, group: logits,
            ValueError,
            r"metric own of tracking\.metrics must be one number",
        ),
        (lambda logits, labels: 0.0, TypeError, "takes 2 positional arguments"),
    ],
)
def test_a_metric_of_one_s_own_that_fails_is_named(metric, kind, message):
    collection = MetricSet(list(RATES), RATES, CPU, exact_auc=True, own={"own": metric})
    collection.update(*rows())
    with pytest.raises(kind, match=message) as failure:
        collection.compute()
    assert kind is ValueError or "raised by the metric own of tracking.metrics" in failure.value.__notes__[0]
