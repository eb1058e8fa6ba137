"""Gradients of looked-up rows in Triton: brought together and looked at in one pass, zeroed only if they are bad."""

from __future__ import annotations

from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.triton import cdiv, tile_shape

_BLOCK = 4096
_PROGRAMS = 1024
"""Few, since mostly each only reads the condition."""
_SMALL = 1 << 20


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


@triton.jit(do_not_specialize=["num_rows"])
def concat_finite_kernel(
    part, whole, finite, num_rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a part [num_rows, WIDTH] where `whole` points to, and 0 to `finite` if it has an element that is not."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    values = tl.load(part + row * stride + column, inside, 0.0)
    tl.store(whole + row * WIDTH + column, values, inside)
    # Infinities and NaNs are what is not 0 times 0. All programs write the same number.
    bad = (values.to(tl.float32) * 0.0 != 0.0).to(tl.int32)
    if tl.sum(tl.sum(bad, 1), 0) > 0:
        tl.store(finite, 0.0)


_launch = Launcher(zero_unless_kernel, num_warps=8)
_launch_concat = Launcher(concat_finite_kernel)


def zero_unless_(x: Tensor, condition: Tensor) -> Tensor:
    size = x.numel()
    if size:
        width, stride = (size, size) if x.is_contiguous() else (x.shape[1], x.stride(0))
        grid = (min(cdiv(size, _BLOCK), _PROGRAMS), 1, 1)
        key = (x.device, x.dtype, condition.dtype, size >> 31, width >> 31, stride >> 31, *aligned(x, condition))
        _launch(grid, key, x, condition, size, width, stride, _BLOCK)
    return x


def concat_finite(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    parts = _with_small_ones_joined(parts)
    width, sizes = parts[0].shape[1], [len(part) for part in parts]
    whole = parts[0].new_empty(sum(sizes), width)
    finite = torch.ones((), device=whole.device)
    rows, block = tile_shape(width)
    for part, place in zip(parts, whole.split(sizes), strict=True):
        if part.numel():
            part = part if part.stride(1) == 1 or width == 1 else part.contiguous()
            stride = part.stride(0)
            key = (whole.device, whole.dtype, width, len(part) >> 31, kinds((stride,)), *aligned(part, place))
            grid = (cdiv(len(part), rows), cdiv(width, block), 1)
            _launch_concat(grid, key, part, place, finite, len(part), stride, width, rows, block)
    return whole, finite


def _with_small_ones_joined(parts: list[Tensor]) -> list[Tensor]:
    """Neighbours of less than `_SMALL` values as one: a copy takes less than launches for hundreds of features."""
    runs = [(small, list(run)) for small, run in groupby(parts, lambda part: part.numel() < _SMALL)]
    return [part for small, run in runs for part in ([torch.cat(run)] if small and len(run) > 1 else run)]
