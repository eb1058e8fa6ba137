"""Bias, activation and a factor after a linear layer's product: specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.core import dispatch
from kernels.core.operator import custom_op

ACTIVATIONS = {"none": lambda u: u, "silu": F.silu}
MAX_WIDTH = 2048  # columns of a row, of which a program keeps several copies in registers


@dispatch.register("activate", "reference")
def activate(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    y = ACTIVATIONS[activation](z.to(wide) + bias.to(wide))
    return (y if factor is None else y * factor.to(wide)).to(z.dtype)


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype, width: int, bias: torch.dtype) -> str | None:
    if reason := dispatch.needs_triton(device, capability):
        return reason
    if reason := dispatch.needs_dtype(dtype, *dispatch.FLOATS) or dispatch.needs_dtype(bias, *dispatch.FLOATS):
        return reason
    return None if 0 < width <= MAX_WIDTH else f"needs rows of 1 to {MAX_WIDTH} values, got {width}"


@custom_op("gemsmith::activate")
def _activate(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    from kernels.tokens.triton import activation as triton_activation

    return triton_activation.activate(z, bias, activation, factor)


@_activate.register_fake
def _(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    return z.new_empty(z.shape)


@custom_op("gemsmith::activate_backward")
def _activate_backward(
    grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.tokens.triton import activation as triton_activation

    return triton_activation.activate_backward(grad, z, bias, activation, factor)


@_activate_backward.register_fake
def _(grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), bias.new_empty(bias.shape), z.new_empty(0 if factor is None else z.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, bias, ctx.activation, factor = inputs
    ctx.save_for_backward(z, bias, factor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
    z, bias, factor = ctx.saved_tensors
    dz, dbias, dfactor = _activate_backward(grad, z, bias, ctx.activation, factor)
    return dz, dbias, None, None if factor is None else dfactor


_activate.register_autograd(_backward, setup_context=_save)
dispatch.register("activate", "triton", supports=_supports, priority=10)(_activate)
