"""A small Triton kernel before the grouped products, which brings scales into the order in which they are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv


def transposed_scales(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of scales uint8 [R, L / 32] and [C, L / 32], constant over four: (BYTES of the first as uint8, VALUES of the
    second, int32 [1]); see `grouped`. Rows of the first begin at multiples of 16 bytes, as TMA wants.

    The last is 0 if in every square of 128 by 128 elements of the second operand all rows share their scales, and 1
    otherwise.
    """
    length = rows.shape[1] // 4
    stride = 16 * cdiv(rows.shape[0], 16)
    row_table = torch.empty(length, stride, dtype=torch.uint8, device=rows.device)[:, : rows.shape[0]]
    column_table = torch.empty(length, columns.shape[0], dtype=torch.bfloat16, device=rows.device)
    differ = torch.zeros(1, dtype=torch.int32, device=rows.device)
    width = 16 if length > 8 else 8
    across, row_tiles, column_tiles = cdiv(length, width), cdiv(rows.shape[0], 128), cdiv(columns.shape[0], 128)
    _launch(
        ((row_tiles + column_tiles) * across, 1, 1),
        (rows.device, True, width, aligned(rows, columns)),
        rows.view(torch.int32),
        row_table,
        rows.shape[0],
        stride,
        columns.view(torch.int32),
        column_table,
        columns.shape[0],
        differ,
        length,
        across,
        row_tiles,
        width,
    )
    return row_table, column_table, differ


def transposed_words(scales: Tensor) -> Tensor:
    """Scales uint8 [R, L / 32] -> int32 [L / 128, R]: those of 128 elements in a word.

    Rows of the result begin at multiples of 16 bytes, as TMA wants.
    """
    length = scales.shape[1] // 4
    stride = 4 * cdiv(scales.shape[0], 4)
    table = torch.empty(length, stride, dtype=torch.int32, device=scales.device)[:, : scales.shape[0]]
    width = 16 if length > 8 else 8
    across = cdiv(length, width)
    words = scales.view(torch.int32)
    tiles = cdiv(scales.shape[0], 128)
    _launch(
        (tiles * across, 1, 1),
        (scales.device, False, width, aligned(scales)),
        words,
        table,
        scales.shape[0],
        stride,
        words,
        table,
        0,
        table,
        length,
        across,
        tiles,
        width,
    )
    return table


@triton.jit
def _transpose_tile(words, table, size, stride, tile, length, across, WIDTH: tl.constexpr):
    """Transpose 128 x WIDTH words into the type of the table; of values, returns whether rows of a square differ."""
    row = tile // across * 128 + tl.arange(0, 128)
    column = tile % across * WIDTH + tl.arange(0, WIDTH)
    inside = (row < size)[:, None] & (column < length)[None]
    word = tl.load(words + row.to(tl.int64)[:, None] * length + column[None], inside, 0)
    kind: tl.constexpr = table.dtype.element_ty
    differ = False
    if kind == tl.int32:
        value = word
    elif kind == tl.uint8:
        value = word.to(tl.uint8)
    else:
        byte = word & 0xFF
        differs = tl.max(tl.where(inside, byte, -1), 0) > tl.min(tl.where(inside, byte, 256), 0)
        # Byte 0 becomes 0: 2^-127 is a subnormal number. Byte 255 comes with NaNs and becomes infinity.
        bits = (byte << 7) | tl.where(differs, 0, 0x8000)[None]
        value = bits.to(tl.int16).to(kind, bitcast=True)
        differ = tl.max(differs.to(tl.int32), 0) > 0
    tl.store(table + column.to(tl.int64)[None] * stride + row[:, None], value, inside)
    return differ


@triton.jit(do_not_specialize=["num_rows", "stride", "num_columns", "length", "across", "row_tiles"])
def _transpose_kernel(
    rows, row_table, num_rows, stride, columns, column_table, num_columns, differ, length, across, row_tiles,
    WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < row_tiles * across:
        _transpose_tile(rows, row_table, num_rows, stride, tile, length, across, WIDTH)
    else:
        tile -= row_tiles * across
        if _transpose_tile(columns, column_table, num_columns, num_columns, tile, length, across, WIDTH):
            tl.store(differ, 1)


_launch = Launcher(_transpose_kernel, num_warps=4)
