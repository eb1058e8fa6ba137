"""`tree_attention` on Hopper: the kernels of jagged attention on every level, joined by their statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention.hopper import backward, forward
from kernels.core.caches import uncached
from kernels.core.mask import NO_MASK
from kernels.core.operator import on_its_device
from kernels.core.rows import Rows
from kernels.ikbo.triton.levels import join_levels, sum_of


def _rows(offsets: list[Tensor], maxima: list[int]) -> list[Rows]:
    """With contiguous offsets: kernels read consecutive ones, but an argument may be a view of every k-th."""
    return [Rows(own.contiguous(), most) for own, most in zip(offsets, maxima, strict=True)]


# A `kernels.core.operator` would hide tensors inside lists from autograd. As in one, nothing is cached for offsets,
# which compiled code may overwrite without counting the write.
@torch.library.custom_op("gemsmith::tree_attention_hopper", mutates_args=())
@on_its_device
def _attend(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    q_offsets: list[Tensor],
    k_offsets: list[Tensor],
    max_q: list[int],
    max_k: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse [H, N]): attention to each level separately, averaged with the levels' shares of all weights."""
    results = [
        uncached(forward.attention_forward)(q, *level, scale, NO_MASK)
        for level in zip(k, v, _rows(q_offsets, max_q), _rows(k_offsets, max_k), strict=True)
    ]
    return join_levels(*zip(*results, strict=True))


@_attend.register_fake
def _(q: Tensor, k: list[Tensor], v: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    total, num_heads = q.shape[:2]
    return q.new_empty(total, num_heads, v[0].shape[2]), q.new_empty(num_heads, total, dtype=torch.float32)


@torch.library.custom_op("gemsmith::tree_attention_hopper_backward", mutates_args=())
@on_its_device
def _differentiate(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    q_offsets: list[Tensor],
    k_offsets: list[Tensor],
    max_q: list[int],
    max_k: list[int],
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    # With the statistics of all levels, a level's weights are its part of the softmax, and its gradients are, too.
    results = [
        uncached(backward.attention_backward)(grad, q, keys, values, out, lse, *rows, scale, NO_MASK)
        for keys, values, *rows in zip(k, v, _rows(q_offsets, max_q), _rows(k_offsets, max_k), strict=True)
    ]
    return sum_of([dq for dq, _, _ in results]), [dk for _, dk, _ in results], [dv for _, _, dv in results]


@_differentiate.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: list[Tensor], v: list[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return q.new_empty(q.shape), [x.new_empty(x.shape) for x in k], [x.new_empty(x.shape) for x in v]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, *lists, max_q, max_k, scale = inputs
    ctx.constants = max_q, max_k, scale
    ctx.levels = len(max_q)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, *(x for tensors in lists for x in tensors))


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    nothing = [None] * ctx.levels
    if grad is None:  # none arrives
        return None, nothing, nothing, nothing, nothing, None, None, None
    out, lse, q, *tensors = ctx.saved_tensors
    lists = [list(tensors[i : i + ctx.levels]) for i in range(0, len(tensors), ctx.levels)]
    dq, dk, dv = _differentiate(grad, out, lse, q, *lists, *ctx.constants)
    return dq, dk, dv, nothing, nothing, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


def tree_attention(*arguments: Any) -> Tensor:
    return _attend(*arguments)[0]
