"""`linear_compression` as operators of `torch.library` around a forward and a backward.

A backend plugs in through `compression_operator(name, forward, backward)`:

    forward(candidate, w_candidate, requests, w_requests, offsets) -> out
    backward(grad_out, candidate, w_candidate, requests, w_requests, offsets, needs)
        -> (d_request_0, d_w_request_0, ..., d_candidate, d_w_candidate), None where `needs` says that it is not needed

candidate [C, Kc, N], w_candidate [M, Kc] and, a list with an entry per level, outermost first, requests [R, Kr, N],
w_requests [M, Kr] and contiguous offsets [R + 1]. Any strides, one dtype. Results are written everywhere: rows without
rows below them get zero gradients. `gradients_with` makes a backward of two products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels.core.operator import Operator, custom_op
from kernels.jagged import segment_sum

MAX_LEVELS = 3

Gradients = list[Tensor | None]


def gradients_with(
    product: Callable[[Tensor, Tensor], Tensor], weight_gradient: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Gradients]:
    """A backward made of product(weight [M, K], x [B, K, N]) and weight_gradient(grad [B, M, N], x [B, K, N])."""

    def backward(
        grad: Tensor,
        candidate: Tensor,
        w_candidate: Tensor,
        requests: Sequence[Tensor],
        w_requests: Sequence[Tensor],
        offsets: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Gradients:
        xs, weights = [*requests, candidate], [*w_requests, w_candidate]
        gradients: Gradients = [None] * (2 * len(xs))
        for level in reversed(range(len(xs))):
            place = 2 * level
            if needs[place]:
                gradients[place] = product(weights[level].mT, grad)
            if needs[place + 1]:
                gradients[place + 1] = weight_gradient(grad, xs[level])
            if not any(needs[:place]):
                break
            grad = segment_sum(grad.contiguous(), offsets[level - 1])
        return gradients

    return backward


def compression_operator(
    name: str, forward: Callable[..., Tensor], backward: Callable[..., Gradients]
) -> Callable[..., Tensor]:
    """A function with the signature of the reference, for `dispatch.Backend`, made of the two functions."""
    # The number of arguments of an operator is fixed, so there is an operator for each number of levels.
    operators = [_operator(f"lce_{name}_{levels}", levels, forward, backward) for levels in range(MAX_LEVELS + 1)]

    def call(
        candidate: Tensor,
        w_candidate: Tensor,
        requests: Sequence[Tensor],
        w_requests: Sequence[Tensor],
        offsets: Sequence[Tensor],
    ) -> Tensor:
        levels = [tensor for level in zip(requests, w_requests, offsets, strict=True) for tensor in level]
        return operators[len(requests)](*levels, candidate, w_candidate)

    return call


def _operator(name: str, levels: int, forward: Callable[..., Tensor], backward: Callable[..., Gradients]) -> Operator:
    """The operator of (user_0, w_user_0, offsets_0, user_1, ..., candidate, w_candidate): saved programs hold these."""
    names = [f"{kind}_{level}" for level in range(levels) for kind in ("user", "w_user", "offsets")]
    arguments = ", ".join(f"Tensor {name}" for name in (*names, "candidate", "w_candidate"))

    @custom_op(f"gemsmith::{name}", schema=f"({arguments}) -> Tensor")
    def compress(*operands: Tensor) -> Tensor:
        return forward(*_by_kind(operands))

    @compress.register_fake
    def _(*operands: Tensor) -> Tensor:
        candidate, w_candidate = operands[-2:]
        return candidate.new_empty(candidate.shape[0], w_candidate.shape[0], candidate.shape[2])

    results = ", ".join(["Tensor"] * (2 + 2 * levels))

    # An operator must return tensors: an empty one replaces a gradient that is not needed.
    @custom_op(f"gemsmith::{name}_backward", schema=f"(bool[] needs, Tensor grad, {arguments}) -> ({results})")
    def compress_backward(needs: Sequence[bool], grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        gradients = backward(grad, *_by_kind(operands), needs)
        return tuple(grad.new_empty(0) if gradient is None else gradient for gradient in gradients)

    @compress_backward.register_fake
    def _(needs: Sequence[bool], grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        floating = _without_offsets(operands)
        return tuple(x.new_empty(x.shape if needed else 0) for x, needed in zip(floating, needs, strict=True))

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        made = iter(compress_backward(_without_offsets(needs), grad, *ctx.saved_tensors))
        gradients = [None if _is_offsets(place) else next(made) for place in range(len(needs))]
        return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True))

    compress.register_autograd(differentiate, setup_context=save)

    # Without this, `FlopCounterMode` would count nothing for the operator.
    @register_flop_formula(compress.definition.overloadpacket)
    def count(*shapes: Sequence[int], **_: Any) -> int:
        return 2 * shapes[-1][0] * sum(math.prod(x) for x in shapes[0::3])

    @register_flop_formula(compress_backward.definition.overloadpacket)
    def _(needs: Sequence[bool], grad: Sequence[int], *shapes: Sequence[int], **_: Any) -> int:
        sizes = [math.prod(x) for x in _without_offsets(shapes)[0::2] for _ in range(2)]
        return 2 * shapes[-1][0] * sum(size for size, needed in zip(sizes, needs, strict=True) if needed)

    return compress


def _is_offsets(place: int) -> bool:
    """Whether the operator's argument at this place is offsets."""
    return place % 3 == 2


def _without_offsets(arguments: Sequence[Any]) -> list[Any]:
    return [argument for place, argument in enumerate(arguments) if not _is_offsets(place)]


def _by_kind(operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """(candidate, w_candidate, requests, w_requests, offsets) of the operator's arguments."""
    *requests, candidate = operands[0::3]
    *w_requests, w_candidate = operands[1::3]
    # Backends read consecutive offsets, but an argument may be a view of every k-th one.
    return candidate, w_candidate, requests, w_requests, [x.contiguous() for x in operands[2::3]]
