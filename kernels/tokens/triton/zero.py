"""Zeros in the place of a tensor that is not to be used, in Triton, without reading one that is."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv

_BLOCK = 4096
_PROGRAMS = 1024
"""Few, since mostly each only reads the condition."""


@triton.jit(do_not_specialize=["size", "width", "stride"])
def zero_unless_kernel(x, condition, size, width, stride, BLOCK: tl.constexpr):
    if tl.load(condition) == 0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for begin in range(first, size, tl.num_programs(0) * BLOCK):
            place = begin + tl.arange(0, BLOCK)
            row = place // width
            tl.store(
                x + row * stride + (place - row * width), tl.zeros((BLOCK,), x.dtype.element_ty), mask=place < size
            )


_launch = Launcher(zero_unless_kernel, num_warps=8)


def zero_unless_(x: Tensor, condition: Tensor) -> Tensor:
    size = x.numel()
    if size:
        width, stride = (size, size) if x.is_contiguous() else (x.shape[1], x.stride(0))
        grid = (min(cdiv(size, _BLOCK), _PROGRAMS), 1, 1)
        key = (x.device, x.dtype, condition.dtype, size >> 31, width >> 31, stride >> 31, *aligned(x, condition))
        _launch(grid, key, x, condition, size, width, stride, _BLOCK)
    return x
