"""`jagged_attention` as a `torch.library` operator around a forward and a backward kernel, and the Triton backend.

A backend plugs in through `attention_operator(name, forward, backward)`, which makes an operator that `torch.compile`
and `opcheck` see through. It saves q, k, v, out and lse, so that memory is linear in the number of values.

    forward(q, k, v, queries, keys, scale, mask) -> (out, lse)
    backward(grad_out, q, k, v, out, lse, queries, keys, scale, mask) -> (dq, dk, dv)

Shapes are those of `kernels.attention.jagged_attention`; `queries` and `keys` are `Rows` and `mask` is a `Mask`, which
an operator of PyTorch takes apart, since it takes only tensors and numbers. out is contiguous, and lse [H, Nq] float32
is the natural logarithm of sum over seen keys of exp(scale q k + bias), +inf for a query that sees none. q, k and v
have one dtype and any strides, grad_out too. A backend with features also takes `bias` and `structure`, each None for
none. If there is a bias, it returns the gradients of the two tables after dv, an empty tensor for a table that is None.

Sinks and gradients of lse need nothing of kernels. With s a score and dp = grad_out v,

    out = sum p v,    ds = p (dp - grad_out out + dlse),    p = exp(s - lse)

hold with sinks in lse as without, and a sink is a score whose v is zero. Without dlse that is what the backward kernel
computes from such an out and lse; dlse it computes in a second call, as dp of values of one beside an out of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.attention.bias import Bias
from kernels.attention.gradients import contiguous_gradients
from kernels.attention.structure import (
    FEATURES,
    NUM_FEATURES,
    NUM_TENSORS,
    Structure,
    packed_features,
    unpacked_features,
)
from kernels.core.mask import Mask
from kernels.core.operator import custom_op
from kernels.core.rows import Rows

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, "
_SIZES = "SymInt max_q, SymInt max_k, float scale, bool causal, SymInt left, SymInt right"


def attention_operator(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    *,
    features: bool = True,
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = contiguous_gradients,
) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """A function with the signature of the reference, for `dispatch.Backend`, made of the two kernels above.

    Without `features` it has neither blocks nor bias nor structure, which saves the host a third of the arguments.
    `gradients` makes the tensors that the backward kernel writes to.
    """
    schema = f"{_TENSORS}{FEATURES}{_SIZES}, SymInt? block_size" if features else _TENSORS + _SIZES
    results = ", ".join(["Tensor"] * (5 if features else 3))
    saved = NUM_TENSORS if features else 5
    of_kernels = schema.count(",") + 1  # arguments; sinks follow, which PyTorch leaves out where they are the default
    arguments = _with_features if features else _packed

    @custom_op(f"gemsmith::jagged_attention_{name}", schema=f"({schema}, Tensor? sinks=None) -> (Tensor, Tensor)")
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, *arguments(*rest[: of_kernels - 3]))
        if (sinks := (*rest, None)[of_kernels - 3]) is None:
            return out, lse
        sinks = sinks[:, None]
        return out.mul_((lse - sinks).sigmoid().t()[:, :, None]), lse.logaddexp(sinks)

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
        own = backward(grad, q, k, v, out, lse, *arguments(*rest))
        return (*own, lse.new_empty(0), lse.new_empty(0)) if features and len(own) == 3 else own

    @attend_backward.register_fake
    def _(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        tables = rest[2:4] if features else ()
        of_tables = (lse.new_empty(0) if table is None else lse.new_empty(table.shape) for table in tables)
        return *gradients(q, k, v), *of_tables

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.constants = inputs[saved:of_kernels]
        sinks = (*inputs, None)[of_kernels]
        ctx.set_materialize_grads(False)  # mostly lse has no gradient: zeros would be made for nothing
        ctx.save_for_backward(*inputs[:saved], sinks, *output)

    def differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, sinks, out, lse = ctx.saved_tensors
        of_inputs: tuple[Tensor | None, ...] = (None,) * 3
        if grad is not None:
            of_inputs = attend_backward(grad, out, lse, *inputs, *ctx.constants)
        if grad_lse is not None:
            q, k, v, *others = inputs
            weights, ones = _as_values(grad_lse, v)
            more = attend_backward(weights, torch.zeros_like(out), lse, q, k, ones, *others, *ctx.constants)
            more = (*more[:2], None, *more[3:])
            of_inputs = more if grad is None else tuple(map(_sum, of_inputs, more))
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[-1] and (grad is not None or grad_lse is not None):
            of_lse = 0 if grad_lse is None else grad_lse
            delta = 0 if grad is None else (grad * out).sum(-1, dtype=lse.dtype).t()
            of_sinks = ((sinks[:, None] - lse).exp() * (of_lse - delta)).sum(1)
        dq, dk, dv, *tables = of_inputs
        of_tables = [table if inputs[place] is not None else None for place, table in enumerate(tables, 5)]
        others = saved + len(ctx.constants) - 5 - len(tables)
        return dq, dk, dv, None, None, *of_tables, *(None,) * others, of_sinks

    attend.register_autograd(differentiate, setup_context=save)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Rows,
        keys: Rows,
        scale: float,
        mask: Mask,
        bias: Bias | None = None,
        structure: Structure | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        (q_offsets, max_q), (k_offsets, max_k) = queries, keys
        sizes = (max_q, max_k, scale, *mask) if features else (max_q, max_k, scale, *mask[:3])
        own = packed_features(bias, structure) if features else ()
        out, lse = attend(q, k, v, q_offsets, k_offsets, *own, *sizes, sinks)
        if not return_lse:
            return out
        return out, torch.where(lse == math.inf, -math.inf if sinks is None else sinks[:, None], lse)

    return call


def _as_values(grad_lse: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(grad_out, values): their products are grad_lse, whatever the key. Half precision takes it in two parts."""
    exact, padding = grad_lse.t(), (0, v.shape[2] - 2)  # of -1 features where one must do
    first = exact.to(v.dtype)
    weights = torch.stack([first, (exact - first).to(v.dtype)], 2)
    return pad(weights, padding), pad(v.new_ones(*v.shape[:2], 2), padding)


def _sum(gradient: Tensor, other: Tensor | None) -> Tensor:
    """In place, since gradients may be parts of one tensor, as `gradients` lays them out."""
    return gradient if other is None else gradient.add_(other)


def _packed(
    q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, scale: float, *mask: Any
) -> tuple[Rows, Rows, float, Mask]:
    """The arguments of a kernel after v."""
    # Kernels read consecutive offsets, but an argument may be a view of every k-th one.
    return Rows(q_offsets.contiguous(), max_q), Rows(k_offsets.contiguous(), max_k), scale, Mask(*mask)


def _with_features(q_offsets: Tensor, k_offsets: Tensor, *rest: Any) -> tuple[Any, ...]:
    """As `_packed`, with the bias and the structure."""
    return *_packed(q_offsets, k_offsets, *rest[NUM_FEATURES:]), *unpacked_features(rest[:NUM_FEATURES])
