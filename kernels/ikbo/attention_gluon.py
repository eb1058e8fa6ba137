"""`joint_attention` on Hopper: the Gluon kernels of jagged attention behind one operator.

Forward is one launch: which queries meet which keys is a list of tiles, and it may name the keys of a request once for
every group. Backward writes the gradients of a run of keys from one place, so it is a launch for each group, whose
gradients of keys and values are summed; those of queries are written where they belong.
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
    from kernels.ikbo.triton_groups import joined_groups
    from kernels.jagged import gluon_attention_forward as gluon

    if k.shape[0] == 0:  # the kernel then has no tiles
        schedule = None
    else:
        queries, keys = joined_groups(q_offsets, k_offsets.contiguous(), sizes)
        block_k = gluon.block_of_keys(k.shape[0], k_offsets, max_k)
        paired = gluon.is_paired(q.shape[1], _UNLIMITED, q.shape[0], q_offsets[0], max(max_q))
        schedule = gluon.tile_list(queries, keys, q.shape[0], max_k, block_k, _UNLIMITED, paired)
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

    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_groups = zip(*(x.split(sizes) for x in (grad, q, out, dq)), lse.split(sizes, 1), q_offsets, max_q, strict=True)
    parts = [
        attention_backward(
            own_grad, own_q, k, v, own_out, own_lse.contiguous(), offsets, k_offsets, most, max_k, scale, False,
            _UNLIMITED, own_dq,
        )
        for own_grad, own_q, own_out, own_dq, own_lse, offsets, most in of_groups
    ]  # fmt: skip
    dk, dv = parts[0][1:]
    for _, more_dk, more_dv in parts[1:]:
        dk += more_dk
        dv += more_dv
    return dq, dk, dv


@_differentiate.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, k_offsets, *ctx.constants = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, k_offsets, *q_offsets, *output)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:  # of a function that gives its input none
        return (None,) * 9
    q, k, v, k_offsets, *q_offsets, out, lse = ctx.saved_tensors
    gradients = _differentiate(grad, out, lse, q, k, v, q_offsets, k_offsets, *ctx.constants)
    return *gradients, None, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


# By name: it is within 2 % of a launch for each group, on either side.
@dispatch.register("joint_attention", "gluon", supports=hopper_attention, priority=-1)
def _gluon(*arguments: Any) -> Tensor:
    return _attend(*arguments)[0]
