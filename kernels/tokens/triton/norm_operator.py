"""RMSNorm by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core.operator import custom_op, intercepted
from kernels.tokens.triton import tokens


@custom_op("gemsmith::rms_norm")
def _rms_norm(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return tokens.rms_norm(x, dtype, epsilon)


@_rms_norm.register_fake
def _(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("gemsmith::rms_norm_backward", like="x")
def rms_norm_backward(grad: Tensor, more: Tensor | None, x: Tensor, epsilon: float) -> Tensor:
    """The gradient of x from that of its norm, `grad`, or grad + more."""
    return tokens.rms_norm_backward(grad, x, epsilon, more)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.epsilon = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor | None, more: Tensor | None = None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        grad, more = more, None
    if grad is None:  # of functions that give their inputs none
        return None, None, None
    return rms_norm_backward(grad, more, *ctx.saved_tensors, ctx.epsilon), None, None


_rms_norm.register_autograd(_backward, setup_context=_save)


class _TwoReaders(torch.autograd.Function):
    """Not an operator of torch.library, none of whose results may be another's memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, epsilon: float) -> tuple[Tensor, Tensor]:
        normed = _rms_norm(x, dtype, epsilon)
        _save(ctx, (x, dtype, epsilon), normed)
        ctx.set_materialize_grads(False)
        return normed, normed.view_as(normed)

    backward = staticmethod(once_differentiable(_backward))


def rms_norm(x: Tensor, dtype: torch.dtype, epsilon: float, twice: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    if twice and not intercepted((x,)):
        return cast("tuple[Tensor, Tensor]", _TwoReaders.apply(x, dtype, epsilon))
    normed = cast(Tensor, _rms_norm(x, dtype, epsilon))
    return (normed, normed) if twice else normed
