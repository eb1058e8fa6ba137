"""Rotary position embedding by the Triton kernels, as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.core.operator import custom_op, intercepted, on_its_device
from kernels.core.projection import whole_of
from kernels.tokens.triton import tokens


@custom_op("gemsmith::rotate")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    return tokens.rotate(x, cos, sin, positions, inverse)


@_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angles, ctx.inverse = inputs
    ctx.save_for_backward(*angles)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    # The transpose of a rotation is the rotation back. It is this operator again, so that second derivatives exist.
    return _rotate(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    return _rotate(x, cos, sin, positions, False)


@custom_op("gemsmith::rotate_qkv_backward")
def _rotate_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    more_dk: Tensor | None,
    more_dv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
) -> Tensor:
    gradient = dq.new_empty(dq.shape[0], 3, *dq.shape[1:])
    _turn_back(gradient, dq, dk, dv, more_dk, more_dv, cos, sin, positions)
    return gradient


def _turn_back(
    gradient: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    more_dk: Tensor | None,
    more_dv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
) -> None:
    """dv may be where it belongs already."""
    tokens.rotate(dq, cos, sin, positions, True, gradient[:, 0])
    tokens.rotate(dk, cos, sin, positions, True, gradient[:, 1], more_dk)
    if more_dv is not None or dv._base is not gradient:
        tokens.copy_heads(dv, gradient[:, 2], more_dv)


@_rotate_qkv_backward.register_fake
def _(dq: Tensor, *others: Tensor | None) -> Tensor:
    return dq.new_empty(dq.shape[0], 3, *dq.shape[1:])


_turn_back_in_place = on_its_device(_turn_back)


class _RotateQKV(torch.autograd.Function):
    """Not an operator of torch.library, since v is a view of the input."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, twice: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, positions)
        heads = qkv.shape[2]
        turned = _rotate(qkv.flatten(1, 2)[:, : 2 * heads], cos, sin, positions, False)
        again = (turned[:, heads:], qkv[:, 2]) if twice else ()
        return turned[:, :heads], turned[:, heads:], qkv[:, 2], *again

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return turned_back(gradients, *ctx.saved_tensors), None, None, None, None


def turned_back(gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    """The gradient [N, 3, H, d] of a projection from those of q and k, which were rotated, of v, and of a second reader
    of k and v if there is one."""
    dq, dk, dv, more_dk, more_dv = gradients if len(gradients) == 5 else (*gradients, None, None)
    arguments = (dq, dk, dv, more_dk, more_dv, cos, sin, positions)
    together = None if intercepted(arguments) else whole_of(dv, 3)
    if together is None:
        return cast(Tensor, _rotate_qkv_backward(*arguments))
    _turn_back_in_place(together, *arguments)
    return together


rotate_qkv = _RotateQKV.apply


def project_qkv(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, heads: int, twice: bool
) -> tuple[Tensor, ...]:
    """The product by PyTorch."""
    return rotate_qkv(
        F.linear(x, weight).view(x.shape[0], 3, heads, weight.shape[0] // (3 * heads)), cos, sin, positions, twice
    )
