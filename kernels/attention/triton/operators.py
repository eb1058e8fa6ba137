"""Attention by the Triton kernels, as operators: for every shape, for a few queries a row, and for pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention.gradients import gradients_beside
from kernels.attention.operator import attention_operator
from kernels.attention.triton import backward, decode, forward, pool
from kernels.core.operator import custom_op
from kernels.core.rows import Rows

attention = attention_operator("triton", forward.forward, backward.backward)
few_queries = attention_operator("decode", decode.forward, decode.backward, features=False, gradients=gradients_beside)

_ARGUMENTS = "Tensor q, Tensor values, Tensor q_offsets, Tensor k_offsets, SymInt max_q, float scale"


@custom_op("gemsmith::attention_pool", schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _pool(
    q: Tensor, values: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, scale: float
) -> tuple[Tensor, Tensor]:
    return pool.forward(q, values, Rows(q_offsets, max_q), k_offsets, scale)


@_pool.register_fake
def _(q: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@custom_op(
    "gemsmith::attention_pool_backward",
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _pool_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    values: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return pool.backward(grad, q, values, out, lse, Rows(q_offsets, max_q), k_offsets, scale)


@_pool_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), values.new_empty(values.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_q, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # lse has no gradient: zeros would be made for nothing
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    *tensors, out, lse = ctx.saved_tensors
    return *_pool_backward(grad, out, lse, *tensors, ctx.max_q, ctx.scale), None, None, None, None


_pool.register_autograd(_differentiate, setup_context=_save)


def attention_pool(q: Tensor, values: Tensor, queries: Rows, keys: Rows, scale: float) -> Tensor:
    """As the reference."""
    return _pool(q, values, queries.offsets, keys.offsets, queries.max_length, scale)[0]
