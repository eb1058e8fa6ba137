"""`mxfp8_grouped_mm` by products of codes: how block-scaled instructions get at the operands of a layer on sm_100.

Rows move to groups of whole multiples of 128, are quantised there with scales in TILES, and `mxfp8_grouped_fprop` and
`mxfp8_grouped_wgrad` multiply the codes. Which backend of these, and of `mxfp8_quantize`, does is asked for by name,
like this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.mxfp8.grouped import TILES, Quantized, fprop, wgrad
from kernels.mxfp8.matmul import aligned_groups, as_dtype, refuse_second_derivatives, scattered
from kernels.mxfp8.reference import BLOCK, swizzle_scales

ROWS = 128


def _quantized(x: Tensor, rows: bool, columns: bool, group: int, second: bool = False) -> list[Quantized]:
    """x [..., R, C] with blocks along its rows, and transposed, with blocks along its columns, as far as wanted."""
    square = second and group != BLOCK
    wanted = [axis for axis, want in ((-1, rows), (-2, columns)) if want]
    backend = dispatch.choose_backend("mxfp8_quantize", None, x, axis=wanted[0])
    if backend.name != "reference":
        from kernels.mxfp8.hopper.quantize.operators import quantize_both  # needs Triton

        results = quantize_both(x, rows, columns, group, square, TILES)
        return [Quantized(*(results[:2] if axis == -1 else results[2:]), group) for axis in wanted]
    operands = []
    for axis in wanted:
        codes, scales, _ = backend.function(x, x.dim() + axis, group, square)
        if axis == -2:
            codes, scales = codes.mT, scales.mT
        operands.append(Quantized(codes.contiguous(), swizzle_scales(scales), group))
    return operands


def _collected(rows: Tensor, target: Tensor) -> Tensor:
    """The rows at `target`, and zeros where it is behind all of them."""
    inside = target < rows.shape[0]
    return torch.where(inside[:, None], rows.index_select(0, torch.where(inside, target, 0)), 0)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.group = group
        with torch.autocast(x.device.type, enabled=False):
            target, capacity, ends = aligned_groups(offsets, x.shape[0], ROWS)
            (rows,) = _quantized(scattered(x, target, capacity), True, False, group)
            (matrices,) = _quantized(weight, True, False, group, second=True)
            return as_dtype(_collected(fprop(rows, matrices, ends), target), out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_second_derivatives()
        x, weight, offsets = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            target, capacity, ends = aligned_groups(offsets, x.shape[0], ROWS)
            operands = _quantized(scattered(dy, target, capacity), needs_x, needs_weight, ctx.group)
            if needs_x:
                (matrices,) = _quantized(weight, False, True, ctx.group, second=True)
                dx = _collected(fprop(operands[0], matrices, ends), target).to(x.dtype)
            if needs_weight:
                (columns,) = _quantized(scattered(x, target, capacity), False, True, ctx.group, second=True)
                dw = wgrad(operands[-1], columns, ends, weight.dtype)
        return dx, dw, None, None, None


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
    """As the reference; results of products are rounded to bfloat16 before they become `out_dtype`."""
    return _GroupedMM.apply(x, weight, offsets, out_dtype, group)
