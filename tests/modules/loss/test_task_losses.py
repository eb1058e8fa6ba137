"""The losses that a task can name: values by their equations, missing labels, what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from modules.loss import TaskLosses, ranking_loss, task_loss
from modules.loss.base import Requests, TaskLoss
from modules.loss.candidates import OWN, Squared
from modules.loss.next_item import ItemShares, NextItemLoss
from modules.loss.tasks import LOSSES
from modules.models.retrieval import NextItems
from tests.modules.factories import random_batch, random_spec
from train.metrics.tasks import SUMS, TaskMetrics

LABELS = torch.tensor([0.0, 1.0, 3.0, 2.0, 0.0, 1.0])
LOGITS = torch.tensor([0.3, -2.0, 1.5, 4.0, 0.0, 0.2])
REQUESTS = Requests(torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 0, 2, 2, 2, 3]), 4)


def terms(
    chosen: dict[str, Any], logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    loss = task_loss("like", chosen)
    assert isinstance(loss, TaskLoss)
    return loss.terms(logits, labels, torch.ones(6) if weights is None else weights, REQUESTS)


@pytest.mark.parametrize(
    ("chosen", "value"),
    [
        ({"loss": "squared"}, lambda s, y: (s - y) ** 2 / 2),
        (
            {"loss": "huber", "delta": 1.5},
            lambda s, y: (s - y) ** 2 / 2 if abs(s - y) <= 1.5 else 1.5 * (abs(s - y) - 0.75),
        ),
        ({"loss": "log"}, lambda s, y: (s - math.log(1 + y)) ** 2 / 2),
    ],
)
def test_losses_of_real_numbers(chosen: dict, value: Any) -> None:
    values, weights = terms(chosen, LOGITS[:, None], LABELS)
    expected = [value(s, y) for s, y in zip(LOGITS.tolist(), LABELS.tolist(), strict=True)]
    torch.testing.assert_close(values, torch.tensor(expected))
    assert weights.tolist() == [1.0] * 6


def test_focal_loss_weighs_by_the_error() -> None:
    labels = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0, 1.0])
    values, _ = terms({"loss": "focal", "gamma": 1.5, "alpha": 0.3}, LOGITS[:, None], labels)
    p = LOGITS.sigmoid()
    entropy = -(labels * p.log() + (1 - labels) * (1 - p).log())
    torch.testing.assert_close(values, (labels - p).abs() ** 1.5 * (0.3 * labels + 0.7 * (1 - labels)) * entropy)
    plain, _ = terms({"loss": "focal", "gamma": 0}, LOGITS[:, None], labels)
    torch.testing.assert_close(plain, entropy)


def test_classes_are_told_apart_by_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4)
    values, _ = terms({"loss": "classes", "number": 4}, logits, LABELS)
    torch.testing.assert_close(values, -logits.log_softmax(1)[torch.arange(6), LABELS.long()])
    loss = task_loss("like", {"loss": "classes", "number": 4})
    assert isinstance(loss, TaskLoss)
    assert loss.outputs == 4
    torch.testing.assert_close(loss.predict(logits).sum(1), torch.ones(6))


def test_pairwise_loss_is_the_mean_over_a_requests_ordered_pairs() -> None:
    weights = torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0, 1.0])  # the fifth label was not observed
    values, shares = terms({"loss": "pairwise"}, LOGITS[:, None], LABELS, weights)
    s = LOGITS
    expected = [softplus(s[0] - s[1]), 0.0, softplus(s[3] - s[2]), 0.0]
    torch.testing.assert_close(values, torch.tensor(expected))
    assert shares.tolist() == [2.0, 0.0, 1.0, 0.0]  # nothing to order in an empty request and in one of one candidate


def test_listwise_loss_is_cross_entropy_over_a_request() -> None:
    values, shares = terms({"loss": "listwise", "temperature": 2.0}, LOGITS[:, None], LABELS)
    first = -(LOGITS[:2] / 2).log_softmax(0)[1]
    third = -((LOGITS[2:5] / 2).log_softmax(0) * torch.tensor([0.6, 0.4, 0.0])).sum()
    torch.testing.assert_close(values[[0, 2]], torch.stack([first, third]))
    assert shares.tolist() == [1.0, 0.0, 1.0, 0.0]


CLASSES = {"loss": "classes", "number": 2}
PLAIN = ("binary", "focal", "squared", "huber", "log", "pairwise", "listwise", f"{__name__}.cubic")


@pytest.mark.parametrize("chosen", [*({"loss": name} for name in PLAIN), CLASSES], ids=str)
def test_gradients_in_float64_and_none_where_nothing_was_observed(chosen: dict[str, Any]) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    loss = task_loss("like", chosen)
    assert isinstance(loss, TaskLoss)

    def total(logits: Tensor) -> Tensor:
        values, shares = loss.terms(logits, labels, weights, REQUESTS)
        return (values * shares).sum()

    logits = torch.randn(6, loss.outputs, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(total, logits)
    (gradient,) = torch.autograd.grad(total(logits), logits)
    assert not gradient[5].any()
    assert gradient.isfinite().all()


def test_tasks_of_several_kinds_make_one_loss() -> None:
    spec = random_spec(tasks=("click", "rating", "genre"))
    batch = random_batch(spec)
    batch.labels[0, 0] = batch.labels[1, 2] = torch.nan
    config = {"rating": {"loss": "squared"}, "genre": {"loss": "classes", "number": 3}}
    losses = TaskLosses(config, spec.tasks)
    assert losses.outputs == (1, 1, 3)
    logits = torch.randn(7, 5, requires_grad=True)
    shares = torch.tensor([0.5, 0.3, 0.2])
    loss, weight = losses(logits, batch, spec, shares)
    click = ranking_loss(logits[:, :1], batch.labels[:, :1], batch.weights[:, :1])[0]
    rating = ((logits[:, 1] - batch.labels[:, 1]) ** 2 / 2).mean()
    seen = ~batch.labels[:, 2].isnan()
    genre = -logits[:, 2:].log_softmax(1)[seen, batch.labels[seen, 2].long()].mean()
    torch.testing.assert_close(loss, 0.5 * click + 0.3 * rating + 0.2 * genre)
    torch.testing.assert_close(weight, 0.5 * 6 + 0.3 * 7 + 0.2 * torch.tensor(6.0))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] == 0
    with pytest.raises(ValueError, match=r"logits \[7, 3\] where its losses want \[C, outputs\] = \[7, 5\]"):
        losses(logits[:, :3], batch, spec, None)
    for each in (losses, TaskLosses({}, spec.tasks)):
        with pytest.raises(ValueError, match=r"gives a tuple where its losses want a tensor \[C, outputs\]"):
            each((logits,), batch, spec, None)  # type: ignore[arg-type]


def cubic(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).abs() ** 3


def absolute(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).abs()


def one_number(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).abs().mean()


def test_a_loss_of_ones_own_is_of_what_its_labels_are() -> None:
    name = f"{__name__}.absolute"
    losses = {of: task_loss("like", {"loss": name, "of": of}) for of in ("binary", "real")}
    assert {of: loss.metrics for of, loss in losses.items()} == {"binary": "binary", "real": "real"}
    logits = LOGITS[:, None]
    assert torch.equal(losses["binary"].predict(logits), LOGITS.sigmoid())
    assert torch.equal(losses["real"].predict(logits), LOGITS)
    with pytest.raises(ValueError, match="tasks.like.of=classes: a loss of your own, .* takes `of` alone: real or bin"):
        task_loss("like", {"loss": name, "of": "classes"})


def test_a_kind_of_metrics_without_sums_is_refused() -> None:
    @dataclass(frozen=True)
    class Ordinal(Squared):
        metrics: ClassVar[str] = "ordinal"

    losses = TaskLosses({"like": {"loss": "squared"}}, ["like"])
    losses.by_task["like"] = Ordinal()
    with pytest.raises(ValueError, match="Ordinal.metrics='ordinal' is no kind of metrics; use one of binary, real"):
        TaskMetrics(losses, {}, torch.device("cpu"), max_candidates=2, exact_auc=False)
    kinds = {loss.metrics for loss in (*LOSSES.values(), *OWN.values())}
    assert kinds == {"binary", *SUMS}


def test_a_loss_of_ones_own_has_its_dotted_name() -> None:
    values, _ = terms({"loss": f"{__name__}.absolute"}, LOGITS[:, None], LABELS)
    torch.testing.assert_close(values, (LOGITS - LABELS).abs())
    with pytest.raises(ValueError, match=r"one_number must give a loss for each candidate, \[6\]: \[\]"):
        terms({"loss": f"{__name__}.one_number"}, LOGITS[:, None], LABELS)


@pytest.mark.parametrize(
    ("config", "bounds", "message"),
    [
        ({"like": {"loss": "squred"}}, {}, "tasks.like.loss=squred is not known; choose one of binary, focal, squared"),
        (
            {"like": {"loss": "huber", "dela": 1}},
            {},
            "tasks.like.dela is no argument of the loss huber; there are delta",
        ),
        ({"like": {"loss": "huber", "delta": 0}}, {}, "tasks.like: delta=0 must be above 0, e.g. delta=1"),
        ({"like": {"loss": "classes"}}, {}, r"needs \+tasks.like.number=..., e.g. 5"),
        ({"like": "squared"}, {}, r"must name a loss, e.g. \+tasks.like.loss=squared"),
        ({"buy": {"loss": "squared"}}, {}, "tasks.buy is no task of the data, which has like, rating"),
        ({"like": {"loss": "softmax"}}, {}, "a loss of next items is that of the only task; the data has like, rating"),
        ({}, {"rating": (1, 5, True)}, "labels of 1 to 5, and its loss takes numbers from 0 to 1; use another, e.g."),
        ({"rating": {"loss": "classes", "number": 5}}, {"rating": (1, 5, True)}, "takes whole numbers from 0 to 4"),
        ({"rating": {"loss": "classes", "number": 6}}, {"rating": (0, 5, False)}, "takes whole numbers from 0 to 5"),
        ({"rating": {"loss": "log"}}, {"rating": (-1, 5, False)}, "takes numbers from 0 to inf"),
    ],
)
def test_what_cannot_work_is_refused(config: dict, bounds: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskLosses(config, ("like", "rating")).check_labels(bounds)


def some_items() -> tuple[NextItems, ItemShares]:
    torch.manual_seed(0)
    query, target, candidates = torch.randn(4, 3), torch.randn(4, 3), torch.randn(6, 3)
    ids = torch.tensor([2, 5, 0, 3])
    items = NextItems(
        query, target, ids, torch.tensor([1.0, 1.0, 0.0, 0.5]), candidates, torch.tensor([9, 9, 5, 7, 7, 3])
    )
    return items, ItemShares(20)


@pytest.mark.parametrize("name", ["softmax", "gbce", "bpr"])
def test_losses_of_next_items_in_loops(name: str) -> None:
    items, known = some_items()
    loss = task_loss("next", {"loss": name, "uniform": 4})
    assert isinstance(loss, NextItemLoss)
    values, weights = loss.terms(items, known)
    rate = 4 / 19
    beta = rate * (0.75 * (1 - 1 / rate) + 1 / rate)
    for place in range(4):
        positive = items.query[place] @ items.target[place]
        others = [
            items.query[place] @ items.candidates[n]
            for n in range(2, 6)  # the last four are the negatives
            if items.candidate_ids[n] != items.target_ids[place]
        ]
        negative = torch.stack(others)
        if name == "softmax":
            expected = (positive.exp() + (negative.exp() / (4 / 20)).sum()).log() - positive
        elif name == "gbce":
            positive, negative = positive + math.log(beta / 4), negative + math.log(beta / 4)
            expected = -(beta * positive.sigmoid().log() + (1 - negative.sigmoid()).log().sum()) / 5
        else:
            expected = -(positive - negative).sigmoid().log().mean()
        torch.testing.assert_close(values[place], expected)
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.5]


def test_in_batch_negatives_are_corrected_by_how_often_they_come() -> None:
    """With logQ the sampled sum over negatives is, on average, the sum over all items but the target."""
    torch.manual_seed(0)
    scores, shares = torch.randn(6), torch.tensor([0.0, 0.4, 0.3, 0.2, 0.05, 0.05])
    loss = task_loss("next", {"loss": "softmax", "uniform": 2, "in_batch": 3})
    assert isinstance(loss, NextItemLoss)
    rounds, target = 20_000, 1
    draws = [torch.randint(1, 6, (rounds, 2)), torch.multinomial(shares, rounds * 3, replacement=True).view(rounds, 3)]
    ids = torch.cat(draws, 1)
    correction = loss.expected(ids, ItemShares(5, shares)).log()
    sums = torch.where(ids == target, 0, (scores[ids] - correction).exp()).sum(1)
    others = scores[2:].exp().sum()
    error = sums.std() / rounds**0.5
    assert (sums.mean() - others).abs() < 5 * error


def test_a_place_whose_negatives_are_all_the_target_has_no_gradient() -> None:
    items, known = some_items()
    query = items.query.clone().requires_grad_()
    same = items._replace(query=query, candidate_ids=torch.full((6,), 5), target_ids=torch.full((4,), 5))
    for name in ("softmax", "gbce", "bpr"):
        loss = task_loss("next", {"loss": name, "uniform": 4})
        assert isinstance(loss, NextItemLoss)
        values, weights = loss.terms(same, known)
        (gradient,) = torch.autograd.grad((values * weights).sum(), query)
        assert gradient.isfinite().all()
