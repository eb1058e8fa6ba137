"""residual + RMSNorm(x + normed), the end of the GDPA block, as one operator: specification and registration."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import dispatch
from kernels.custom_op import custom_op

EPSILON = 1e-5
MAX_WIDTH = 8192  # of a row, which one program keeps in registers


def add_rms_norm(x: Tensor, normed: Tensor, residual: Tensor, *, backend: str | None = None) -> Tensor:
    """residual + z / sqrt(mean(z^2) + 1e-5) with z = x + normed and the mean over the last dimension, like `residual`.

    All three have one shape and one floating dtype; statistics are at least float32. The fused backend reads three
    tensors and writes one, in place of the eight that the two additions and the norm move one by one. ValueError for
    shapes or dtypes that differ.
    """
    if not x.shape == normed.shape == residual.shape or not x.dtype == normed.dtype == residual.dtype:
        raise ValueError(
            f"x, normed and residual must have one shape and dtype, got {tuple(x.shape)} {x.dtype}, "
            f"{tuple(normed.shape)} {normed.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )
    function = dispatch.choose("add_rms_norm", backend, residual, width=residual.shape[-1])
    return function(x, normed, residual)


@dispatch.register("add_rms_norm", "reference")
def _reference(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    # Autocast widens the norm.
    return (residual + F.rms_norm(x + normed, x.shape[-1:], eps=EPSILON)).to(residual.dtype)


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype, width: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability):
        return reason
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {dtype}"
    if width > MAX_WIDTH:
        return f"needs rows of at most {MAX_WIDTH} values, got {width}"
    return None


@custom_op("gemsmith::add_rms_norm")
def _attach(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    from kernels.gdpa.triton_residual import forward

    return forward(x, normed, residual)


@_attach.register_fake
def _(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


@custom_op("gemsmith::add_rms_norm_backward")
def _attach_backward(grad: Tensor, x: Tensor, normed: Tensor) -> Tensor:
    from kernels.gdpa.triton_residual import backward

    return backward(grad, x, normed)


@_attach_backward.register_fake
def _(grad: Tensor, x: Tensor, normed: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shared = _attach_backward(grad, *ctx.saved_tensors)
    return shared, shared, grad


_attach.register_autograd(_differentiate, setup_context=_save)


# Below the reference, so only by name, until it has passed its tests on a GPU and a benchmark.
@dispatch.register("add_rms_norm", "triton", supports=_supports, priority=-1)
def _triton(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    return _attach(x, normed, residual)
