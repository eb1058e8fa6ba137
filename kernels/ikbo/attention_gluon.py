"""`joint_attention` on Hopper: the Gluon kernels of jagged attention behind one operator, one launch each way.

Forward needs nothing new: which queries meet which keys is a list of tiles, and it may name the keys of a request once
for every group. Backward writes the gradients of a run of keys from one place, so there each group has a copy of the
keys and values and gradients of its own, which are summed behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.custom_op import custom_op
from kernels.ikbo.attention import hopper_attention

_UNLIMITED = (-1, -1)
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor[] q_offsets, Tensor k_offsets, SymInt[] max_q, SymInt max_k, SymInt[] sizes, "
    "float scale"
)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:group]) for group in range(len(sizes))]


@custom_op("gemsmith::joint_attention_gluon", schema=f"({_CALL}) -> (Tensor, Tensor)")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: list[Tensor],
    k_offsets: Tensor,
    max_q: list[int],
    max_k: int,
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    from kernels import scheduling
    from kernels.jagged import gluon_attention_forward as gluon

    if k.shape[0] == 0:  # the kernel then has no tiles
        schedule = None
    else:
        # From the end of one group to the start of the next is a row that has no queries, whatever keys it has.
        queries = torch.cat([offsets + start for offsets, start in zip(q_offsets, _starts(sizes), strict=True)])
        keys = k_offsets.repeat(len(sizes))
        block_k = gluon._block_k(k.shape[0], k_offsets, max_k)
        schedule = scheduling.tile_schedule(queries, keys, q.shape[0], max_k, gluon.BLOCK_Q, block_k, _UNLIMITED)
    return gluon.attention_forward(
        q, k, v, q_offsets[0], k_offsets, max(max_q), max_k, scale, False, _UNLIMITED, schedule
    )


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total, num_heads = q.shape[:2]
    return q.new_empty(total, num_heads, v.shape[2]), q.new_empty(num_heads, total, dtype=torch.float32)


@custom_op(
    "gemsmith::joint_attention_gluon_backward",
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
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.jagged.gluon_attention_backward import attention_backward

    groups, num_keys = len(sizes), k.shape[0]
    queries = _joined(q_offsets, _starts(sizes))
    keys = _joined([k_offsets] * groups, [num_keys * group for group in range(groups)])
    copies = (torch.cat([x] * groups) for x in (k, v))
    dq, dk, dv = attention_backward(
        grad, q, *copies, out, lse, queries, keys, max(max_q), max_k, scale, False, _UNLIMITED
    )
    # In float32, rounded once.
    return dq, *(x.view(groups, *k.shape).sum(0, dtype=torch.float32).to(x.dtype) for x in (dk, dv))


@_differentiate.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _joined(offsets: list[Tensor], starts: list[int]) -> Tensor:
    """[groups * R + 1]: the rows of all groups, one group behind the other."""
    return torch.cat(
        [x[1:] + start if group else x for group, (x, start) in enumerate(zip(offsets, starts, strict=True))]
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, *ctx.constants = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, k_offsets, *q_offsets, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, k_offsets, *q_offsets, out, lse = ctx.saved_tensors
    gradients = _differentiate(grad, out, lse, q, k, v, q_offsets, k_offsets, *ctx.constants)
    return *gradients, None, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


# By name: its forward is as fast as a launch for each group, its backward is slower, for the copies of keys and values.
@dispatch.register("joint_attention", "gluon", supports=hopper_attention, priority=-1)
def _gluon(*arguments: Any) -> Tensor:
    return _attend(*arguments)[0]
