"""Adding up partial sums, one from each program of a kernel for its own rows, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.triton import cdiv, next_power_of_2

_ELEMENTS = 8192  # of a program's tile
_PARTS = 1024  # in a tile at most, whose rows are whole sectors of 32 bytes then


@triton.jit(do_not_specialize=["count"])
def _add_partial_sums_kernel(parts, out, count, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (column < width)[None, :]
        total += tl.load(parts + (part.to(tl.int64) * width)[:, None] + column[None, :], inside, 0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), column < width)


_launch = Launcher(_add_partial_sums_kernel, num_warps=8)


def add_partial_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] in `dtype`, the sum over P of parts [P, ...] float32, contiguous, in a fixed order.

    Of a few hundred parts of a few hundred elements PyTorch's sum makes a few blocks, which add up one part after the
    other, and it casts in a launch of its own. A step of a small model has some fifty such sums.
    """
    count, width = parts.shape[0], parts[:1].numel()
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    if not parts.numel():
        return out.zero_()
    rows = min(next_power_of_2(count), _PARTS)
    block = min(_ELEMENTS // rows, next_power_of_2(width))
    key = (parts.device, dtype, *aligned(parts, out), *kinds((width,)), rows, block)
    _launch((cdiv(width, block), 1, 1), key, parts, out, count, width, rows, block)
    return out
