"""Rotary position embedding (RoPE, arXiv 2104.09864): specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.custom_op import custom_op

MAX_WIDTH = 8192  # of a head, of which one program keeps whole tokens in registers


@dispatch.register("rotate", "reference")
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


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
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    from kernels.tokens import triton_tokens

    return triton_tokens.rotate(x, cos, sin, inverse)


@_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    # A rotation's transpose turns back; it is the operator itself, so that second derivatives exist.
    return _rotate(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotate.register_autograd(_backward, setup_context=_save)


@dispatch.register("rotate", "triton", supports=_supports, priority=10)
def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(x, cos, sin, False)
