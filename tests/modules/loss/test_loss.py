"""The training loss where labels are missing. tests/distributed/test_step.py holds it to one process over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from modules.loss import ranking_loss, shares_of_tasks


@pytest.mark.parametrize("ranks", [1, 64])
def test_a_task_that_no_candidate_was_observed_for_has_no_gradient(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda total: None)  # the others hold no candidates
    logits = torch.zeros(2, 2, requires_grad=True)
    labels = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    loss, weight = ranking_loss(logits, labels, torch.ones(2, 2))
    loss.backward()
    assert weight == 1  # of two candidates, the mean over tasks
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.125, 0.0], [0.125, 0.0]]) * ranks)


def test_weights_that_sum_to_less_than_one_are_divided_by_their_sum() -> None:
    logits, labels = torch.tensor([[0.3], [-1.2]]), torch.tensor([[1.0], [0.0]])
    whole, _ = ranking_loss(logits, labels, torch.tensor([[3.0], [1.0]]))
    small, weight = ranking_loss(logits, labels, torch.tensor([[0.03], [0.01]]))
    torch.testing.assert_close(small, whole)
    torch.testing.assert_close(weight, torch.tensor(0.04))


def test_logits_of_another_shape_than_the_labels_are_an_error_that_names_both() -> None:
    labels = torch.zeros(4, 2)
    for logits in (torch.zeros(4, 1), torch.zeros(1, 2), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"gives logits \[.*\] where labels are \[C, tasks\] = \[4, 2\]"):
            ranking_loss(logits, labels, torch.ones(4, 2))


def test_tasks_count_in_the_loss_by_their_weights() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.1, 0.5, -0.7]])
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, torch.nan, 1.0]])
    each = [ranking_loss(logits[:, i : i + 1], labels[:, i : i + 1], torch.ones(2, 1))[0] for i in range(3)]
    shares = shares_of_tasks({"buy": 3, "seen": 0}, ["click", "buy", "seen"])
    assert shares == {"click": 0.25, "buy": 0.75, "seen": 0}
    loss, count = ranking_loss(logits, labels, torch.ones(2, 3), torch.tensor(list(shares.values())))
    torch.testing.assert_close(loss, 0.25 * each[0] + 0.75 * each[1])
    assert count == 0.25 * 2 + 0.75 * 1
    equal, _ = ranking_loss(logits, labels, torch.ones(2, 3), torch.full((3,), 1 / 3))
    torch.testing.assert_close(equal, ranking_loss(logits, labels, torch.ones(2, 3))[0])


@pytest.mark.parametrize("given", [{"bye": 1.0}, {"buy": -1.0}, {"click": 0.0, "buy": 0.0}])
def test_weights_of_tasks_that_mean_nothing_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=r"optimizer\.task_weights=.*\(click, buy\).*\+optimizer\.task_weights\.click=0\.5"
    ):
        shares_of_tasks(given, ["click", "buy"])
