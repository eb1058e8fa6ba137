"""Rows in another order: specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.operator import custom_op


@dispatch.register("permute", "reference")
def permute(values: Tensor, order: Tensor) -> Tensor:
    return values.index_select(0, order)


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype) -> str | None:
    return dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS)


@custom_op("gemsmith::permute")
def _permute(values: Tensor, order: Tensor, inverse: bool) -> Tensor:
    from kernels.tokens.triton import tokens as triton_tokens

    return triton_tokens.permute(values, order, inverse)


@_permute.register_fake
def _(values: Tensor, order: Tensor, inverse: bool) -> Tensor:
    return values.new_empty(values.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, ctx.inverse = inputs
    ctx.save_for_backward(order)


_permute.register_autograd(
    lambda ctx, grad: (_permute(grad, *ctx.saved_tensors, not ctx.inverse), None, None), setup_context=_save
)


@dispatch.register("permute", "triton", supports=_supports, priority=10)
def _forward(values: Tensor, order: Tensor) -> Tensor:
    return _permute(values, order, False)
