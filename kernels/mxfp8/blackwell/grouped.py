"""Grouped products of MXFP8 operands for sm_100, in Triton: `tl.dot_scaled` becomes block-scaled tcgen05 instructions.

They take the stored scale of each 32 elements, so both groupings of scales use the same kernels. Compiled ahead of time
and checked for their instructions, but not run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.triton import cdiv

_TILE = 128
_BLOCK_K = 128
_BAND = 8


def grouped_mm(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor) -> Tensor:
    """[M, N] bfloat16: a [M, K] e4m3 with scales uint8 [M, K / 32], times its group's b [E, N, K] with [E, N, K / 32].

    Groups begin at multiples of 128 rows; N and K are multiples of 128. Rows after the last group are not written.
    """
    groups, n, k = b.shape
    m = a.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    grid = (cdiv(m, _TILE) * (n // _TILE),)
    _grouped_mm_kernel[grid](a, a_scales, b, b_scales, out, ends, groups, m, n, k, TILE=_TILE, BLOCK_K=_BLOCK_K,
                             BAND=_BAND, num_warps=8, num_stages=4)  # fmt: skip
    return out


def grouped_wgrad(
    dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[E, N, K] of `dtype`: dy [N, M] times x [K, M], summed over each group's columns; scales [N or K, M / 32]."""
    (n, m), k, groups = dy.shape, x.shape[0], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=dy.device)
    grid = (n // _TILE * (k // _TILE), groups)
    _grouped_wgrad_kernel[grid](dy, dy_scales, x, x_scales, out, ends, m, n, k, TILE=_TILE, BLOCK_K=_BLOCK_K,
                                num_warps=8, num_stages=4)  # fmt: skip
    return out


@triton.jit
def _sums(a, a_scales, b, b_scales, a_row, b_row, first, last, length, TILE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sum over first <= r < last, whole blocks, of A[a_row + i, r] * B[b_row + j, r]; `length` elements a row."""
    i = tl.arange(0, TILE)
    r = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK_K // 32)
    a_rows, b_rows = (a_row + i).to(tl.int64), (b_row + i).to(tl.int64)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        a_codes = tl.load(a + a_rows[:, None] * length + (start + r)[None])
        b_codes = tl.load(b + b_rows[:, None] * length + (start + r)[None])
        a_scale = tl.load(a_scales + a_rows[:, None] * (length // 32) + (start // 32 + block)[None])
        b_scale = tl.load(b_scales + b_rows[:, None] * (length // 32) + (start // 32 + block)[None])
        acc = tl.dot_scaled(a_codes, a_scale, "e4m3", b_codes.T, b_scale, "e4m3", acc)
    return acc


@triton.jit(do_not_specialize=["groups", "m"])
def _grouped_mm_kernel(a, a_scales, b, b_scales, out, ends, groups, m, n, k, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
        BAND: tl.constexpr):  # fmt: skip
    tiles_n = n // TILE
    band = tl.program_id(0) // (BAND * tiles_n)
    rows = tl.minimum(tl.cdiv(m, TILE) - band * BAND, BAND)
    inside = tl.program_id(0) % (BAND * tiles_n)
    row = (band * BAND + inside % rows) * TILE
    column = inside // rows * TILE
    group = 0
    while (group < groups) & (tl.load(ends + tl.minimum(group, groups - 1)).to(tl.int32) <= row):
        group += 1
    if group < groups:
        acc = _sums(a, a_scales, b, b_scales, row, group * n + column, 0, k, k, TILE, BLOCK_K)
        i = tl.arange(0, TILE)
        pointers = out + (row + i).to(tl.int64)[:, None] * n + (column + i)[None]
        tl.store(pointers, acc.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["m"])
def _grouped_wgrad_kernel(dy, dy_scales, x, x_scales, out, ends, m, n, k, TILE: tl.constexpr, BLOCK_K: tl.constexpr):
    group = tl.program_id(1)
    row = tl.program_id(0) // (k // TILE) * TILE
    column = tl.program_id(0) % (k // TILE) * TILE
    first = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0).to(tl.int32)
    last = tl.load(ends + group).to(tl.int32)
    acc = _sums(dy, dy_scales, x, x_scales, row, column, first, last, m, TILE, BLOCK_K)
    i = tl.arange(0, TILE)
    pointers = out + (group.to(tl.int64) * n + row + i)[:, None] * k + (column + i)[None]
    tl.store(pointers, acc.to(out.dtype.element_ty))
