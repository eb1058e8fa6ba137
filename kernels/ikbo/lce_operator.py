"""`linear_compression` as operators of `torch.library` around a forward and a backward.

`compression_operator(name, forward, backward)` is where a backend plugs in:

    forward(candidate, w_candidate, users, w_users, offsets) -> out
    backward(grad_out, candidate, w_candidate, users, w_users, offsets)
        -> (d_candidate, d_w_candidate, d_users, d_w_users)

candidate [C, Kc, N], w_candidate [M, Kc] and, a list with an entry per level from the one right above the candidates
upwards, users [R, Ku, N], w_users [M, Ku] and contiguous offsets [R + 1]. Any strides, one dtype. Results are written
everywhere: rows that nothing belongs to get zero gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.custom_op import Operator, custom_op

MAX_LEVELS = 3

Gradients = tuple[Tensor, Tensor, list[Tensor], list[Tensor]]


def compression_operator(
    name: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]
) -> Callable[..., Tensor]:
    """A function with the signature of the reference, for `dispatch.register`, made of the two functions."""
    # The number of arguments of an operator is fixed, so each number of levels has one of its own.
    operators = [_operator(f"lce_{name}_{levels}", levels, forward, backward) for levels in range(MAX_LEVELS + 1)]

    def call(
        candidate: Tensor,
        w_candidate: Tensor,
        users: Sequence[Tensor],
        w_users: Sequence[Tensor],
        offsets: Sequence[Tensor],
    ) -> Tensor:
        levels = [tensor for level in zip(users, w_users, offsets, strict=True) for tensor in level]
        return operators[len(users)](candidate, w_candidate, *levels)

    return call


def _operator(name: str, levels: int, forward: Callable[..., Tensor], backward: Callable[..., Gradients]) -> Operator:
    """The operator of (candidate, w_candidate, user_0, w_user_0, offsets_0, user_1, ...)."""
    arguments = "Tensor candidate, Tensor w_candidate" + "".join(
        f", Tensor user_{level}, Tensor w_user_{level}, Tensor offsets_{level}" for level in range(levels)
    )

    @custom_op(f"gemsmith::{name}", schema=f"({arguments}) -> Tensor")
    def compress(candidate: Tensor, w_candidate: Tensor, *rest: Tensor) -> Tensor:
        return forward(candidate, w_candidate, *_by_kind(rest))

    @compress.register_fake
    def _(candidate: Tensor, w_candidate: Tensor, *rest: Tensor) -> Tensor:
        return candidate.new_empty(candidate.shape[0], w_candidate.shape[0], candidate.shape[2])

    results = ", ".join(["Tensor"] * (2 + 2 * levels))

    @custom_op(f"gemsmith::{name}_backward", schema=f"(Tensor grad, {arguments}) -> ({results})")
    def compress_backward(grad: Tensor, candidate: Tensor, w_candidate: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        d_candidate, d_weight, d_users, d_weights = backward(grad, candidate, w_candidate, *_by_kind(rest))
        return d_candidate, d_weight, *(d for pair in zip(d_users, d_weights, strict=True) for d in pair)

    @compress_backward.register_fake
    def _(grad: Tensor, candidate: Tensor, w_candidate: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        floating = [x for i, x in enumerate(rest) if i % 3 < 2]
        return tuple(x.new_empty(x.shape) for x in (candidate, w_candidate, *floating))

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_candidate, d_weight, *rest = compress_backward(grad, *ctx.saved_tensors)
        gradients: list[Tensor | None] = [d_candidate, d_weight]
        for level in range(levels):
            gradients += [*rest[2 * level : 2 * level + 2], None]
        return tuple(gradients)

    compress.register_autograd(differentiate, setup_context=save)

    # `FlopCounterMode` takes operators that it cannot see into for free.
    @register_flop_formula(compress.definition.overloadpacket)
    def count(candidate: Sequence[int], w_candidate: Sequence[int], *rest: Sequence[int], **_: Any) -> int:
        return 2 * w_candidate[0] * sum(math.prod(x) for x in (candidate, *rest[0::3]))

    @register_flop_formula(compress_backward.definition.overloadpacket)
    def _(grad: Sequence[int], *shapes: Sequence[int], **_: Any) -> int:
        return 2 * count(*shapes)

    return compress


def _by_kind(rest: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(users, w_users, offsets) of the arguments behind w_candidate."""
    # Backends read neighbouring offsets; a view of every k-th one is as good an argument.
    return list(rest[0::3]), list(rest[1::3]), [x.contiguous() for x in rest[2::3]]
