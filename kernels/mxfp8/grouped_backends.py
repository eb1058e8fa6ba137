"""Registers the GPU kernels of the grouped products, which are imported when the first of them is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.operator import custom_op
from kernels.mxfp8.grouped import Quantized, Rounded, column_codes, row_codes, swaps


def _supports(
    *, device: str, capability: Hashable, dtype: torch.dtype, in_features: int, out_features: int, multiple: int = 64
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, torch.bfloat16):
        return reason
    if in_features % 64 or out_features % 64:
        return f"needs features in multiples of 64, got {in_features} and {out_features}"
    if multiple % 64:
        return f"sums over 64 rows of a group at a time, the groups are only known as multiples of {multiple}"
    return None


def _supports_quantized(target: tuple[int, int], groups: tuple[int, ...]) -> dispatch.Verifier:
    """The verifier of a kernel for `target` and scales over one of `groups` elements."""

    def supports(
        *, device: str, capability: Hashable, dtype: torch.dtype, group: int, in_features: int, out_features: int
    ) -> str | None:
        if reason := dispatch.needs_triton(device, capability, target):
            return reason
        if group not in groups:
            return f"takes scales over {groups[0]} elements, not over {group}"
        if in_features % 128 or out_features % 128:
            return f"needs features in multiples of 128, got {in_features} and {out_features}"
        return None

    return supports


def _addressable(x: Tensor) -> Tensor:
    """x as TMA can address it: contiguous, on a boundary of 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _matrices(weight: Tensor) -> Tensor:
    """weight [E, N, K] with either of the last dimensions contiguous."""
    return _addressable(weight.mT).mT if weight.stride(1) == 1 else _addressable(weight)


@custom_op("gemsmith::grouped_mm")
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_zeros(x.shape[0], weight.shape[1])
    from kernels.mxfp8.hopper import grouped_bf16

    return grouped_bf16.grouped_mm(_addressable(x), _matrices(weight), ends.contiguous())


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
    from kernels.mxfp8.hopper import grouped_bf16

    return grouped_bf16.grouped_wgrad(_addressable(dy), _addressable(x), ends.contiguous(), x.dtype)


@_grouped_wgrad.register_fake
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


def _differentiate_wgrad(ctx, dw: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    dy, x, ends = ctx.saved_tensors
    needs_dy, needs_x, _ = ctx.needs_input_grad
    return _grouped_mm(x, dw, ends) if needs_dy else None, _grouped_mm(dy, dw.mT, ends) if needs_x else None, None


_grouped_wgrad.register_autograd(_differentiate_wgrad, setup_context=_save)


@dispatch.register("grouped_mm", "gluon", supports=_supports, priority=20)
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if weight.requires_grad and torch.is_grad_enabled():
        # A backend that is asked for by name and cannot serve is an error here, and not in the backward.
        _weight_gradient(x, weight)
    return _grouped_mm(x, weight, offsets)


@dispatch.register("grouped_wgrad", "gluon", supports=_supports, priority=20)
def grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return _grouped_wgrad(dy, x, offsets)


def _operands(*operands: Quantized) -> tuple[Tensor, ...]:
    """Codes and scales of each operand, as kernels can address them."""
    return tuple(_addressable(tensor) for operand in operands for tensor in operand[:2])


def _rounded(operand: Quantized | Rounded) -> Tensor:
    if isinstance(operand, Rounded):
        return operand.values
    from kernels.mxfp8.hopper import dequantize

    return dequantize.dequantize_interleaved(*_operands(operand))


_g128 = _supports_quantized((9, 0), (128,))
_strict = _supports_quantized((9, 0), (32,))
_blackwell = _supports_quantized((10, 0), (32, 128))


@dispatch.register("mxfp8_grouped_fprop", "gluon", supports=_g128, priority=20)
def fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    if a.codes.shape[0] == 0 or b.codes.shape[0] == 0:
        return a.codes.new_empty(a.codes.shape[0], b.codes.shape[1], dtype=torch.bfloat16)
    from kernels.mxfp8.hopper import grouped_fp8

    return grouped_fp8.grouped_mm(*_operands(a, b), ends.contiguous(), paired=a.paired, differ=b.differ)


@dispatch.register("mxfp8_grouped_wgrad", "gluon", supports=_g128, priority=20)
def wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if dy.codes.numel() == 0 or ends.shape[0] == 0:
        return dy.codes.new_zeros(ends.shape[0], dy.lines, x.codes.shape[0], dtype=dtype)
    from kernels.mxfp8.hopper import grouped_fp8

    written = dtype if dtype is torch.bfloat16 else torch.float32
    dw = grouped_fp8.grouped_wgrad(*_operands(dy, x), ends.contiguous(), written, paired=dy.paired)
    return dw.to(dtype)


@dispatch.register("mxfp8_grouped_fprop", "gluon_strict", supports=_strict, priority=10)
def strict_fprop(a: Quantized, b: Quantized | Rounded, ends: Tensor) -> Tensor:
    if a.codes.shape[0] == 0 or b[0].shape[0] == 0:
        return a.codes.new_empty(a.codes.shape[0], b[0].shape[1], dtype=torch.bfloat16)
    from kernels.mxfp8.hopper import grouped_strict

    matrices, scales = (b.values, None) if isinstance(b, Rounded) else _operands(b)
    return grouped_strict.grouped_mm(*_operands(a), matrices, ends.contiguous(), paired=a.paired, b_scales=scales)


@dispatch.register("mxfp8_grouped_wgrad", "gluon_strict", supports=_strict, priority=10)
def strict_wgrad(dy: Quantized, x: Quantized | Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if dy.codes.numel() == 0 or ends.shape[0] == 0:
        return dy.codes.new_zeros(ends.shape[0], dy.lines, x.lines, dtype=dtype)
    from kernels.mxfp8.hopper import grouped_strict

    written = dtype if dtype is torch.bfloat16 else torch.float32
    ends = ends.contiguous()
    # One operand is dequantised beforehand, and pairs are not.
    if isinstance(x, Quantized) and not dy.paired and swaps(dy.group, dy.lines, x.lines):
        dw = grouped_strict.grouped_wgrad(*_operands(x), _rounded(dy), ends, written, transposed=True)
    else:
        dw = grouped_strict.grouped_wgrad(*_operands(dy), _rounded(x), ends, written, paired=dy.paired)
    return dw.to(dtype)


@dispatch.register("mxfp8_grouped_fprop", "triton", supports=_blackwell, priority=-3)
def blackwell_fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    """Compiled for sm_100, not run."""
    from kernels.mxfp8.blackwell import grouped as triton_grouped_blackwell

    return triton_grouped_blackwell.grouped_mm(*_operands(row_codes(a), b), ends.contiguous())


@dispatch.register("mxfp8_grouped_wgrad", "triton", supports=_blackwell, priority=-3)
def blackwell_wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Compiled for sm_100, not run."""
    from kernels.mxfp8.blackwell import grouped as triton_grouped_blackwell

    return triton_grouped_blackwell.grouped_wgrad(*_operands(column_codes(dy), x), ends.contiguous(), dtype)
