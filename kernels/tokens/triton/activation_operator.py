"""Bias, activation and a factor after a linear layer's product by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.core.operator import custom_op
from kernels.tokens.triton import activation as kernel


@custom_op("gemsmith::activate")
def activate(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    return kernel.activate(z, bias, activation, factor)


@activate.register_fake
def _(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    return z.new_empty(z.shape)


@custom_op("gemsmith::activate_backward")
def activate_backward(
    grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return kernel.activate_backward(grad, z, bias, activation, factor)


@activate_backward.register_fake
def _(grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), bias.new_empty(bias.shape), z.new_empty(0 if factor is None else z.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, bias, ctx.activation, factor = inputs
    ctx.save_for_backward(z, bias, factor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
    z, bias, factor = ctx.saved_tensors
    dz, dbias, dfactor = activate_backward(grad, z, bias, ctx.activation, factor)
    return dz, dbias, None, None if factor is None else dfactor


activate.register_autograd(_backward, setup_context=_save)
