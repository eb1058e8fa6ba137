"""Rotary position embedding (RoPE, arXiv 2104.09864): specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core import dispatch
from kernels.core.operator import custom_op

MAX_WIDTH = 8192  # features of a head; a program keeps whole tokens in registers


@dispatch.register("rotate", "reference")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@dispatch.register("rotate_qkv", "reference")
def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    return rotate(q, cos, sin, positions), rotate(k, cos, sin, positions), v


def _supports(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    width: int,
    angles: torch.dtype,
    angles_learn: bool,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability):
        return reason
    if reason := dispatch.needs_dtype(dtype, *dispatch.FLOATS) or dispatch.needs_dtype(angles, *dispatch.FLOATS):
        return reason
    if not 0 < width <= MAX_WIDTH:
        return f"needs heads of 2 to {MAX_WIDTH} features, got {width}"
    return "makes no gradient of cos and sin" if angles_learn else None


@custom_op("gemsmith::rotate")
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    from kernels.tokens.triton import tokens as triton_tokens

    return triton_tokens.rotate(x, cos, sin, positions, inverse)


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


@dispatch.register("rotate", "triton", supports=_supports, priority=10)
def _forward(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    return _rotate(x, cos, sin, positions, False)


@custom_op("gemsmith::rotate_qkv_backward")
def _rotate_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> Tensor:
    from kernels.tokens.triton import tokens as triton_tokens

    gradient = dq.new_empty(dq.shape[0], 3, *dq.shape[1:])
    triton_tokens.rotate(dq, cos, sin, positions, True, out=gradient[:, 0])
    triton_tokens.rotate(dk, cos, sin, positions, True, out=gradient[:, 1])
    triton_tokens.copy_heads(dv, gradient[:, 2])
    return gradient


@_rotate_qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    return dq.new_empty(dq.shape[0], 3, *dq.shape[1:])


class _RotateQKV(torch.autograd.Function):
    """Not an operator of torch.library, since v is a view of the input."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        heads = qkv.shape[2]
        turned = _rotate(qkv.flatten(1, 2)[:, : 2 * heads], cos, sin, positions, False)
        return turned[:, :heads], turned[:, heads:], qkv[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotate_qkv_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None


dispatch.register("rotate_qkv", "triton", supports=_supports, priority=10)(_RotateQKV.apply)
