"""The training loss where labels are missing. tests/distributed/test_step.py holds it to one process over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from train.loss import ranking_loss


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
