"""The fused projection to q, k and v, of which q and k leave the product rotated."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from kernels.core.hopper import addressable
from kernels.core.operator import intercepted, on_its_device
from kernels.tokens.hopper.rotated_product import rotated_product
from kernels.tokens.triton import rotary_operator


@on_its_device
def _forward(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, head: int) -> Tensor:
    places = None if positions is None else positions.contiguous()
    return rotated_product(addressable(x), addressable(weight), cos.contiguous(), sin.contiguous(), places, head)


class _ProjectQKV(Function):
    """Not an operator of torch.library: compilers and transforms get what it is made of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        heads: int,
        twice: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, cos, sin, positions)
        head = weight.shape[0] // (3 * heads)
        projected = _forward(x, weight, cos, sin, positions, head).view(x.shape[0], 3, heads, head)
        return *projected.unbind(1), *(projected.unbind(1)[1:] if twice else ())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *angles = ctx.saved_tensors
        gradient = rotary_operator.turned_back(gradients, *angles).flatten(1)
        dx = gradient @ weight if ctx.needs_input_grad[0] else None
        return dx, gradient.mT @ x if ctx.needs_input_grad[1] else None, None, None, None, None, None


def project_qkv(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, heads: int, twice: bool
) -> tuple[Tensor, ...]:
    served = rotary_operator.project_qkv if intercepted((x, weight, cos, sin)) else _ProjectQKV.apply
    return served(x, weight, cos, sin, positions, heads, twice)
