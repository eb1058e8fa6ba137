"""Rows in another order by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.core.operator import custom_op
from kernels.tokens.triton import tokens


@custom_op("gemsmith::permute", like="values")
def _permute(values: Tensor, order: Tensor, inverse: bool) -> Tensor:
    return tokens.permute(values, order, inverse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, ctx.inverse = inputs
    ctx.save_for_backward(order)


_permute.register_autograd(
    lambda ctx, grad: (_permute(grad, *ctx.saved_tensors, not ctx.inverse), None, None), setup_context=_save
)


def permute(values: Tensor, order: Tensor) -> Tensor:
    return _permute(values, order, False)
