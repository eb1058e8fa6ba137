"""`gdpa` as a `torch.library` operator around a forward and a backward kernel.

A backend plugs in through `gdpa_operator(name, forward, backward)`, which makes an operator that `torch.compile` and
`opcheck` see through. It saves only its inputs, because there are no statistics of rows.

    forward(q, k, v, queries, keys, activations, score_scale, out_scale, mask) -> out
    backward(grad_out, q, k, v, queries, keys, activations, score_scale, out_scale, mask) -> (dq, dk, dv)

q [Nq, H, d], k [Nk, Hkv, d] and v [Nk, Hkv, dv] have one dtype and any strides, grad_out [Nq, H, dv] too; `queries` and
`keys` are equally many `Rows`. `activations` names one activation per query head, `mask` is a `Mask` of a window alone.
Results are contiguous and written everywhere: queries without keys and keys without queries get zeros. A backend with
`features` takes a `Bias` and a `Structure` after the mask, None for none. If there is a bias, its backward returns the
gradients of the two tables after dv, an empty tensor for a table that is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels.attention import (
    FEATURES,
    NUM_FEATURES,
    NUM_TENSORS,
    Bias,
    Structure,
    packed_features,
    unpacked_features,
)
from kernels.core.activations import ACTIVATIONS
from kernels.core.mask import Mask
from kernels.core.operator import custom_op
from kernels.core.rows import Rows

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, "
_SIZES = "SymInt max_q, SymInt max_k, int[] activations, float score_scale, float out_scale, SymInt left, SymInt right"


def gdpa_operator(
    name: str,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    features: bool = False,
) -> Callable[..., Tensor]:
    """A function with the signature of the reference, for `dispatch.Backend`, made of the two kernels above."""
    call_schema = _TENSORS + FEATURES * features + _SIZES
    results = ", ".join(["Tensor"] * (5 if features else 3))
    saved = NUM_TENSORS if features else 5
    arguments = _with_features if features else _arguments

    @custom_op(f"gemsmith::gdpa_{name}", schema=f"({call_schema}) -> Tensor")
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return forward(q, k, v, *arguments(*rest))

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return q.new_empty(*q.shape[:2], v.shape[2])

    @custom_op(f"gemsmith::gdpa_{name}_backward", schema=f"(Tensor grad, {call_schema}) -> ({results})")
    def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        own = backward(grad, q, k, v, *arguments(*rest))
        return (*own, *(q.new_empty(0) for _ in range(2 * features))) if len(own) == 3 else own

    @attend_backward.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        tables = rest[2 : 2 + 2 * features]
        tables = (q.new_empty(0) if table is None else table.new_empty(table.shape) for table in tables)
        return *(x.new_empty(x.shape) for x in (q, k, v)), *tables

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:saved])
        ctx.constants = inputs[saved:]

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        dq, dk, dv, *tables = attend_backward(grad, *inputs, *ctx.constants)
        of_tables = [table if inputs[place] is not None else None for place, table in enumerate(tables, 5)]
        others = saved + len(ctx.constants) - 5 - len(tables)
        return dq, dk, dv, None, None, *of_tables, *(None,) * others

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
        bias: Bias | None = None,
        structure: Structure | None = None,
    ) -> Tensor:
        (q_offsets, max_q), (k_offsets, max_k) = queries, keys
        identifiers = [ACTIVATIONS.index(activation) for activation in activations]
        sizes = max_q, max_k, identifiers, score_scale, out_scale, mask.left, mask.right
        given = packed_features(bias, structure) if features else ()
        return attend(q, k, v, q_offsets, k_offsets, *given, *sizes)

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


def _with_features(q_offsets: Tensor, k_offsets: Tensor, *rest: Any) -> tuple[Any, ...]:
    """As `_arguments`, with the bias and the structure."""
    return *_arguments(q_offsets, k_offsets, *rest[NUM_FEATURES:]), *unpacked_features(rest[:NUM_FEATURES])
