"""Means of losses over all ranks and tasks, and that of binary cross-entropy, the usual one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def shares_of_tasks(given: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """The weight of each task in the loss, as shares of 1; `given` names the weights that are not 1 before that."""
    unknown = sorted(set(given) - set(tasks))
    if unknown or min(given.values(), default=0) < 0 or not any(given.get(task, 1) for task in tasks):
        raise ValueError(
            f"optimizer.task_weights={dict(given)} must give tasks of the data ({', '.join(tasks)}) weights of at "
            f"least 0, one of them more, e.g. +optimizer.task_weights.{tasks[0]}=0.5"
        )
    total = sum(given.get(task, 1.0) for task in tasks)
    return {task: given.get(task, 1.0) / total for task in tasks}


def ranking_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, task_shares: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean over tasks of the weighted mean cross-entropy over the observed labels of the whole (global) batch.

    logits, labels, weights: [C, tasks]; a label of NaN was not observed. The inner mean is over candidates, not
    requests, so that a request batch and its expanded twin give the same gradients. The rest as in `global_mean`.
    """
    if logits.shape != labels.shape:
        raise ValueError(
            f"the model gives logits {list(logits.shape)} where labels are [C, tasks] = {list(labels.shape)}; "
            "both have one shape"
        )
    observed = ~labels.isnan()
    weight = torch.where(observed, weights, 0)
    target = torch.where(observed, labels, 0)
    loss = binary_cross_entropy_with_logits(logits.float(), target, weight, reduction="none").sum(0)
    return global_mean(loss, weight.sum(0), task_shares)


def global_mean(sums: Tensor, weights: Tensor, task_shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean over tasks of each task's sum over all ranks divided by its weight over all ranks.

    sums, weights: [tasks], weighted losses and weights of this rank. task_shares: [tasks] float32 of sum 1, what each
    task counts for; None: equally much. Ranks hold unequal numbers of candidates while DDP and TorchRec average
    gradients over ranks: each rank's sum is divided by the all-reduced weight and multiplied by the number of ranks.
    Returns this rank's share (the mean over ranks is the loss) and the global weight.
    """
    ranks, total = 1, weights.detach()
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks, total = dist.get_world_size(), total.clone()
        dist.all_reduce(total)
    mean = torch.mean if task_shares is None else task_shares.dot
    # A task without observed labels has a loss of 0 / 1: dividing by a tiny number would make its gradient 0 * inf.
    return mean(sums / torch.where(total > 0, total, 1)) * ranks, mean(total)
