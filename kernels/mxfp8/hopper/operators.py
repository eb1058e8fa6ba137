"""Grouped products by the Hopper kernels, as backends: of bfloat16 operands, and of quantised ones in both recipes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.operator import custom_op
from kernels.mxfp8.grouped import Quantized, Rounded, addressable, addressable_operands, swaps
from kernels.mxfp8.hopper import dequantize
from kernels.mxfp8.hopper.grouped import bf16, fp8, strict


def _matrices(weight: Tensor) -> Tensor:
    """weight [E, N, K] with either of the last dimensions contiguous."""
    return addressable(weight.mT).mT if weight.stride(1) == 1 else addressable(weight)


@custom_op("gemsmith::grouped_mm")
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_zeros(x.shape[0], weight.shape[1])
    return bf16.grouped_mm(addressable(x), _matrices(weight), ends.contiguous())


@_grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_mm(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    dx = dw = None
    dy = dy.contiguous()  # the gradient of a sum is one element with strides of 0
    if ctx.needs_input_grad[0]:
        dx = _grouped_mm(dy, weight.mT, ends)
    if ctx.needs_input_grad[1]:
        dw = _weight_gradient(x, weight)(dy, x.contiguous(), ends)
    return dx, dw, None


def _weight_gradient(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The backend for groups of any size."""
    facts = {"in_features": weight.shape[2], "out_features": weight.shape[1]}
    return dispatch.choose("grouped_wgrad", None, x, **facts, multiple=1)


_grouped_mm.register_autograd(_differentiate_mm, setup_context=_save)


@custom_op("gemsmith::grouped_wgrad")
def _grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0 or ends.shape[0] == 0:
        return x.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    return bf16.grouped_wgrad(addressable(dy), addressable(x), ends.contiguous(), x.dtype)


@_grouped_wgrad.register_fake
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


def _differentiate_wgrad(ctx, dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    dy, x, ends = ctx.saved_tensors
    needs_dy, needs_x, _ = ctx.needs_input_grad
    return _grouped_mm(x, dw, ends) if needs_dy else None, _grouped_mm(dy, dw.mT, ends) if needs_x else None, None


_grouped_wgrad.register_autograd(_differentiate_wgrad, setup_context=_save)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if weight.requires_grad and torch.is_grad_enabled():
        # A backend that is asked for by name and cannot serve is an error here, and not in the backward.
        _weight_gradient(x, weight)
    return _grouped_mm(x, weight, offsets)


def grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return _grouped_wgrad(dy, x, offsets)


def _rounded(operand: Quantized | Rounded) -> Tensor:
    if isinstance(operand, Rounded):
        return operand.values
    return dequantize.dequantize_interleaved(*addressable_operands(operand))


def fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    if a.codes.shape[0] == 0 or b.codes.shape[0] == 0:
        return a.codes.new_empty(a.codes.shape[0], b.codes.shape[1], dtype=torch.bfloat16)
    return fp8.grouped_mm(*addressable_operands(a, b), ends.contiguous(), b.differ)


def wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if dy.codes.numel() == 0 or ends.shape[0] == 0:
        return dy.codes.new_zeros(ends.shape[0], dy.lines, x.codes.shape[0], dtype=dtype)
    written = dtype if dtype is torch.bfloat16 else torch.float32
    dw = fp8.grouped_wgrad(*addressable_operands(dy, x), ends.contiguous(), written, paired=dy.paired)
    return dw.to(dtype)


def strict_fprop(a: Quantized, b: Quantized | Rounded, ends: Tensor) -> Tensor:
    if a.codes.shape[0] == 0 or b[0].shape[0] == 0:
        return a.codes.new_empty(a.codes.shape[0], b[0].shape[1], dtype=torch.bfloat16)
    matrices, scales = (b.values, None) if isinstance(b, Rounded) else addressable_operands(b)
    return strict.grouped_mm(*addressable_operands(a), matrices, ends.contiguous(), scales)


def strict_wgrad(dy: Quantized, x: Quantized | Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if dy.codes.numel() == 0 or ends.shape[0] == 0:
        return dy.codes.new_zeros(ends.shape[0], dy.lines, x.lines, dtype=dtype)
    written = dtype if dtype is torch.bfloat16 else torch.float32
    ends = ends.contiguous()
    # One operand is dequantised beforehand, and pairs are not.
    if isinstance(x, Quantized) and not dy.paired and swaps(dy.group, dy.lines, x.lines):
        dw = strict.grouped_wgrad(*addressable_operands(x), _rounded(dy), ends, written, transposed=True)
    else:
        dw = strict.grouped_wgrad(*addressable_operands(dy), _rounded(x), ends, written, paired=dy.paired)
    return dw.to(dtype)
