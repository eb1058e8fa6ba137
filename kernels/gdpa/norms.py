"""The norms around GDPA in a block, query + RMSNorm(attention(LN(query)) + LN(query)), as one operator before attention
and one after it: specifications and registration.

Both norms span the last dimension and have no learned parameters. The operator after attention recomputes LN(query),
which costs less than reading it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.core import dispatch
from kernels.core.operator import custom_op
from kernels.tokens.norm import EPSILON, MAX_WIDTH


def layer_norm(query: Tensor, *, backend: str | None = None) -> Tensor:
    """(query - mean) / sqrt(variance + 1e-5) over the last dimension, in the dtype of `query`, a floating one.

    Statistics are at least float32. The fused backend reads and writes one tensor, under autocast too.
    """
    return dispatch.choose_in_eager("gdpa_layer_norm", backend, query, width=query.shape[-1])(query)


def add_norms(x: Tensor, query: Tensor, *, backend: str | None = None) -> Tensor:
    """query + z / sqrt(mean(z^2) + 1e-5) with z = x + layer_norm(query), means over the last dimension, like `query`.

    Both have one shape and one floating dtype; statistics are at least float32. The fused backend reads two tensors and
    writes one. ValueError for shapes or dtypes that differ.
    """
    if x.shape != query.shape or x.dtype != query.dtype:
        raise ValueError(
            f"x and query must have one shape and dtype, got {tuple(x.shape)} {x.dtype} and {tuple(query.shape)} "
            f"{query.dtype}"
        )
    return dispatch.choose_in_eager("gdpa_add_norms", backend, query, width=query.shape[-1])(x, query)


@dispatch.register("gdpa_layer_norm", "reference")
def _layer_norm(query: Tensor) -> Tensor:
    # Autocast widens norms.
    return F.layer_norm(query, query.shape[-1:], eps=EPSILON).to(query.dtype)


@dispatch.register("gdpa_add_norms", "reference")
def _add_norms(x: Tensor, query: Tensor) -> Tensor:
    return (query + F.rms_norm(x + _layer_norm(query), x.shape[-1:], eps=EPSILON)).to(query.dtype)


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype, width: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if width > MAX_WIDTH:
        return f"needs rows of at most {MAX_WIDTH} values, got {width}"
    return None


@custom_op("gemsmith::gdpa_layer_norm")
def _before(query: Tensor) -> Tensor:
    from kernels.gdpa.triton import norms

    return norms.layer_norm(query)


@_before.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_layer_norm_backward")
def _before_backward(grad: Tensor, query: Tensor) -> Tensor:
    from kernels.gdpa.triton import norms

    return norms.layer_norm_backward(grad, query)


@_before_backward.register_fake
def _(grad: Tensor, query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_add_norms")
def _behind(x: Tensor, query: Tensor) -> Tensor:
    from kernels.gdpa.triton import norms

    return norms.add_norms(x, query)


@_behind.register_fake
def _(x: Tensor, query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@custom_op("gemsmith::gdpa_add_norms_backward")
def _behind_backward(grad: Tensor, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    from kernels.gdpa.triton import norms

    return norms.add_norms_backward(grad, x, query)


@_behind_backward.register_fake
def _(grad: Tensor, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), query.new_empty(query.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_before.register_autograd(lambda ctx, grad: _before_backward(grad, *ctx.saved_tensors), setup_context=_save)
_behind.register_autograd(lambda ctx, grad: _behind_backward(grad, *ctx.saved_tensors), setup_context=_save)
dispatch.register("gdpa_layer_norm", "triton", supports=_supports, priority=10)(_before)
dispatch.register("gdpa_add_norms", "triton", supports=_supports, priority=10)(_behind)
