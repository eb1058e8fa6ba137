"""RMSNorm: specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.core import dispatch
from kernels.core.operator import custom_op

EPSILON = 1e-5
MAX_WIDTH = 8192  # columns of a row, which one program keeps in registers


@dispatch.register("rms_norm", "reference")
def rms_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch takes the statistics in at least float32 whatever the input, and autocast widens the result too.
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON).to(dtype)


def _supports(
    *, device: str, capability: Hashable, dtype: torch.dtype, width: int, out_dtype: torch.dtype
) -> str | None:
    if reason := dispatch.needs_triton(device, capability):
        return reason
    if reason := dispatch.needs_dtype(dtype, *dispatch.FLOATS) or dispatch.needs_dtype(out_dtype, *dispatch.FLOATS):
        return reason
    if not 0 < width <= MAX_WIDTH:
        return f"needs rows of 1 to {MAX_WIDTH} values, got {width}"
    return None


@custom_op("gemsmith::rms_norm")
def _rms_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    from kernels.tokens.triton import tokens as triton_tokens

    return triton_tokens.rms_norm(x, dtype)


@_rms_norm.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("gemsmith::rms_norm_backward")
def _rms_norm_backward(grad: Tensor, x: Tensor) -> Tensor:
    from kernels.tokens.triton import tokens as triton_tokens

    return triton_tokens.rms_norm_backward(grad, x)


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


_rms_norm.register_autograd(lambda ctx, grad: (_rms_norm_backward(grad, *ctx.saved_tensors), None), setup_context=_save)
dispatch.register("rms_norm", "triton", supports=_supports, priority=10)(_rms_norm)
