"""`jagged_attention` as a `torch.library` operator around a forward and a backward kernel, and the Triton backend.

A backend plugs in through `attention_operator(name, forward, backward)`, which makes an operator that `torch.compile`
and `opcheck` see through. It saves q, k, v, out and lse, so that memory is linear in the number of values.

    forward(q, k, v, q_offsets, k_offsets, max_q, max_k, scale, causal, window) -> (out, lse)
    backward(grad_out, q, k, v, out, lse, q_offsets, k_offsets, max_q, max_k, scale, causal, window) -> (dq, dk, dv)

Shapes are those of `kernels.attention.jagged_attention`; out is contiguous, `window` is (left, right) with -1 for no
limit, and lse [H, Nq] float32 is the natural logarithm of sum over seen keys of exp(scale q k + bias), +inf for a query
that sees none. q, k and v have one dtype and any strides, grad_out too. A backend that serves block-local attention or
biases also takes `block_size` and `bias`. If there is a bias, it returns the gradients of the two tables after dv, an
empty tensor for a table that is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.bias import Bias
from kernels.attention.gradients import contiguous_gradients
from kernels.core.operator import custom_op

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, "
_TABLES = "Tensor? position, Tensor? time, Tensor? q_times, Tensor? k_times, float bucket_width, "
_SIZES = "SymInt max_q, SymInt max_k, float scale, bool causal, SymInt left, SymInt right"


def attention_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    features: bool = True,
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = contiguous_gradients,
) -> Callable[..., Tensor]:
    """A function with the signature of the reference, for `dispatch.Backend`, made of the two kernels above.

    Without `features` it takes neither `block_size` nor `bias`, which saves the host a third of the arguments.
    `gradients` makes the tensors that the backward kernel writes to.
    """
    schema = f"{_TENSORS}{_TABLES}{_SIZES}, SymInt? block_size" if features else _TENSORS + _SIZES
    results = ", ".join(["Tensor"] * (5 if features else 3))
    saved = 9 if features else 5
    arguments = _featured if features else _plain

    @custom_op(f"gemsmith::jagged_attention_{name}", schema=f"({schema}) -> (Tensor, Tensor)")
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        positional, named = arguments(*rest)
        return forward(q, k, v, *positional, **named)

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        total_q, num_heads = q.shape[:2]
        return q.new_empty(total_q, num_heads, v.shape[2]), q.new_empty(num_heads, total_q, dtype=torch.float32)

    @custom_op(
        f"gemsmith::jagged_attention_{name}_backward",
        schema=f"(Tensor grad, Tensor out, Tensor lse, {schema}) -> ({results})",
    )
    def attend_backward(
        grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        positional, named = arguments(*rest)
        own = backward(grad, q, k, v, out, lse, *positional, **named)
        return (*own, lse.new_empty(0), lse.new_empty(0)) if features and len(own) == 3 else own

    @attend_backward.register_fake
    def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        tables = rest[2:4] if features else ()
        of_tables = (lse.new_empty(0) if table is None else lse.new_empty(table.shape) for table in tables)
        return *gradients(q, k, v), *of_tables

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.constants = inputs[saved:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # lse has no gradient: zeros would be made for nothing
        ctx.save_for_backward(*inputs[:saved], *output)

    def differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (saved + len(ctx.constants))
        *inputs, out, lse = ctx.saved_tensors
        dq, dk, dv, *tables = attend_backward(grad, out, lse, *inputs, *ctx.constants)
        of_tables = [table if inputs[place] is not None else None for place, table in enumerate(tables, 5)]
        others = saved + len(ctx.constants) - 5 - len(tables)
        return dq, dk, dv, None, None, *of_tables, *(None,) * others

    attend.register_autograd(differentiate, setup_context=save)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor,
        k_offsets: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        block_size: int | None = None,
        bias: Bias | None = None,
    ) -> Tensor:
        sizes = (max_q, max_k, scale, causal, *window)
        if not features:
            return attend(q, k, v, q_offsets, k_offsets, *sizes)[0]
        return attend(q, k, v, q_offsets, k_offsets, *(bias or Bias()), *sizes, block_size)[0]

    return call


def _plain(
    q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, scale: float, causal: bool, left: int, right: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments of a kernel after v, and those of features that are in use."""
    # Kernels read consecutive offsets, but an argument may be a view of every k-th one.
    offsets = q_offsets.contiguous(), k_offsets.contiguous()
    return (*offsets, max_q, max_k, scale, causal, (left, right)), {}


def _featured(
    q_offsets: Tensor,
    k_offsets: Tensor,
    position: Tensor | None,
    time: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bucket_width: float,
    *rest: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `_plain`."""
    *sizes, block_size = rest
    positional, named = _plain(q_offsets, k_offsets, *sizes)
    if block_size is not None:
        named["block_size"] = block_size
    if position is not None or time is not None:
        named["bias"] = Bias(position, time, q_times, k_times, bucket_width)
    return positional, named
