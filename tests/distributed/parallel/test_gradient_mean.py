"""Gradients that one all-reduce averages are those of DDP, to the bit, and so are weights after steps with them."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run_ranks
from train.config.schema import RuntimeConfig
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


def _begins_before_the_backward_ends() -> None:
    distributed.start(RuntimeConfig(device="cpu", threads=1))
    group = dist.group.WORLD
    assert group is not None
    events: list[str] = []

    class Early(torch.autograd.Function):
        """Comes first in the forward, and so last in the backward."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            events.append("early")
            return gradient

    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    GradientMean(layers.parameters(), group)
    all_reduce = dist.all_reduce

    def reduce(x: Tensor, **options: Any) -> dist.Work | None:
        events.append("reduce")
        return all_reduce(x, **options)

    with mock.patch.object(dist, "all_reduce", reduce):
        for _ in range(2):
            layers(Early.apply(torch.randn(2, 3, requires_grad=True))).sum().backward()
    assert events == ["early", "reduce", "reduce", "early"]  # the first backward shows how many gradients there are
    distributed.stop()


def test_gradients_are_reduced_beside_the_rest_of_the_backward() -> None:
    run_ranks(_begins_before_the_backward_ends, 1)
