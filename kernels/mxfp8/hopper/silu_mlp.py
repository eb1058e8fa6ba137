"""Two linear layers with SiLU between them on FP8 tensor cores: what stands around a quantisation is part of it.

    forward                                        backward, of the gradient g of the result
    x quantised along D and along M                dp = g f quantised along E and along M, dc and df in the same pass
    p = x V^T                                      dW = dp^T y
    y = silu(p + b) quantised along F and M        dz = dp W silu'(p + b) quantised along F and along M, db likewise
    q = y W^T                                      dV = dz^T x
    (q + c) f                                      dx = dz V

y, dp and dz are never written in bfloat16. Kept for the backward is what two layers and `tokens.activate` keep: the
codes of x and y along M, those of the weights, p, and if there is a factor, it and q. Each is freed where it was read
last, as that of single operators would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.core.operator import intercepted, on_its_device
from kernels.mxfp8 import matmul, mlp
from kernels.mxfp8.grouped import BYTES, VALUES, Quantized, addressable, fprop, wgrad
from kernels.mxfp8.hopper.linear import GROUP, one_group, quantized, quantized_weight
from kernels.mxfp8.hopper.quantize.activation import (
    factor_gradient_quantized,
    silu_gradient_quantized,
    silu_quantized,
)
from kernels.tokens import activate
from kernels.tokens.triton.bias import column_sum

Kept = list[Any]  # tensors, and None for what is not needed


def _tensors(operand: Quantized, needed: bool) -> Kept:
    return [operand.codes, operand.scales, operand.differ] if needed else [None] * 3


def _operands(tensors: Sequence[Any]) -> list[Quantized]:
    codes, scales, differ = tensors[::3], tensors[1::3], tensors[2::3]
    return [Quantized(c, s, GROUP, differ=d) for c, s, d in zip(codes, scales, differ, strict=True)]


@on_its_device
def _forward(
    x: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    factor: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Kept]:
    """(the result [M, E] bfloat16, what `_backward` needs for the gradients that are needed)."""
    needs_x, needs_inner, needs_bias, needs_outer, *_ = needs
    needs_hidden = needs_x or needs_inner or needs_bias
    num_rows = x.shape[0]
    rows, x_columns = quantized(x.bfloat16(), True, needs_inner, VALUES)
    ends = one_group(rows.codes.shape[0], x.device)
    matrix, inner_t = quantized_weight(inner, needs_x)
    z = fprop(rows, matrix, ends)[:num_rows]
    del rows, matrix
    rows, y_columns = silu_quantized(z, bias, needs_outer)
    kept: Kept = [z, bias] if needs_hidden else [None, None]
    del z
    matrix, outer_t = quantized_weight(outer, needs_hidden)
    product = fprop(rows, matrix, ends)[:num_rows]
    del rows, matrix
    kept += [None, None, None] if factor is None else [product, outer_bias, factor]
    operands = (x_columns, needs_inner), (inner_t, needs_x), (y_columns, needs_outer), (outer_t, needs_hidden)
    kept += [tensor for each in operands for tensor in _tensors(*each)]
    return activate(product, outer_bias, "none", factor), kept


@on_its_device
def _backward(
    grad: Tensor, kept: Kept, needs: tuple[bool, ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, in `dtypes`. Takes the tensors out of `kept`, to free them on the way."""
    needs_x, needs_inner, needs_bias, needs_outer, needs_outer_bias, _ = needs
    needs_hidden = needs_x or needs_inner or needs_bias
    z, bias, product, outer_bias, factor, *operands = kept
    x_columns, inner_t, y_columns, outer_t = _operands(operands)
    kept.clear()
    operands.clear()
    num_rows = grad.shape[0]
    ends = one_group(-(-num_rows // GROUP) * GROUP, grad.device)
    dx: Tensor | None
    dx = d_inner = d_bias = d_outer = d_outer_bias = d_factor = None
    if factor is None:
        rows, columns = quantized(grad, needs_hidden, needs_outer, BYTES)
        if needs_outer_bias:
            d_outer_bias = column_sum(grad, torch.float32)
    else:
        rows, columns, d_outer_bias, d_factor = factor_gradient_quantized(
            addressable(grad), product, outer_bias, addressable(factor), needs_hidden, needs_outer
        )
    del product, factor
    if needs_outer:
        d_outer = wgrad(columns, y_columns, ends, dtypes[3])[0]
    del columns, y_columns
    if needs_hidden:
        d_hidden = fprop(rows, outer_t, ends)[:num_rows]
        del rows, outer_t
        rows, columns, d_bias = silu_gradient_quantized(d_hidden, z, bias, needs_x, needs_inner)
        del d_hidden, z
        d_inner = wgrad(columns, x_columns, ends, dtypes[1])[0] if needs_inner else None
        del columns, x_columns
        dx = fprop(rows, inner_t, ends)[:num_rows] if needs_x else None
    grads = dx, d_inner, d_bias, d_outer, d_outer_bias, d_factor
    return tuple([each.to(dtype) if needed else None for each, needed, dtype in zip(grads, needs, dtypes, strict=True)])


class _SiluMLP(torch.autograd.Function):
    """Not an operator of torch.library: compilers and transforms get what it is made of."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        out, kept = _forward(*inputs, ctx.needs_input_grad)
        ctx.save_for_backward(*kept)
        ctx.dtypes = tuple([None if each is None else each.dtype for each in inputs])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matmul.refuse_second_derivatives()
        kept = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        return _backward(grad, kept, ctx.needs_input_grad, ctx.dtypes)


def silu_mlp(
    x: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    factor: Tensor | None,
    out_dtype: torch.dtype,
    group: int,
) -> Tensor:
    """See `mlp.silu_mlp`; x [M, D] of any floating dtype, the factor and the result in bfloat16, groups of 128."""
    inputs = x, inner, bias, outer, outer_bias, factor
    if not x.shape[0] or intercepted(inputs):
        return mlp.silu_mlp(*inputs, out_dtype, group)
    if not torch.is_grad_enabled():
        return _forward(*inputs, (False,) * len(inputs))[0]
    return _SiluMLP.apply(*inputs)
