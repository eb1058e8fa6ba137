"""Grouped products of MXFP8 operands whose scales are constant over 128 elements for Hopper, in Gluon.

FP8 matrix instructions sum 128 products, and the sums are scaled as they are added to float32 accumulators: two
operations for each element of the result when both operands have scales of their own for each row, one when 128 rows
of B share theirs, which weights do. Few elements are live at a time: a consumer has one partial result of 64 x 128
beside its accumulators, and issues the next product when the last one is added up. The other consumers' products can
fill the tensor cores meanwhile.

A scale byte of 0 counts as 0, so a group of 128 whose largest magnitude is at most 1.75 * 2^-119 counts as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.launch import processors
from kernels.mxfp8.gluon_grouped_tiles import ROWS, descriptor, load_tiles, locate, seek, store_rows
from kernels.mxfp8.triton_grouped import transposed_scales

_TILE_N = gl.constexpr(128)
_BLOCK_K = gl.constexpr(128)
_STAGES = gl.constexpr(4)
_LAG = gl.constexpr(2)  # steps between two consumers, so that products fill the time of epilogues; three need none
_LOADER_REGISTERS = gl.constexpr(24)

# Blocks of ROWS rows in a tile, consumers, their registers, and the limit at which all warpgroups fit.
TILES = {192: (3, 3, 160, 128), 256: (4, 2, 240, 168)}
MM_ROWS = 256
WGRAD_ROWS = 256


def grouped_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, tile_rows: int = MM_ROWS
) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] times its group's b [E, N, K], e4m3.

    Scales are uint8 [M, K / 32] and [E, N, K / 32], constant over 128 elements. If all 128 x 128 elements of each
    square of b share theirs, a loop with one operation less for each element runs. Rows of group e are
    ends[e - 1]:ends[e]; N and K are multiples of 128. Rows from ends[E - 1] on are not written.
    """
    groups, n, k = b.shape
    out = torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
    table, differ = transposed_scales(b_scales.flatten(0, 1))
    sizes = (groups, 0, n // _TILE_N.value, 0, n, k)
    words = a_scales.view(torch.int32)
    strides = (words.stride(0), 1)
    _launch(a, b.flatten(0, 1), out, out, words, strides, table, differ, ends, sizes, False, tile_rows)
    return out


def grouped_wgrad(
    dy: Tensor,
    dy_scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    tile_rows: int = WGRAD_ROWS,
) -> Tensor:
    """[E, N, K] of `dtype`: dy [N, M] times x [K, M], e4m3, summed over each group's columns.

    Scales are uint8 [N, M / 32] and [K, M / 32], constant over 128 elements. Groups have multiples of 128 columns; N
    and K are multiples of 128.
    """
    n, k, groups = dy.shape[0], x.shape[0], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=dy.device)
    (dy_table, _), (x_table, differ) = transposed_scales(dy_scales), transposed_scales(x_scales)
    sizes = (groups, -(-n // tile_rows), k // _TILE_N.value, n, k, 0)
    rows = out.flatten(0, 1)
    _launch(dy, x, out, rows, dy_table, (1, dy_table.stride(0)), x_table, differ, ends, sizes, True, tile_rows)
    return out


def _launch(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Tensor,
    a_scales: Tensor,
    a_strides: tuple[int, int],
    table: Tensor,
    differ: Tensor,
    ends: Tensor,
    sizes: tuple[int, ...],
    wgrad: bool,
    tile_rows: int,
) -> None:
    blocks, consumers, registers, limit = TILES[tile_rows]
    # One row of the table, which no matrix instruction reads.
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    _kernel[(processors(a.device),)](
        descriptor(a, [ROWS.value, _BLOCK_K.value]),
        descriptor(b, [_TILE_N.value, _BLOCK_K.value]),
        TensorDescriptor(table, list(table.shape), list(table.stride()), [1, _TILE_N.value], plain),
        descriptor(rows, [ROWS.value, _TILE_N.value]),
        out,
        a_scales,
        a.shape[0],
        *a_strides,
        table,
        differ,
        ends,
        *sizes,
        WGRAD=wgrad,
        BLOCKS=blocks,
        CONSUMERS=consumers,
        REGISTERS=registers,
        num_warps=4,
        maxnreg=limit,
    )


@gluon.jit
def _value(scale):
    """The float32 value of four equal E8M0 bytes in an int32, or of a float32.

    Byte 0 gives 0 and not 2^-127, which is a subnormal float32; byte 255, beside NaNs, gives infinity.
    """
    if scale.dtype == gl.int32:
        scale = ((scale >> 1) & 0x7F800000).to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def _row_scales(scales, row, num_rows, row_stride, step_stride, first):
    """Where the scales of a block's rows are for the first step; rows that don't exist read the last one's."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
    rows = gl.minimum(row + gl.arange(0, ROWS, LAYOUT), num_rows - 1)
    return scales + (rows.to(gl.int64) * row_stride + (first // _BLOCK_K).to(gl.int64) * step_stride)


@gluon.jit
def _sums(a_scales, more_scales, step_stride, table, table_stride, a_smem, b_smem, table_smem, full, empty, order, done,
          first, last, SHARED: gl.constexpr, BLOCKS: gl.constexpr, CONSUMERS: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    """(sums of block C, sums of block C + CONSUMERS if there is one, `done` and the steps of this tile).

    SHARED: the rows of B in this tile share a scale, which `table` points to; otherwise theirs are in `table_smem`.
    """
    TWO: gl.constexpr = BLOCKS > CONSUMERS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    # Scales are read two steps ahead: the compiler moves the loads behind the wait for the products.
    final = gl.maximum(last - _BLOCK_K, first)
    ahead = (gl.minimum(first + _BLOCK_K, final) - first) // _BLOCK_K
    scale = gl.load(a_scales)
    next_scale = gl.load(a_scales + ahead.to(gl.int64) * step_stride)
    if TWO:
        more_scale = gl.load(more_scales)
        next_more = gl.load(more_scales + ahead.to(gl.int64) * step_stride)
    if SHARED:
        column_scale = gl.load(table)
        next_column = gl.load(table + ahead * table_stride)
    acc = gl.zeros((ROWS, _TILE_N), gl.float32, LAYOUT)
    more = acc
    partial = acc
    for r in range(first, last, _BLOCK_K):
        stage = done % _STAGES
        ahead = (gl.minimum(r + 2 * _BLOCK_K, final) - first) // _BLOCK_K
        mbarrier.wait(full.index(stage), (done // _STAGES) & 1)
        b = b_smem.index(stage).permute((1, 0))
        partial = warpgroup_mma(a_smem.index(stage * BLOCKS + C), b, partial, use_acc=False, is_async=True)
        factors = gl.expand_dims(_value(scale), 1)
        scale = next_scale
        next_scale = gl.load(a_scales + ahead.to(gl.int64) * step_stride)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        if SHARED:
            acc += partial * (factors * column_scale)
        else:
            acc += partial * factors * table_smem.index(stage).load(LAYOUT)
        if TWO:
            block = a_smem.index(stage * BLOCKS + C + CONSUMERS)
            partial = warpgroup_mma(block, b, partial, use_acc=False, is_async=True)
            factors = gl.expand_dims(_value(more_scale), 1)
            more_scale = next_more
            next_more = gl.load(more_scales + ahead.to(gl.int64) * step_stride)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            if SHARED:
                more += partial * (factors * column_scale)
            else:
                more += partial * factors * table_smem.index(stage).load(LAYOUT)
        mbarrier.arrive(empty.index(stage), count=1)
        if CONSUMERS == 2 and C == 0:
            mbarrier.arrive(order, count=1, pred=done == _LAG)
        if SHARED:
            column_scale = next_column
            next_column = gl.load(table + ahead * table_stride)
        done += 1
    return acc, more, done


@gluon.jit
def _store(out_desc, out, buffer, acc, more, row, count, column, N, BLOCKS: gl.constexpr, CONSUMERS: gl.constexpr,
           C: gl.constexpr):  # fmt: skip
    store_rows(out_desc, out, buffer, acc, row + C * ROWS, count - C * ROWS, column, N)
    if BLOCKS > CONSUMERS:
        offset: gl.constexpr = (C + CONSUMERS) * ROWS
        store_rows(out_desc, out, buffer, more, row + offset, count - offset, column, N)


@gluon.jit
def _multiply(out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem, b_smem, table_smem,
              out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M, N, K, WGRAD: gl.constexpr,
              BLOCKS: gl.constexpr, CONSUMERS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: blocks C, and C + CONSUMERS if there is one, of each tile."""
    TILE_M: gl.constexpr = BLOCKS * ROWS
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    done = 0
    buffer = out_smem.index(C)
    shared = gl.load(differ) == 0
    if CONSUMERS == 2 and C == 1:
        mbarrier.wait(order, 0)
    while group < num_groups:
        row, count, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M, WGRAD)
        start = gl.where(last > first, first, 0)  # an empty group may lie behind the last scale
        own = _row_scales(a_scales, row + C * ROWS, num_rows, row_stride, step_stride, start)
        second = _row_scales(a_scales, row + (C + CONSUMERS) * ROWS, num_rows, row_stride, step_stride, start)
        column *= _TILE_N
        if WGRAD:
            row += group * M
            acc, more, done = _sums(
                own, second, step_stride, table, 0, a_smem, b_smem, table_smem, full, empty, order, done, first, last,
                False, BLOCKS, CONSUMERS, C,
            )  # fmt: skip
            _store(out_desc, out, buffer, acc, more, row, count, column, N, BLOCKS, CONSUMERS, C)
        elif shared:
            square = table + (group * N + column)
            acc, more, done = _sums(
                own, second, step_stride, square, num_groups * N, a_smem, b_smem, table_smem, full, empty, order, done,
                first, last, True, BLOCKS, CONSUMERS, C,
            )  # fmt: skip
            _store(out_desc, out, buffer, acc, more, row, count, column, N, BLOCKS, CONSUMERS, C)
        else:
            acc, more, done = _sums(
                own, second, step_stride, table, 0, a_smem, b_smem, table_smem, full, empty, order, done, first, last,
                False, BLOCKS, CONSUMERS, C,
            )  # fmt: skip
            _store(out_desc, out, buffer, acc, more, row, count, column, N, BLOCKS, CONSUMERS, C)
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    if CONSUMERS == 2 and C == 0:
        mbarrier.arrive(order, count=1, pred=done <= _LAG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "row_stride", "step_stride", "num_groups", "tiles_m", "tiles_n", "M"])
def _kernel(
    a_desc,
    b_desc,
    table_desc,
    out_desc,
    out,
    a_scales,
    num_rows,
    row_stride,
    step_stride,
    table,
    differ,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    WGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [_STAGES * BLOCKS] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [_STAGES] + b_desc.block_type.shape, b_desc.layout)
    table_smem = gl.allocate_shared_memory(gl.float32, [_STAGES] + table_desc.block_type.shape, table_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = orders.index(0)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    mbarrier.init(order, count=1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem,
                             b_smem, table_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M,
                             N, K, WGRAD, BLOCKS, CONSUMERS, 0)),
                (_multiply, (out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem,
                             b_smem, table_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M,
                             N, K, WGRAD, BLOCKS, CONSUMERS, 1)),
                (load_tiles, (a_desc, b_desc, table_desc, a_smem, b_smem, table_smem, full, empty, ends, num_groups,
                              tiles_m, tiles_n, M, N, K, _TILE_N, _BLOCK_K, BLOCKS, _STAGES, WGRAD, False, False,
                              True)),
            ],
            [4, 4],
            [REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem,
                             b_smem, table_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M,
                             N, K, WGRAD, BLOCKS, CONSUMERS, 0)),
                (_multiply, (out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem,
                             b_smem, table_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M,
                             N, K, WGRAD, BLOCKS, CONSUMERS, 1)),
                (_multiply, (out_desc, out, a_scales, num_rows, row_stride, step_stride, table, differ, a_smem,
                             b_smem, table_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M,
                             N, K, WGRAD, BLOCKS, CONSUMERS, 2)),
                (load_tiles, (a_desc, b_desc, table_desc, a_smem, b_smem, table_smem, full, empty, ends, num_groups,
                              tiles_m, tiles_n, M, N, K, _TILE_N, _BLOCK_K, BLOCKS, _STAGES, WGRAD, False, False,
                              True)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
