"""Rows of bfloat16 gathered into expert order and quantised on the way, a multiple of 128 columns; Gluon."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from kernels.core.launch import Launcher, aligned
from kernels.moe.reference import Permutation
from kernels.mxfp8.hopper.quantize.blocks import tile_place
from kernels.mxfp8.hopper.quantize.operators import scales_like
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
    words_layout,
)

_BAND = gl.constexpr(32)  # rows of tiles, in the order of their tokens, that programs take together


@gluon.jit(do_not_specialize=["num_groups"])
def gather_quantized_kernel(
    x,
    stride,
    selections,
    ends,
    order,
    num_groups,
    TOP_K: gl.constexpr,
    row_desc,
    column_desc,
    row_scales,
    column_scales,
    num_rows,
    num_columns,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ROW_FORM: gl.constexpr,
    COLUMN_FORM: gl.constexpr,
):
    """One tile of the gathered rows. x has two elements to a word, `stride` words to a row."""
    place, column = tile_place(gl.program_id(0), num_rows // 128, num_columns // 128, _BAND)
    row = gl.load(order + place // 128) * 128
    if row >= gl.load(ends + num_groups - 1):
        return
    smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    selection = gl.load(selections + row + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)))
    source = gl.expand_dims((selection // TOP_K).to(gl.int64) * stride, 1)
    word = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    mask = gl.expand_dims(selection >= 0, 1) & (word >= 0)
    # Rows without a selection are zeros.
    async_copy.async_copy_global_to_shared(smem, x + source + (column // 2 + word), mask=mask)
    async_copy.commit_group()
    async_copy.wait_group(0)
    along = smem.load(row_layout())
    across = smem.load(column_layout())
    buffers = smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    store_rows(along, buffers.index(0), row_desc, row, column // 2, row_scales, None, row, column // 32,
               num_rows, num_columns // 32, GROUP, False, ROW_FORM)  # fmt: skip
    if COLUMNS:
        store_columns(across, buffers.index(1), column_desc, column, row // 2, column_scales, None, column,
                      row // 32, num_columns, num_rows // 32, GROUP, False, COLUMN_FORM)  # fmt: skip
    tma.store_wait(0)


_launch = Launcher(gather_quantized_kernel, num_warps=WARPS, maxnreg=REGISTERS)


def gather_quantized(
    x: Tensor, permutation: Permutation, group: int, columns: bool, forms: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, D] bfloat16 -> codes [M, D], scales, codes [D, M], scales; see `gather`."""
    num_rows, num_columns = permutation.selections.shape[0], x.shape[1]
    row_codes = x.new_empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    column_codes = x.new_empty((num_columns, num_rows) if columns else (0, 0), dtype=torch.float8_e4m3fn)
    row_form, column_form = forms
    row_scales, column_scales = scales_like(row_codes, row_form), scales_like(column_codes, column_form)
    if row_codes.numel():
        words = x.view(torch.int32)  # rows may lie apart
        stride, top_k = words.stride(0), permutation.rows.shape[1]
        _launch(
            (num_rows // 128 * (num_columns // 128), 1, 1),
            (x.device, top_k, columns, group, *forms, stride % 16, *aligned(*permutation[1:])),
            words,
            stride,
            permutation.selections,
            permutation.ends,
            permutation.order,
            permutation.ends.shape[0],
            top_k,
            codes_descriptor(row_codes),
            codes_descriptor(column_codes if columns else row_codes),
            table_of(row_scales),
            table_of(column_scales),
            num_rows,
            num_columns,
            columns,
            group,
            *forms,
        )
    return row_codes, row_scales, column_codes, column_scales
