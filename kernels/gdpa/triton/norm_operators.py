"""The norms around GDPA by the Triton kernels, as operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.core.operator import custom_op
from kernels.gdpa.triton import norms


@custom_op("gemsmith::gdpa_layer_norm")
def layer_norm(query: Tensor) -> Tensor:
    return norms.layer_norm(query)


@layer_norm.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_layer_norm_backward")
def layer_norm_backward(grad: Tensor, query: Tensor) -> Tensor:
    return norms.layer_norm_backward(grad, query)


@layer_norm_backward.register_fake
def _(grad: Tensor, query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_add_norms")
def add_norms(x: Tensor, query: Tensor) -> Tensor:
    return norms.add_norms(x, query)


@add_norms.register_fake
def _(x: Tensor, query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_add_norms_backward")
def add_norms_backward(grad: Tensor, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    return norms.add_norms_backward(grad, x, query)


@add_norms_backward.register_fake
def _(grad: Tensor, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


layer_norm.register_autograd(lambda ctx, grad: layer_norm_backward(grad, *ctx.saved_tensors), setup_context=_save)
add_norms.register_autograd(lambda ctx, grad: add_norms_backward(grad, *ctx.saved_tensors), setup_context=_save)
