"""`mxfp8_grouped_mm` by products of codes: how block-scaled instructions get at the operands of a layer on sm_100.

Rows move to groups of whole multiples of 128, are quantised there, and `mxfp8_grouped_fprop` and `mxfp8_grouped_wgrad`
multiply the codes; which backend of these does is asked for by name, like this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.mxfp8.grouped import Quantized, fprop, wgrad
from kernels.mxfp8.matmul import aligned_groups, refuse_second_derivatives, scattered
from kernels.mxfp8.reference import BLOCK

ROWS = 128


def _quantized(x: Tensor, axis: int, group: int, weight: bool = False) -> Quantized:
    """x with blocks along `axis`, one of the last two, which becomes the last."""
    quantize = dispatch.choose("mxfp8_quantize", None, x, axis=axis - x.dim())
    codes, scales, _ = quantize(x, axis, group, weight and group != BLOCK)
    if axis != x.dim() - 1:
        codes, scales = codes.mT, scales.mT
    return Quantized(codes.contiguous(), scales.contiguous(), group)


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
            rows = _quantized(scattered(x, target, capacity), 1, group)
            y = fprop(rows, _quantized(weight, 2, group, weight=True), ends)
            return _collected(y, target).to(out_dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_second_derivatives()
        x, weight, offsets = ctx.saved_tensors
        group = ctx.group
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            target, capacity, ends = aligned_groups(offsets, x.shape[0], ROWS)
            rows = scattered(dy, target, capacity)
            if ctx.needs_input_grad[0]:
                matrices = _quantized(weight, 1, group, weight=True)
                dx = _collected(fprop(_quantized(rows, 1, group), matrices, ends), target).to(x.dtype)
            if ctx.needs_input_grad[1]:
                both = (_quantized(part, 0, group) for part in (rows, scattered(x, target, capacity)))
                dw = wgrad(*both, ends, weight.dtype)
        return dx, dw, None, None, None


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype, group: int) -> Tensor:
    """As the reference; results of products are rounded to bfloat16 before they become `out_dtype`."""
    return _GroupedMM.apply(x, weight, offsets, out_dtype, group)
