"""What `train.commands.export` writes beside the program."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.operator import custom_op
from train.commands.export import operator_modules


@custom_op("gemsmith_tests::twice")
def twice(x: Tensor) -> Tensor:
    """2 x"""
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # a graph within the graph
            y = twice(x)
        return y + x


def test_a_program_comes_with_the_modules_of_its_operators() -> None:
    x = torch.ones(3)
    assert operator_modules(torch.export.export(Twice(), (x,))) == [__name__]
    assert operator_modules(torch.export.export(torch.nn.ReLU(), (x,))) == []
