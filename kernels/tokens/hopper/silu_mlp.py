"""Two linear layers with SiLU between them: the activation and its gradient are made with the products before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.core.hopper import addressable
from kernels.core.operator import intercepted, on_its_device
from kernels.tokens.hopper.silu_products import gradient_of_silu, product_and_silu
from kernels.tokens.triton import activation
from kernels.tokens.triton.bias import column_sum


@on_its_device
def _forward(x: Tensor, inner: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return product_and_silu(x, addressable(inner), bias.contiguous())


@on_its_device
def _backward(grad: Tensor, outer: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return gradient_of_silu(addressable(grad), addressable(outer), z)


class _SiluMLP(torch.autograd.Function):
    """Not an operator of torch.library: compilers and transforms get what it is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor | None) -> Tensor:
        z, y = _forward(x, inner, bias)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, inner, outer, z, y)
        del z
        ctx.biases = bias.dtype, None if outer_bias is None else outer_bias.dtype
        return F.linear(y, outer, outer_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, outer, z, y = ctx.saved_tensors
        needs_x, needs_inner, needs_bias, needs_outer, needs_outer_bias = ctx.needs_input_grad
        dx = d_inner = d_bias = None
        if needs_x or needs_inner or needs_bias:
            dz, sums = _backward(grad, outer, z)
            dx = dz @ inner if needs_x else None
            d_inner = dz.mT @ x if needs_inner else None
            d_bias = sums.to(ctx.biases[0]) if needs_bias else None
        d_outer = grad.mT @ y if needs_outer else None
        # Rounded as PyTorch's is where autocast casts the bias.
        d_outer_bias = column_sum(grad, grad.dtype).to(ctx.biases[1]) if needs_outer_bias else None
        return dx, d_inner, d_bias, d_outer, d_outer_bias


def silu_mlp(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor | None) -> Tensor:
    if intercepted((x, inner, bias, outer)):
        return activation.silu_mlp(x, inner, bias, outer, outer_bias)
    rows = addressable(x.reshape(-1, x.shape[-1]))
    out = _SiluMLP.apply(rows, inner, bias, outer, outer_bias)
    return out.view(*x.shape[:-1], outer.shape[0])
