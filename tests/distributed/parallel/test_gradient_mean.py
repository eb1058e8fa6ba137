"""Gradients that one all-reduce averages are those of DDP, to the bit, and so are weights after steps with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.test_step import Step
from tests.modules.factories import random_batch
from tests.processes import run_ranks
from train.config.schema import OptimizerConfig, RuntimeConfig
from train.parallel.dense import Replicated
from train.parallel.gradient_mean import GradientMean
from train.process import distributed


class Parts(nn.Module):
    """Some of its parts are used if asked for; one weight is frozen, and one has two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.sometimes = nn.Linear(3, 3)
        self.factor = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.never = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, more: bool) -> Tensor:
        y = self.always(self.frozen(self.always(x))) * self.factor
        return y + self.sometimes(x) if more else y


def _run(used: tuple[bool, ...]) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    torch.manual_seed(0)
    module = Parts()
    theirs = DistributedDataParallel(copy.deepcopy(module), find_unused_parameters=True)
    group = dist.group.WORLD
    assert group is not None
    GradientMean(module.parameters(), group)
    places: list[int] = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        for step, more in enumerate(used):
            x = torch.randn(4 + world.rank, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
            for each in (module, theirs):
                each.zero_grad()
                each(x, more).square().sum().backward()
            for (name, ours), expected in zip(module.named_parameters(), theirs.parameters(), strict=True):
                assert (ours.grad is None) == (expected.grad is None), name
                if ours.grad is not None and expected.grad is not None:
                    assert torch.equal(ours.grad, expected.grad), name
            found = [each.grad.data_ptr() for each in module.always.parameters() if each.grad is not None]
            assert found == (places or found)  # graphs read gradients where they are
            places = found
    if len(set(used)) == 1:
        assert reduce.call_count == 2 * len(used)  # one for each dtype
    distributed.stop()


@pytest.mark.parametrize(
    "used", [(True, True, True), (False, True, True, False, False)], ids=["the same", "more and fewer"]
)
def test_gradients_are_those_of_ddp(used: tuple[bool, ...]) -> None:
    run_ranks(_run, 2, used)


def watched(x: Tensor, function: Callable[[], None]) -> Tensor:
    """A copy of x, whose backward begins by calling the function: read first, it is differentiated last."""
    copied = x.clone()
    copied.register_hook(lambda gradient: function())
    return copied


def _begins_before_the_backward_ends() -> None:
    distributed.start(RuntimeConfig(device="cpu", threads=1))
    group = dist.group.WORLD
    assert group is not None
    events: list[str] = []

    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    GradientMean(layers.parameters(), group)
    all_reduce = dist.all_reduce

    def reduce(x: Tensor, **options: Any) -> dist.Work | None:
        events.append("reduce")
        return all_reduce(x, **options)

    with mock.patch.object(dist, "all_reduce", reduce):
        for _ in range(2):
            layers(watched(torch.randn(2, 3, requires_grad=True), lambda: events.append("early"))).sum().backward()
    assert events == ["early", "reduce", "reduce", "early"]  # the first backward shows how many gradients there are
    distributed.stop()


def test_gradients_are_reduced_beside_the_rest_of_the_backward() -> None:
    run_ranks(_begins_before_the_backward_ends, 1)


def _settles_once_all_are_there() -> None:
    distributed.start(RuntimeConfig(device="cpu", threads=1))
    group = dist.group.WORLD
    assert group is not None
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    mean = GradientMean([first, second], group)
    asked: list[bool] = []

    def ask() -> None:
        asked.append(mean.settle())

    (watched(first, ask) * second).sum().backward()
    assert asked == [False]
    (watched(first, ask) * second).sum().backward()  # two had come, and one is there
    second.sum().backward()  # of which the next backward expects as many
    with pytest.raises(RuntimeError, match="a gradient came after those of the step had been averaged"):
        (watched(first, ask) * second).sum().backward()
    assert asked == [False, False, True]
    distributed.stop()


def test_gradients_are_averaged_early_only_once_all_are_there() -> None:
    run_ranks(_settles_once_all_are_there, 1)


def _after_a_failure() -> None:
    distributed.start(RuntimeConfig(device="cpu", threads=1))
    group = dist.group.WORLD
    assert group is not None
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    GradientMean([first, second], group)

    def fail() -> None:
        raise ValueError("of a backward")

    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        (first + second).sum().backward()
        with pytest.raises(ValueError, match="of a backward"):
            (watched(torch.ones(2, requires_grad=True), fail) * (first + second)).sum().backward()
        first.grad = second.grad = None
        before = reduce.call_count
        (first + 2 * second).sum().backward()
        assert reduce.call_count == before + 1
    first.sum().backward()  # without `zero_grad`: what this one does not reach stays
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == [2, 2]
    assert second.grad.tolist() == [2, 2]
    distributed.stop()


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    run_ranks(_after_a_failure, 1)


def _steps(accumulate: int, whole: tuple[str, ...]) -> tuple[list[int], dict[str, Tensor]]:
    """(for each dense step the gradients of rows that were on their way, weights) after batches of which one is bad."""
    step = Step(OptimizerConfig(warmup_steps=0, accumulate=accumulate), sharding="table_wise", whole=whole)
    batches = [random_batch(step.spec, seed=10 * step.world.rank + index) for index in range(5)]
    if step.world.rank == 0:
        batches[3].candidate_dense[0, 0] = torch.nan
    early = []
    step_by = step.optimizer._step_by

    def seen(gradients: dict[str, Tensor]) -> None:
        early.append(int(step.optimizer._stepped_early))
        step_by(gradients)

    with mock.patch.object(step.optimizer, "_step_by", seen):
        given = iter(batches)
        for _ in batches:
            step.pipeline.progress(given)
    assert step.optimizer.micro_step == len(batches)
    assert [line.split(":")[0] for line in step.guard.report()] == ["step 4"]
    weights = step.dense() if whole else step.shards() | step.dense()
    if any(early):
        _a_second_backward_is_refused(step)
    return early, weights


def _a_second_backward_is_refused(step: Step) -> None:
    given = iter([random_batch(step.spec, seed=step.world.rank)] * 4)
    with mock.patch.multiple(step.optimizer, step=mock.DEFAULT, zero_grad=mock.DEFAULT):
        step.pipeline.progress(given)
        with pytest.raises(RuntimeError, match="a second backward since the last step"):
            step.pipeline.progress(given)


def _as_behind_the_backward(accumulate: int, whole: tuple[str, ...], expected_early: list[int]) -> None:
    early, expected = _steps(accumulate, whole)
    assert not any(early)
    with mock.patch("train.optim.sparse.data_parallel", return_value=Replicated(together=True)):
        early, found = _steps(accumulate, whole)
    assert early == expected_early
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    distributed.stop()


@pytest.mark.parametrize(
    ("accumulate", "whole", "early"),
    [(1, (), [0, 1, 1, 1, 1]), (1, ("item",), [0] * 5), (2, (), [])],
    ids=["early", "a table that the dense optimiser steps", "accumulated"],
)
def test_a_dense_step_in_the_backward_is_that_behind_it(
    accumulate: int, whole: tuple[str, ...], early: list[int]
) -> None:
    run_ranks(_as_behind_the_backward, 2, accumulate, whole, early)
