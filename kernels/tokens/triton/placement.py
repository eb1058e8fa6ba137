"""Rows of several tensors at their places in one, and tokens of several side by side, by the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core.operator import intercepted, on_its_device
from kernels.tokens import reference
from kernels.tokens.triton import tokens


@on_its_device
def _place(places: Tensor, *parts: Tensor) -> Tensor:
    whole = parts[0].new_empty(len(places), *parts[0].shape[1:])
    for part, own in zip(parts, places.split([len(part) for part in parts]), strict=True):
        tokens.move_rows(part, own, whole, scatter=True)
    return whole


@on_its_device
def _take(whole: Tensor, places: Tensor, divisor: float) -> Tensor:
    part = whole.new_empty(len(places), *whole.shape[1:])
    tokens.move_rows(whole, places, part, scatter=False, divisor=divisor)
    return part


@on_its_device
def move_rows_(out: Tensor, rows: Tensor, places: Tensor, scatter: bool, divisor: float) -> Tensor:
    tokens.move_rows(rows, places, out, scatter=scatter, divisor=divisor)
    return out


class _PlaceRows(torch.autograd.Function):
    """Not an operator of torch.library, whose gradients cannot be those of any number of tensors."""

    @staticmethod
    def forward(ctx: Any, divisor: float, places: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.divisor = divisor
        ctx.sizes = [len(part) for part in parts]
        return _place(places, *parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        needed = zip(places.split(ctx.sizes), ctx.needs_input_grad[2:], strict=True)
        return None, None, *(_take(grad, own, ctx.divisor) if needs else None for own, needs in needed)


def place_rows(parts: list[Tensor], places: Tensor, gradient_divisor: float = 1.0) -> Tensor:
    return _PlaceRows.apply(gradient_divisor, places, *parts)


@on_its_device
def _concat(parts: list[Tensor], added: Tensor | None) -> Tensor:
    dtype = parts[0].dtype if added is None else torch.promote_types(parts[0].dtype, added.dtype)
    sizes = [part.shape[1] for part in parts]
    whole = parts[0].new_empty(parts[0].shape[0], sum(sizes), parts[0].shape[2], dtype=dtype)
    others = [None] * len(parts) if added is None else added.split(sizes, 1)
    for part, own, other in zip(parts, whole.split(sizes, 1), others, strict=True):
        tokens.copy_heads(part, own, other)
    return whole


class _ConcatTokens(torch.autograd.Function):
    """Not an operator of torch.library, whose gradients cannot be those of any number of tensors."""

    @staticmethod
    def forward(ctx: Any, added: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[1] for part in parts]
        ctx.dtypes = parts[0].dtype, None if added is None else added.dtype
        return _concat(list(parts), added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_parts, of_added = ctx.dtypes
        added = grad.to(of_added) if ctx.needs_input_grad[0] else None
        return added, *grad.to(of_parts).split(ctx.sizes, 1)


def concat_tokens(parts: list[Tensor], added: Tensor | None) -> Tensor:
    if intercepted((*parts, added)):
        return reference.concat_tokens(parts, added)
    return _ConcatTokens.apply(added, *parts)
