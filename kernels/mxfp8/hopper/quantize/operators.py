"""MXFP8 quantisation of a tensor in one pass, along rows, along columns or both; Gluon."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.operator import custom_op
from kernels.mxfp8.grouped import BYTES, MATRIX, TABLES, TILES, VALUES, Quantized
from kernels.mxfp8.hopper.quantize.blocks import TILE, quantize_columns, quantize_rows, tile_offsets, tile_place
from kernels.mxfp8.hopper.quantize.tiles import has_whole_tiles, quantize_tiles
from kernels.mxfp8.reference import MXTensor


def launch_options() -> dict[str, int]:
    """Rows of a tile that a thread holds, the warps that this makes, and their registers."""
    # Two programs share a multiprocessor, so that one loads while the other stores.
    return {"R": 8, "num_warps": 8, "maxnreg": 128}


@gluon.jit(do_not_specialize=["row_scales_stride", "column_scales_stride"])
def quantize_kernel(
    x,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    num_rows,
    num_columns,
    row_scales_stride,
    column_scales_stride,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    SWIZZLE: gl.constexpr,
    EVEN: gl.constexpr,
    R: gl.constexpr,
):
    """One tile of one matrix of the batch."""
    tile_rows, tile_columns = (num_rows + 127) // 128, (num_columns + 127) // 128
    # All along one axis of the grid: the others have no more than 65535 programs.
    number = gl.program_id(0) // (tile_rows * tile_columns)
    tile = gl.program_id(0) - number * (tile_rows * tile_columns)
    first_row, first_column = tile_place(tile, tile_rows, tile_columns)
    batch = number.to(gl.int64)
    matrix = batch * num_rows * num_columns
    row, column, offset = tile_offsets(num_columns, R)
    at = x + matrix + first_row.to(gl.int64) * num_columns + first_column + offset
    if EVEN:
        tile = gl.load(at)
    else:
        tile = gl.load(at, mask=(first_row + row < num_rows) & (first_column + column < num_columns), other=0.0)
    if ROWS:
        quantize_rows(
            tile,
            row_codes + matrix,
            row_scales + batch * row_scales_stride,
            first_row,
            first_column,
            num_rows,
            num_columns,
            GROUP,
            SQUARE,
            SWIZZLE,
            EVEN,
            R,
        )
    if COLUMNS:
        quantize_columns(
            tile,
            column_codes + matrix,
            column_scales + batch * column_scales_stride,
            first_row,
            first_column,
            num_rows,
            num_columns,
            GROUP,
            SQUARE,
            SWIZZLE,
            EVEN,
            R,
        )


def scales_like(codes: Tensor, form: int) -> Tensor:
    """Uninitialised scales of codes [..., rows, columns] with blocks along the last axis, in a form of `grouped`."""
    *batch, rows, columns = codes.shape
    blocks = -(-columns // 32)
    if form == MATRIX:
        return codes.new_empty(*batch, rows, blocks, dtype=torch.uint8)
    if form == TILES:
        return codes.new_empty(*batch, -(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8)
    return codes.new_empty(blocks // 4, math.prod(batch) * rows, dtype=TABLES[form])


def empty_operands(x: Tensor, rows: bool, columns: bool, column_form: int) -> tuple[Quantized, Quantized]:
    """Uninitialised operands of products of one group, for x [M, C] in groups of 128.

    Along the rows, [M', C] with BYTES, and along the columns, [C, M'] with scales in a form. M' is M rounded up to a
    multiple of 128. What is not asked for is empty.
    """
    num_rows = -(-x.shape[0] // 128) * 128
    shapes = (num_rows, x.shape[1]) if rows else (0, 0), (x.shape[1], num_rows) if columns else (0, 0)
    along, across = (x.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in shapes)
    return Quantized(along, scales_like(along, BYTES), 128), Quantized(across, scales_like(across, column_form), 128)


def _empty(x: Tensor, transpose: bool, form: int, wanted: bool) -> tuple[Tensor, Tensor]:
    if not wanted:
        return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.uint8)
    *batch, rows, columns = x.shape
    shape = (*batch, columns, rows) if transpose else (*batch, rows, columns)
    codes = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    return codes, scales_like(codes, form)


@custom_op("gemsmith::mxfp8_quantize")
def quantize_both(
    x: Tensor, rows: bool, columns: bool, group: int, square: bool, form: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., R, C] -> codes [..., R, C], their scales, codes [..., C, R], their scales, in a `form` of `grouped`.

    Results that `rows` and `columns` do not ask for are empty.

    Raises:
        ValueError: scales in a table, but x is not bfloat16 with sides in multiples of 128, or they are VALUES and not
            of squares, or others and of squares.
    """
    x = x.contiguous()
    if form in TABLES and (square != (form == VALUES) or not has_whole_tiles(x)):
        raise ValueError(
            f"scales in tables are those of bfloat16 matrices whose sides are multiples of 128, of squares if they are "
            f"values (form={VALUES}), got form={form}, {x.dtype} {list(x.shape)} and square={square}; use form={MATRIX}"
        )
    row_codes, row_scales = _empty(x, False, form, rows)
    column_codes, column_scales = _empty(x, True, form, columns)
    if x.numel() == 0:
        return row_codes, row_scales.zero_(), column_codes, column_scales.zero_()
    if has_whole_tiles(x):
        quantize_tiles(x, row_codes, row_scales, column_codes, column_scales, group, square, form)
        return row_codes, row_scales, column_codes, column_scales
    num_rows, num_columns = x.shape[-2:]
    batch = x.numel() // (num_rows * num_columns)
    tiles = -(-num_rows // TILE) * -(-num_columns // TILE)
    quantize_kernel[(tiles * batch,)](
        x,
        row_codes,
        row_scales,
        column_codes,
        column_scales,
        num_rows,
        num_columns,
        row_scales.numel() // batch,
        column_scales.numel() // batch,
        ROWS=rows,
        COLUMNS=columns,
        GROUP=group,
        SQUARE=square,
        SWIZZLE=form == TILES,
        EVEN=num_rows % TILE == 0 and num_columns % TILE == 0,
        **launch_options(),
    )
    return row_codes, row_scales, column_codes, column_scales


@quantize_both.register_fake
def _(x, rows, columns, group, square, form):
    return *_empty(x, False, form, rows), *_empty(x, True, form, columns)


def quantize(x: Tensor, axis: int, group: int, square: bool) -> MXTensor:
    """With blocks along the last axis but one, codes and scales are transposed views: they are contiguous along it."""
    along_rows = axis % x.dim() == x.dim() - 1
    if x.dim() == 1:
        matrix = x[None]
    elif along_rows and not square:
        matrix = x.flatten(0, -2)  # whole tiles of a batch of few rows, and a batch of any size
    else:
        matrix = x
    results = quantize_both(matrix, along_rows, not along_rows, group, square, MATRIX)
    if along_rows:
        codes, scales = results[:2]
        return MXTensor(codes.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1]), axis % x.dim())
    codes, scales = results[2:]
    return MXTensor(codes.mT, scales.mT, axis % x.dim())
