"""The parts of a fused projection, whose gradients need not be put together where they lie together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Unbind(torch.autograd.Function):
    """x.unbind(1) of x [N, K, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        together = whole(gradients)
        return torch.stack(gradients, 1) if together is None else together


def whole(parts: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor [N, K, ...] that K parts [N, ...] are all of, in their order, or None if there is none."""
    together = parts[0]._base
    if together is None or together.shape != (len(parts[0]), len(parts), *parts[0].shape[1:]):
        return None
    for own, part in zip(together.unbind(1), parts, strict=True):
        same = part._base is together and part.storage_offset() == own.storage_offset()
        # One that can be differentiated again is not the memory that it is in alone.
        if not same or part.stride() != own.stride() or part.requires_grad:
            return None
    return together
