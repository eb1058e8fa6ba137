"""MXFP8 quantisation of bfloat16 matrices whose sides are multiples of 128, through TMA; Gluon."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.launch import Launcher
from kernels.core.triton import cdiv
from kernels.mxfp8.grouped import TILES
from kernels.mxfp8.hopper.quantize.blocks import tile_place
from kernels.mxfp8.hopper.quantize.pairs import (
    REGISTERS,
    WARPS,
    codes_descriptor,
    codes_layout,
    column_layout,
    row_layout,
    store_columns,
    store_rows,
    table_of,
    words_descriptor,
    words_layout,
)

_TILES = gl.constexpr(TILES)


@gluon.jit(do_not_specialize=["tile_rows", "row_scales_stride", "column_scales_stride"])
def quantize_tiles_kernel(
    x_desc,
    row_desc,
    column_desc,
    row_scales,
    column_scales,
    differ,
    tile_rows,
    num_rows,
    num_columns,
    row_scales_stride,
    column_scales_stride,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    ROW_FORM: gl.constexpr,
    COLUMN_FORM: gl.constexpr,
):
    """One tile of matrices [num_rows, num_columns], one below another, with `tile_rows` rows of tiles in all.

    Scales of all matrices share a table; in other forms they are separate. Rows that x lacks are read as zeros.
    """
    smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    row, column = tile_place(gl.program_id(0), tile_rows, num_columns // 128)
    tma.async_copy_global_to_shared(x_desc, [row, column // 2], full, smem)
    matrix = row // num_rows
    first = row - matrix * num_rows
    transposed_row = matrix * num_columns + column
    row_line, column_line = row, transposed_row
    if ROW_FORM <= _TILES:
        row_line = first
        row_scales += matrix.to(gl.int64) * row_scales_stride
    if COLUMN_FORM <= _TILES:
        column_line = column
        column_scales += matrix.to(gl.int64) * column_scales_stride
    mbarrier.wait(full, 0)
    along = smem.load(row_layout())
    across = smem.load(column_layout())
    # Codes are stored from the memory of the words.
    buffers = smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    if ROWS:
        store_rows(along, buffers.index(0), row_desc, row, column // 2, row_scales, differ, row_line, column // 32,
                   tile_rows * 128, num_columns // 32, GROUP, SQUARE, ROW_FORM)  # fmt: skip
    if COLUMNS:
        num_lines = tile_rows * 128 // num_rows * num_columns
        store_columns(across, buffers.index(1), column_desc, transposed_row, first // 2, column_scales, differ,
                      column_line, first // 32, num_lines, num_rows // 32, GROUP, SQUARE, COLUMN_FORM)  # fmt: skip
    tma.store_wait(0)
    # Exchanges between threads may use the memory of a barrier after its last use, and the hardware would still write
    # it over it from where the hardware keeps it.
    mbarrier.invalidate(full)


_launch = Launcher(quantize_tiles_kernel, num_warps=WARPS, maxnreg=REGISTERS)


def has_whole_tiles(x: Tensor) -> bool:
    """Whether x [..., R, C], contiguous, is what `quantize_tiles` takes."""
    return (
        x.dtype is torch.bfloat16
        and x.shape[-1] % 128 == 0
        and x.shape[-2] % 128 == 0
        and x.data_ptr() % 16 == 0
        and x.numel() <= (2**31 - 1) * x.shape[-1]
    )


def quantize_tiles(
    x: Tensor,
    row_codes: Tensor,
    row_scales: Tensor,
    column_codes: Tensor,
    column_scales: Tensor,
    group: int,
    square: bool,
    form: int,
    differ: Tensor | None = None,
    column_form: int | None = None,
) -> None:
    """Write the results of `operators.quantize_both`, with scales in `form`, except those that are empty.

    Those of columns are in `column_form` if it is given. In tables `square` does not matter: VALUES are those of
    squares, others are not. `differ` (int32 [1]) becomes 1 if one of the squares in VALUES has several scales. A single
    matrix may have any number of rows: results are those of a matrix with rows of zeros up to a multiple of 128.
    """
    column_form = form if column_form is None else column_form
    num_rows, num_columns = x.shape[-2:]
    batch = x.numel() // (num_rows * num_columns)
    num_rows = cdiv(num_rows, 128) * 128
    tile_rows = batch * num_rows // 128
    rows, columns = row_codes.numel() > 0, column_codes.numel() > 0
    # If one of them is not written, the kernel gets the other one twice.
    codes = [codes.flatten(0, -2) for codes in (row_codes, column_codes) if codes.numel()]
    _launch(
        (tile_rows * (num_columns // 128), 1, 1),
        (x.device, rows, columns, group, square, form, column_form, differ is None),
        words_descriptor(x.flatten(0, -2)),
        codes_descriptor(codes[0]),
        codes_descriptor(codes[-1]),
        table_of(row_scales),
        table_of(column_scales),
        differ,
        tile_rows,
        num_rows,
        num_columns,
        row_scales.numel() // batch,
        column_scales.numel() // batch,
        rows,
        columns,
        group,
        square,
        form,
        column_form,
    )
