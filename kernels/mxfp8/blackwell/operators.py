"""Grouped products of quantised operands by the kernel for sm_100, as backends."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mxfp8.blackwell import grouped
from kernels.mxfp8.grouped import Quantized, addressable, column_codes, scale_tiles


def _tensors(operand: Quantized) -> tuple[Tensor, Tensor]:
    return addressable(operand.codes), addressable(scale_tiles(operand))


def fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    m, (groups, n, k) = a.codes.shape[0], b.codes.shape
    if 0 in (m, groups, n, k):
        return a.codes.new_zeros(m, n, dtype=torch.bfloat16)
    return grouped.grouped_mm(*_tensors(a), *_tensors(b), ends.contiguous())


def wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if 0 in (dy.codes.numel(), x.codes.numel(), ends.shape[0]):
        return dy.codes.new_zeros(ends.shape[0], dy.lines, x.lines, dtype=dtype)
    written = dtype if dtype is torch.bfloat16 else torch.float32
    return grouped.grouped_wgrad(*_tensors(column_codes(dy)), *_tensors(x), ends.contiguous(), written).to(dtype)
