"""A result that nothing gives a gradient, although it is part of a graph."""

from typing import Any

import torch
from torch import Tensor


class _Ungraded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def ungraded(x: Tensor) -> Tensor:
    """A scalar whose backward goes on into that of `x`, with no gradient."""
    return _Ungraded.apply(x)
