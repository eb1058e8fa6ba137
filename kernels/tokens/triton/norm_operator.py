"""RMSNorm by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.core.operator import custom_op
from kernels.tokens.triton import tokens


@custom_op("gemsmith::rms_norm")
def rms_norm(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return tokens.rms_norm(x, dtype, epsilon)


@rms_norm.register_fake
def _(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("gemsmith::rms_norm_backward", like="x")
def rms_norm_backward(grad: Tensor, x: Tensor, epsilon: float) -> Tensor:
    return tokens.rms_norm_backward(grad, x, epsilon)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.epsilon = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return rms_norm_backward(grad, *ctx.saved_tensors, ctx.epsilon), None, None


rms_norm.register_autograd(_backward, setup_context=_save)
