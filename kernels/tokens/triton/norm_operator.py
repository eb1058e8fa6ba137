"""RMSNorm by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.core.operator import custom_op
from kernels.tokens.triton import tokens


@custom_op("gemsmith::rms_norm")
def rms_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    return tokens.rms_norm(x, dtype)


@rms_norm.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("gemsmith::rms_norm_backward")
def rms_norm_backward(grad: Tensor, x: Tensor) -> Tensor:
    return tokens.rms_norm_backward(grad, x)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


rms_norm.register_autograd(lambda ctx, grad: (rms_norm_backward(grad, *ctx.saved_tensors), None), setup_context=_save)
