"""`gdpa` as a `torch.library` operator around a forward and a backward kernel.

A backend plugs in through `gdpa_operator(name, forward, backward)`, which makes an operator that `torch.compile` and
`opcheck` see through. It saves only its inputs, because there are no statistics of rows.

    forward(q, k, v, queries, keys, activations, score_scale, out_scale, mask) -> out
    backward(grad_out, q, k, v, queries, keys, activations, score_scale, out_scale, mask) -> (dq, dk, dv)

q [Nq, H, d], k [Nk, Hkv, d] and v [Nk, Hkv, dv] have one dtype and any strides, grad_out [Nq, H, dv] too; `queries` and
`keys` are equally many `Rows`. `activations` names one activation per query head, `mask` is a `Mask` of a window alone.
Results are contiguous and written everywhere: queries without keys and keys without queries get zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels.core.activations import ACTIVATIONS
from kernels.core.mask import Mask
from kernels.core.operator import custom_op
from kernels.core.rows import Rows

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, SymInt max_q, SymInt max_k, "
    "int[] activations, float score_scale, float out_scale, SymInt left, SymInt right"
)


def gdpa_operator(
    name: str, forward: Callable[..., Tensor], backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Callable[..., Tensor]:
    """A function with the signature of the reference, for `dispatch.Backend`, made of the two kernels above."""

    @custom_op(f"gemsmith::gdpa_{name}", schema=f"({_CALL}) -> Tensor")
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return forward(q, k, v, *_arguments(*rest))

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return q.new_empty(*q.shape[:2], v.shape[2])

    @custom_op(f"gemsmith::gdpa_{name}_backward", schema=f"(Tensor grad, {_CALL}) -> (Tensor, Tensor, Tensor)")
    def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(grad, q, k, v, *_arguments(*rest))

    @attend_backward.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.constants = inputs[5:]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = attend_backward(grad, *ctx.saved_tensors, *ctx.constants)
        return *gradients, None, None, *(None for _ in ctx.constants)

    attend.register_autograd(differentiate, setup_context=save)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Rows,
        keys: Rows,
        activations: tuple[str, ...],
        score_scale: float,
        out_scale: float,
        mask: Mask,
    ) -> Tensor:
        (q_offsets, max_q), (k_offsets, max_k) = queries, keys
        identifiers = [ACTIVATIONS.index(activation) for activation in activations]
        scales = score_scale, out_scale
        return attend(q, k, v, q_offsets, k_offsets, max_q, max_k, identifiers, *scales, mask.left, mask.right)

    return call


def _arguments(
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    identifiers: Sequence[int],
    score_scale: float,
    out_scale: float,
    left: int,
    right: int,
) -> tuple[Any, ...]:
    """The arguments of a kernel after v."""
    activations = tuple(ACTIVATIONS[identifier] for identifier in identifiers)
    # Kernels read consecutive offsets, but an argument may be a view of every k-th one.
    rows = Rows(q_offsets.contiguous(), max_q), Rows(k_offsets.contiguous(), max_k)
    return *rows, activations, score_scale, out_scale, Mask(False, left, right)
