"""`joint_attention` on Hopper: the Gluon kernels of jagged attention behind one operator.

A list of tiles says which queries meet which keys. The forward's list names the keys of a request once for every group.
In the backward one program writes the gradients of a tile of keys, so its list names the queries of every group for
each tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention.hopper import backward, forward
from kernels.core.mask import NO_MASK
from kernels.core.operator import custom_op
from kernels.core.rows import Rows
from kernels.ikbo.triton.groups import joined_groups

_CALL = "Tensor q, Tensor k, Tensor v, Tensor[] q_offsets, Tensor k_offsets, SymInt[] max_q, SymInt max_k, float scale"


@custom_op("gemsmith::joint_attention_hopper", schema=f"({_CALL}) -> (Tensor, Tensor)")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: list[Tensor],
    k_offsets: Tensor,
    max_q: list[int],
    max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    joined = joined_groups(q_offsets, k_offsets, max_q, max_k)
    if k.shape[0] == 0:  # the kernel then has no tiles
        schedule = None
    else:
        block_k = forward.block_of_keys(k.shape[0], k_offsets, max_k)
        paired = forward.is_paired(q.shape[1], NO_MASK.window, q.shape[0], q_offsets[0], max(max_q))
        schedule = forward.tile_list(*joined, q.shape[0], max_k, block_k, NO_MASK.window, paired)
    queries, keys = Rows(q_offsets[0], max(max_q)), Rows(k_offsets, max_k)
    return forward.attention_forward(q, k, v, queries, keys, scale, NO_MASK, schedule)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, num_heads = q.shape[:2]
    return q.new_empty(total, num_heads, v.shape[2]), q.new_empty(num_heads, total, dtype=torch.float32)


@custom_op(
    "gemsmith::joint_attention_hopper_backward",
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def _differentiate(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: list[Tensor],
    k_offsets: Tensor,
    max_q: list[int],
    max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    joined, _ = joined_groups(q_offsets, k_offsets, max_q, max_k)
    queries, keys = Rows(joined, sum(max_q)), Rows(k_offsets.contiguous(), max_k)
    return backward.attention_backward(grad, q, k, v, out, lse, queries, keys, scale, NO_MASK)


@_differentiate.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, k_offsets, *q_offsets, *output)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:  # none arrives
        return (None,) * 8
    q, k, v, k_offsets, *q_offsets, out, lse = ctx.saved_tensors
    gradients = _differentiate(grad, out, lse, q, k, v, q_offsets, k_offsets, *ctx.constants)
    return *gradients, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def joint_attention(*arguments: Any) -> Tensor:
    *call, _ = arguments  # offsets say where groups end
    return _attend(*call)[0]
