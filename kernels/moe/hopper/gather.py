"""Rows gathered into expert order and quantised on the way; Gluon."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.moe.hopper.gather_quantized import gather_quantized
from kernels.moe.reference import Permutation
from kernels.mxfp8.grouped import MATRIX, VALUES, form_of, in_tables
from kernels.mxfp8.hopper.quantize.blocks import (
    TILE,
    quantize_columns,
    quantize_rows,
    tile_layout,
    tile_offsets,
    tile_place,
)
from kernels.mxfp8.hopper.quantize.operators import launch_options, scales_like


@gluon.jit(do_not_specialize=["num_groups", "top_k"])
def gather_kernel(
    x,
    x_stride,
    selections,
    ends,
    order,
    num_groups,
    top_k,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    num_rows,
    num_columns,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    SQUARE: gl.constexpr,
    EVEN: gl.constexpr,
    R: gl.constexpr,
):
    """One tile of the gathered rows; with GROUP 0 `row_codes` are bfloat16 and nothing is quantised."""
    place, first_column = tile_place(gl.program_id(0), num_rows // 128, (num_columns + 127) // 128)
    first_row = gl.load(order + place // 128) * 128
    if first_row >= gl.load(ends + num_groups - 1):
        return
    LAYOUT: gl.constexpr = tile_layout(R)
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    selection = gl.load(selections + first_row + row)
    source = gl.expand_dims((selection // top_k).to(gl.int64) * x_stride, 1)
    _, column, offset = tile_offsets(num_columns, R)
    mask = gl.expand_dims(selection >= 0, 1)
    if not EVEN:
        mask = mask & (first_column + column < num_columns)
    tile = gl.load(x + source + first_column + column, mask=mask, other=0.0)
    if GROUP == 0:
        at = row_codes + first_row.to(gl.int64) * num_columns + first_column + offset
        if EVEN:
            gl.store(at, tile.to(gl.bfloat16))
        else:
            gl.store(at, tile.to(gl.bfloat16), mask=(first_column + column < num_columns) & (row[:, None] >= 0))
    else:
        quantize_rows(
            tile,
            row_codes,
            row_scales,
            first_row,
            first_column,
            num_rows,
            num_columns,
            GROUP,
            False,
            False,
            EVEN,
            R,
        )
        if COLUMNS:
            quantize_columns(
                tile,
                column_codes,
                column_scales,
                first_row,
                first_column,
                num_rows,
                num_columns,
                GROUP,
                SQUARE,
                False,
                EVEN,
                R,
            )


def gather(
    x: Tensor, permutation: Permutation, group: int, column_form: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, D] -> codes [M, D] of the rows in expert order, their scales, the same of their columns [D, M].

    The last two are empty if `column_form` is None; with group 0 the first is bfloat16 and all others are empty. If
    `in_tables`, scales are in a table and in `column_form`, and otherwise matrices (see `mxfp8.grouped`), with columns
    in squares if the form would be VALUES. Padding rows are zeros; rows after the last end are not written.
    """
    num_rows, num_columns = permutation.selections.shape[0], x.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    columns = column_form is not None
    if group and in_tables(x.dtype, num_columns):
        whole_vectors = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
        x = x if whole_vectors else x.clone(memory_format=torch.contiguous_format)
        forms = form_of(group, second=False), column_form if columns else MATRIX
        return gather_quantized(x, permutation, group, columns, forms)
    dtype = torch.float8_e4m3fn if group else torch.bfloat16
    row_codes = x.new_empty(num_rows, num_columns, dtype=dtype)
    column_codes = x.new_empty((num_columns, num_rows) if columns else (0, 0), dtype=torch.float8_e4m3fn)
    row_scales = scales_like(row_codes if group else column_codes, MATRIX)
    column_scales = scales_like(column_codes, MATRIX)
    if row_codes.numel():
        gather_kernel[(num_rows // TILE * -(-num_columns // TILE),)](
            x,
            x.stride(0),
            permutation.selections,
            permutation.ends,
            permutation.order,
            permutation.ends.shape[0],
            permutation.rows.shape[1],
            row_codes,
            row_scales,
            column_codes,
            column_scales,
            num_rows,
            num_columns,
            COLUMNS=columns,
            GROUP=group,
            SQUARE=column_form == VALUES,
            EVEN=num_columns % TILE == 0,
            **launch_options(),
        )
    return row_codes, row_scales, column_codes, column_scales
