"""Grouped products of MXFP8 operands whose scales are constant over 128 elements for Hopper, in Gluon.

FP8 matrix instructions sum 128 products, and the sums are scaled as they are added to float32 accumulators: one
operation for each element of the result if the 128 rows of B in a square share their scale, as they do nearly always,
and two otherwise. A consumer has a single partial result of 64 x 128 besides its accumulators; the other consumer's
products fill the time in which it is added up.

VALUES say of each square whether its rows share their scale. To read that in each step takes little of the time of a
weight gradient, and up to a tenth of a product of few steps. Of weights a flag says as well whether all squares do.

A scale byte of 0 counts as 0, so a group of 128 whose largest magnitude is at most 1.75 * 2^-119 counts as zeros.

Shared with `moe`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.counters import counter
from kernels.core.hopper import let_other_start, start
from kernels.core.launch import Launcher, aligned, processors
from kernels.mxfp8.grouped import in_table
from kernels.mxfp8.hopper.grouped.pieces import in_pieces
from kernels.mxfp8.hopper.grouped.tiles import (
    COLUMNS,
    CONSUMER_REGISTERS,
    LAG,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PAIRED,
    PIECES,
    ROWS,
    STAGES,
    accept_tile,
    await_tile,
    barriers,
    descriptor,
    load_tiles,
    store_rows,
    table_descriptor,
)
from kernels.mxfp8.triton.scales import transposed_scales

_TILE_M = gl.constexpr(256)
_TILE_N = gl.constexpr(128)
_BLOCK_K = gl.constexpr(128)
_BAND = gl.constexpr(8)  # rows of tiles that are in flight together
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_ONE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))


def grouped_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    differ: Tensor | None = None,
) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] times its group's b [E, N, K], e4m3.

    Scales are uint8 [M, K / 32] and [E, N, K / 32], constant over 128 elements. Rows of group e are
    ends[e - 1]:ends[e]; N and K are multiples of 128. Rows from ends[E - 1] on are not written. Scales of either may be
    in a table: BYTES of a, VALUES of b, then with `differ`.
    """
    if in_table(b_scales) and differ is None:
        raise ValueError("scales of b in a table come with `differ`: whether rows of a square have different ones")
    groups, n, k = b.shape
    out = torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
    scales = tables(a_scales, b_scales if in_table(b_scales) else b_scales.flatten(0, 1), differ)
    sizes = (groups, 0, n // _TILE_N.value, 0, n, k)
    _multiplied(a, b.flatten(0, 1), out, out, scales, ends, sizes, 0, wgrad=False)
    return out


def grouped_wgrad(
    dy: Tensor,
    dy_scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    paired: bool = False,
) -> Tensor:
    """[E, N, K] of `dtype`: dy [N, M] times x [K, M], e4m3, summed over each group's columns.

    If `paired`, dy is in `grouped` pairs.

    Scales are uint8 [N, M / 32] and [K, M / 32], constant over 128 elements, or in tables. Groups have multiples of 128
    columns; N and K are multiples of 128.
    """
    n, k = dy_scales.shape[1 if in_table(dy_scales) else 0], x.shape[0]
    scales = tables(dy_scales, x_scales, None)
    form = PAIRED.value if paired else 0

    def product(ends: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(ends.shape[0], n, k, dtype=dtype, device=dy.device)
        sizes = (ends.shape[0], -(-n // _TILE_M.value), k // _TILE_N.value, n, k, 0)
        _multiplied(dy, x, out, out.flatten(0, 1), scales, ends, sizes, form, wgrad=True)
        return out

    return in_pieces(product, ends, x.shape[1], (n, k), (_TILE_M.value, _TILE_N.value), dtype, False)


def tables(rows: Tensor, columns: Tensor, differ: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(BYTES of a, VALUES of b, and if known a flag that is 0 if b's squares share their scales)."""
    if in_table(rows) and in_table(columns):
        return rows.view(torch.uint8), columns, differ
    row_table, column_table, found = transposed_scales(
        rows.new_empty(0, 4 * rows.shape[0], dtype=torch.uint8) if in_table(rows) else rows,
        columns.new_empty(0, 4 * columns.shape[0], dtype=torch.uint8) if in_table(columns) else columns,
    )
    return (
        rows.view(torch.uint8) if in_table(rows) else row_table,
        columns if in_table(columns) else column_table,
        found if differ is None else differ,
    )


def _multiplied(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Tensor,
    scales: tuple[Tensor, Tensor, Tensor | None],
    ends: Tensor,
    sizes: tuple[int, ...],
    form: int,
    *,
    wgrad: bool,
) -> None:
    row_scales, column_scales, differ = scales
    ticket = counter(a.device)
    _launch(
        (processors(a.device), 1, 1),
        (a.device, out.dtype, ends.dtype, aligned(ends), sizes[4:], wgrad, form),
        descriptor(a, ROWS.value, _BLOCK_K.value),
        descriptor(b, _TILE_N.value, _BLOCK_K.value),
        table_descriptor(row_scales, _TILE_M.value),
        table_descriptor(column_scales, _TILE_N.value),
        descriptor(rows, ROWS.value, COLUMNS.value),
        out,
        ticket if differ is None else differ,  # weight gradients read none
        ticket,
        ends,
        *sizes,
        wgrad,
        form,
    )


@gluon.jit
def row_factors(scales, C: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, 1] float32: the factors of the rows of a tile's block C. `scales` [1, 256] are E8M0 bytes.

    Byte 0 gives 0 and not 2^-127, which is a subnormal float32; byte 255, which comes with NaNs, gives infinity.
    """
    block = scales.slice(C * ROWS, ROWS, 1).permute((1, 0))
    return (block.load(LAYOUT).to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def shared_factor(values, LAYOUT: gl.constexpr):
    """[1, 1] float32: the factor of all columns of a tile that share theirs. `values` [1, 128] are VALUES."""
    return -values.slice(0, 1, 1).load(LAYOUT).to(gl.float32)


@gluon.jit
def _column_factors(values):
    """[1, 128] float32: the factors of the columns of a tile that do not share them."""
    pairs = values.load(_SUMS)
    bits = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [pairs], dtype=gl.int32, is_pure=True, pack=2
    )
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _are_shared(values):
    return gl.sum(gl.sum(values.slice(0, 1, 1).load(_ONE).to(gl.float32), 1), 0) < 0


@gluon.jit
def _add(sums, a, b, partial, rows, values, SHARED: gl.constexpr):
    """(sums + a b^T, scaled by the factors of rows and columns; the registers of a partial result)."""
    partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
    if SHARED:
        factors = rows * shared_factor(values, _SUMS)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        sums += partial * factors
    else:
        columns = _column_factors(values)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        sums += partial * rows * columns
        # Nothing is in flight. But otherwise the next product would start before this, in registers that are not there.
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return sums, partial


@gluon.jit
def _step(sums, more, partial, a_smem, b_smem, rows_smem, columns_smem, stage, SHARED: gl.constexpr,
          TWO: gl.constexpr, C: gl.constexpr):  # fmt: skip
    b = b_smem.index(stage).permute((1, 0))
    values = columns_smem.index(stage)
    rows = row_factors(rows_smem.index(stage), C, _SUMS)
    sums, partial = _add(sums, a_smem.index(stage * 4 + C), b, partial, rows, values, SHARED)
    if TWO:
        rows = row_factors(rows_smem.index(stage), C + 2, _SUMS)
        more, partial = _add(more, a_smem.index(stage * 4 + C + 2), b, partial, rows, values, SHARED)
    return sums, more, partial


@gluon.jit
def _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, WGRAD: gl.constexpr,
          SHARED: gl.constexpr, TWO: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(block C's sums, those of block C + 2 if TWO, `done` and the steps of this tile)."""
    sums = gl.zeros((ROWS, _TILE_N), gl.float32, _SUMS)
    more = sums
    partial = sums
    for step in range(steps):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        if SHARED:
            sums, more, partial = _step(sums, more, partial, a_smem, b_smem, rows_smem, columns_smem, stage, True, TWO,
                                        C)  # fmt: skip
        elif _are_shared(columns_smem.index(stage)):
            sums, more, partial = _step(sums, more, partial, a_smem, b_smem, rows_smem, columns_smem, stage, True, TWO,
                                        C)  # fmt: skip
            if WGRAD:  # as in `_add`: stores of float32 leave fewer registers
                sums, more = warpgroup_mma_wait(0, deps=(sums, more))
        else:
            sums, more, partial = _step(sums, more, partial, a_smem, b_smem, rows_smem, columns_smem, stage, False, TWO,
                                        C)  # fmt: skip
        mbarrier.arrive(empty.index(stage), count=1)
        let_other_start(order, first & (step == LAG), C)
        done += 1
    return sums, more, done


@gluon.jit
def _finish(out_desc, out, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first, done, row,
            count, column, steps, N, WGRAD: gl.constexpr, SHARED: gl.constexpr, TWO: gl.constexpr,
            C: gl.constexpr):  # fmt: skip
    sums, more, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, WGRAD,
                             SHARED, TWO, C)  # fmt: skip
    row += C * ROWS
    count -= C * ROWS
    store_rows(out_desc, out, out_smem, sums, row, count, column, N, C * PIECES, 0)
    if TWO:
        store_rows(out_desc, out, out_smem, more, row + 2 * ROWS, count - 2 * ROWS, column, N, C * PIECES, 0)
    return done


@gluon.jit
def _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first, done,
          row, count, column, steps, N, WGRAD: gl.constexpr, TWO: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C's part of a tile, its second block only if TWO; `done` and its steps."""
    if WGRAD:
        done = _finish(out_desc, out, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first,
                       done, row, count, column, steps, N, WGRAD, False, TWO, C)  # fmt: skip
    elif shared:
        done = _finish(out_desc, out, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first,
                       done, row, count, column, steps, N, WGRAD, True, TWO, C)  # fmt: skip
    else:
        done = _finish(out_desc, out, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first,
                       done, row, count, column, steps, N, WGRAD, False, TWO, C)  # fmt: skip
    return done


@gluon.jit
def _multiply(out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, places,
              written, read, N, WGRAD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: blocks C, and C + 2 if there is one and the tile has such rows, of each tile."""
    done = 0
    received = 0
    shared = gl.load(differ) == 0
    start(order, C)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        if count > 2 * ROWS:
            done = _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         received == 0, done, row, count, column, steps, N, WGRAD, True, C)  # fmt: skip
        else:
            done = _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         received == 0, done, row, count, column, steps, N, WGRAD, False, C)  # fmt: skip
        # The loader goes on only when both have accepted the tile.
        let_other_start(order, (received == 0) & (steps <= LAG), C)
        received += 1
        count = await_tile(places, written, received)
    let_other_start(order, received == 0, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["differ", "ticket", "num_groups", "tiles_m", "tiles_n", "M"])
def _grouped_fp8_kernel(
    a_desc,
    b_desc,
    rows_desc,
    columns_desc,
    out_desc,
    out,
    differ,
    ticket,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    WGRAD: gl.constexpr,
    A_FORM: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * 4] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.uint8, [STAGES] + rows_desc.block_type.shape, rows_desc.layout)
    columns_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + columns_desc.block_type.shape, columns_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES] + out_desc.block_type.shape, out_desc.layout)
    full, empty, order, places, written, read = barriers()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, N, WGRAD, 0)),
            (_multiply, (out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, N, WGRAD, 1)),
            (load_tiles, (a_desc, b_desc, rows_desc, columns_desc, a_smem, b_smem, rows_smem, columns_smem, full, empty,
                          ticket, places, written, read, ends, num_groups, tiles_m, tiles_n, M, N, K, _TILE_N,
                          _BLOCK_K, _BAND, 4, STAGES, WGRAD, A_FORM, False, True, True, False, False)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_grouped_fp8_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
