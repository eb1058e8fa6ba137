"""Small Triton kernels around the grouped products: scales in the order that they read, and rows that have no group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jagged.triton_common import cdiv

_BLOCKS_PER_PROGRAM = 128
_CLEAR_PROGRAMS = 264


def transposed_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Of scales uint8 [R, C / 32], constant over four: (their values float32 [C / 128, R], int32 [1]).

    The value of byte 0 is 0 and not 2^-127, and that of byte 255 infinity.
    The second is 0 if the rows of every square of 128 x 128 elements share theirs, and 1 otherwise.
    """
    rows, columns = scales.shape[0], scales.shape[1] // 4
    table = torch.empty(columns, rows, dtype=torch.float32, device=scales.device)
    differ = torch.zeros(1, dtype=torch.int32, device=scales.device)
    grid = (cdiv(rows, 128), cdiv(columns, 16))
    _transpose[grid](scales, table, differ, rows, columns, scales.stride(0), COLUMNS=16, num_warps=4)
    return table, differ


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes e4m3 [..., C] with scales uint8 [..., C / 32], contiguous -> bfloat16 [..., C]; C in multiples of 32."""
    values = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    grid = (cdiv(scales.numel(), _BLOCKS_PER_PROGRAM),)
    _dequantize[grid](codes.view(torch.uint8), scales, values, scales.numel(), BLOCKS=_BLOCKS_PER_PROGRAM, num_warps=8)
    return values


def clear_rest(rows: Tensor, ends: Tensor) -> Tensor:
    """Zero, in place, the rows of a contiguous matrix from the last of `ends` on."""
    if rows.numel():
        _clear[(_CLEAR_PROGRAMS,)](rows, ends, ends.shape[0], rows.shape[0], rows.shape[1], BLOCK=2048, num_warps=4)
    return rows


@triton.jit(do_not_specialize=["rows", "columns", "stride"])
def _transpose(scales, table, differ, rows, columns, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None]
    scale = tl.load(scales + row.to(tl.int64)[:, None] * stride + column[None] * 4, inside, 0).to(tl.int32)
    # Byte 0 becomes 0: 2^-127 is a subnormal float32. Byte 255 stands beside NaNs and becomes infinity.
    value = (scale << 23).to(tl.float32, bitcast=True)
    tl.store(table + column.to(tl.int64)[None] * rows + row[:, None], value, inside)
    largest = tl.max(tl.where(inside, scale, -1), 0)
    smallest = tl.min(tl.where(inside, scale, 256), 0)
    if tl.max(largest - smallest, 0) > 0:
        tl.store(differ, 1)


@triton.jit(do_not_specialize=["blocks"])
def _dequantize(codes, scales, values, blocks, BLOCKS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    inside = first + block < blocks
    element = block[:, None] * 32 + tl.arange(0, 32)[None]
    code = tl.load(codes + first * 32 + element, inside[:, None], 0).to(tl.int32)
    scale = tl.load(scales + first + block, inside, 0).to(tl.int32)
    # s eeee mmm -> s 0000eeee mmm0.. of a float32, which is the value times 2^-120, subnormals too; then the exact
    # products with 2^120 and with the scale, of which 2^-127 is a subnormal.
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    power = tl.where(scale == 0, 0x400000, scale << 23).to(tl.float32, bitcast=True)
    power = tl.where(scale == 255, float("nan"), power)
    tl.store(values + first * 32 + element, (value * power[:, None]).to(tl.bfloat16), inside[:, None])


@triton.jit(do_not_specialize=["num_groups", "total"])
def _clear(rows, ends, num_groups, total, columns, BLOCK: tl.constexpr):
    begin = tl.load(ends + num_groups - 1).to(tl.int64) * columns
    end = total.to(tl.int64) * columns
    zeros = tl.zeros((BLOCK,), rows.dtype.element_ty)
    for start in range(begin + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        position = start + tl.arange(0, BLOCK)
        tl.store(rows + position, zeros, position < end)
