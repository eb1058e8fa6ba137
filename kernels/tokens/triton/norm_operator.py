"""RMSNorm by the Triton kernels, as an operator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core.operator import custom_op, intercepted
from kernels.tokens import reference
from kernels.tokens.triton import tokens


@custom_op("gemsmith::rms_norm")
def _rms_norm(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return tokens.rms_norm(x, dtype, epsilon)


@_rms_norm.register_fake
def _(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("gemsmith::rms_norm_backward", like="x")
def rms_norm_backward(grad: Tensor, more: Tensor | None, beside: Tensor | None, x: Tensor, epsilon: float) -> Tensor:
    """The gradient of x from that of its norm, `grad`, or grad + more, and from `beside`, that of its other readers."""
    return tokens.rms_norm_backward(grad, x, epsilon, beside, more)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.epsilon = inputs
    ctx.save_for_backward(x)


def _backward(
    ctx: Any, grad: Tensor | None, more: Tensor | None = None, beside: Tensor | None = None
) -> tuple[Tensor | None, None, None]:
    if grad is None:
        grad, more = more, None
    if grad is None:  # of functions that give their inputs none
        return beside, None, None
    return rms_norm_backward(grad, more, beside, *ctx.saved_tensors, ctx.epsilon), None, None


_rms_norm.register_autograd(_backward, setup_context=_save)


class _SeveralReaders(torch.autograd.Function):
    """Not an operator of torch.library, none of whose results may be another's memory, or an argument's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        normed = _rms_norm(x, dtype, epsilon)
        _save(ctx, (x, dtype, epsilon), normed)
        ctx.set_materialize_grads(False)
        return normed, normed.view_as(normed), x.view_as(x)

    backward = staticmethod(once_differentiable(_backward))


def rms_norm(
    x: Tensor, dtype: torch.dtype, epsilon: float, twice: bool = False, beside: bool = False
) -> Tensor | tuple[Tensor, ...]:
    if (twice or beside) and not intercepted((x,)):
        normed, again, x = cast("tuple[Tensor, ...]", _SeveralReaders.apply(x, dtype, epsilon))
    else:
        normed = again = cast(Tensor, _rms_norm(x, dtype, epsilon))
    return reference.of_readers(normed, again if twice else None, x if beside else None)
