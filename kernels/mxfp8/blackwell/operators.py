"""Grouped products of quantised operands by the kernels for sm_100, as backends."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mxfp8.blackwell import grouped
from kernels.mxfp8.grouped import Quantized, addressable_operands, column_codes, row_codes


def fprop(a: Quantized, b: Quantized, ends: Tensor) -> Tensor:
    return grouped.grouped_mm(*addressable_operands(row_codes(a), b), ends.contiguous())


def wgrad(dy: Quantized, x: Quantized, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return grouped.grouped_wgrad(*addressable_operands(column_codes(dy), x), ends.contiguous(), dtype)
