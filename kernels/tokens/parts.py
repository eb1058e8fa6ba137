"""Parts of a fused projection, whose gradients need no copy where they already lie together, and parts of tokens."""

from __future__ import annotations

from collections.abc import Callable
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


class Split(torch.autograd.Function):
    """x.split(sizes, 1) of x [N, n, D], with gradients put together by `concat`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], concat: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, ...]:
        ctx.concat = concat
        return x.split(sizes, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.concat(list(gradients)), None, None


def whole(parts: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor [N, K, ...] whose K parts [N, ...] these are, in order, or None if they are not parts of one."""
    together = parts[0]._base
    if together is None or together.shape != (len(parts[0]), len(parts), *parts[0].shape[1:]):
        return None
    for own, part in zip(together.unbind(1), parts, strict=True):
        same = part._base is together and part.storage_offset() == own.storage_offset()
        # A gradient that can be differentiated again is more than its memory.
        if not same or part.stride() != own.stride() or part.requires_grad:
            return None
    return together
