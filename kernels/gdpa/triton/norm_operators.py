"""The norms around GDPA by the Triton kernels, as operators.

What a second reader adds to a gradient is added by the kernels, in functions that are not operators of torch.library:
none of an operator's results may be another's memory, or an argument's. Under a compiler autograd adds it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.core.operator import custom_op, intercepted
from kernels.gdpa.triton import norms


@custom_op("gemsmith::gdpa_layer_norm", like="query")
def _layer_norm(query: Tensor, head: int) -> Tensor:
    return norms.layer_norm(query, head)


@custom_op("gemsmith::gdpa_layer_norm_backward", like="query")
def _layer_norm_backward(grad: Tensor, query: Tensor, more: Tensor | None, head: int) -> Tensor:
    return norms.layer_norm_backward(grad, query, more, head)


def _save_query(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, ctx.head = inputs
    ctx.save_for_backward(query)


def _of_query(ctx: Any, grad: Tensor | None, more: Tensor | None = None) -> tuple[Tensor | None, None]:
    if grad is None:
        return more, None
    return _layer_norm_backward(grad, *ctx.saved_tensors, more, ctx.head), None


_layer_norm.register_autograd(_of_query, setup_context=_save_query)


class _BesideQuery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, head: int) -> tuple[Tensor, Tensor]:
        _save_query(ctx, (query, head), query)
        ctx.set_materialize_grads(False)
        return _layer_norm(query, head), query.view_as(query)

    backward = staticmethod(once_differentiable(_of_query))


def layer_norm(query: Tensor, heads: int = 0) -> tuple[Tensor, Tensor]:
    head = query.shape[-1] // heads if heads else 0
    if intercepted((query,)):
        return _layer_norm(query, head), query
    return cast("tuple[Tensor, Tensor]", _BesideQuery.apply(query, head))


@custom_op("gemsmith::gdpa_add_norms", like="query")
def _add_norms(x: Tensor, query: Tensor) -> Tensor:
    return norms.add_norms(x, query, False)[0]


@custom_op("gemsmith::gdpa_add_norms_normed", like=("query", "query"))
def _add_norms_normed(x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    return norms.add_norms(x, query, True)


@custom_op("gemsmith::gdpa_add_norms_backward", like=("query", "query"))
def _add_norms_backward(
    grad: Tensor | None, d_normed: Tensor | None, more: Tensor | None, x: Tensor, query: Tensor
) -> tuple[Tensor, Tensor]:
    return norms.add_norms_backward(grad, d_normed, more, x, query)


def _save_both(ctx: Any, inputs: tuple[Tensor, ...], output: object) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _of_both(
    ctx: Any, grad: Tensor | None, d_normed: Tensor | None = None, more: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    if d_normed is None:
        d_normed, more = more, None
    if grad is None and d_normed is None:
        return None, None
    return cast("tuple[Tensor, Tensor]", _add_norms_backward(grad, d_normed, more, *ctx.saved_tensors))


_add_norms.register_autograd(_of_both, setup_context=_save_both)
_add_norms_normed.register_autograd(_of_both, setup_context=_save_both)


class _TwoReaders(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, normed = _add_norms_normed(x, query)
        _save_both(ctx, (x, query), out)
        return out, normed, normed.view_as(normed)

    backward = staticmethod(once_differentiable(_of_both))


def add_norms(x: Tensor, query: Tensor, norm: bool = False) -> tuple[Tensor, ...]:
    if not norm:
        return (_add_norms(x, query),)
    if intercepted((x, query)):
        out, normed = _add_norms_normed(x, query)
        return out, normed, normed
    return cast("tuple[Tensor, ...]", _TwoReaders.apply(x, query))
