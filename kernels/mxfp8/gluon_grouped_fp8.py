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

from kernels.launch import Launcher, aligned, processors
from kernels.mxfp8.gluon_grouped_tiles import (
    COLUMNS,
    PAIRED_COLUMNS,
    PAIRED_ROWS,
    PIECES,
    ROWS,
    accept_tile,
    announcements,
    await_tile,
    descriptor,
    load_tiles,
    store_rows,
    table_descriptor,
)
from kernels.mxfp8.grouped import in_table
from kernels.mxfp8.triton_grouped import transposed_scales

_TILE_M = gl.constexpr(256)
_TILE_N = gl.constexpr(128)
_BLOCK_K = gl.constexpr(128)
_BAND = gl.constexpr(8)  # rows of tiles that are in flight together
_STAGES = gl.constexpr(4)
_LAG = gl.constexpr(2)  # steps between the consumers, so that products fill the time of epilogues
_LOADER_REGISTERS = gl.constexpr(24)

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)


def grouped_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    *,
    paired: bool = False,
    differ: Tensor | None = None,
) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] times its group's b [E, N, K], e4m3. If `paired`, a is in `grouped` pairs.

    Scales are uint8 [M, K / 32] and [E, N, K / 32], constant over 128 elements. If all 128 x 128 elements of each
    square of b share theirs, a loop with one operation less for each element runs. Rows of group e are
    ends[e - 1]:ends[e]; N and K are multiples of 128. Rows from ends[E - 1] on are not written. Scales of
    either may be in a table: BYTES of a, VALUES of b, then with `differ`.
    """
    if in_table(b_scales) and differ is None:
        raise ValueError("scales of b in a table come with `differ`: whether rows of a square have different ones")
    groups, n, k = b.shape
    out = torch.empty(a.shape[0], n, dtype=torch.bfloat16, device=a.device)
    tables = _tables(a_scales, b_scales if in_table(b_scales) else b_scales.flatten(0, 1), differ)
    sizes = (groups, 0, n // _TILE_N.value, 0, n, k)
    form = PAIRED_ROWS.value if paired else 0
    _multiplied(a, b.flatten(0, 1), out, out, tables, ends, sizes, form, wgrad=False)
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
    n, k, groups = dy_scales.shape[1 if in_table(dy_scales) else 0], x.shape[0], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=dy.device)
    tables = _tables(dy_scales, x_scales, None)
    sizes = (groups, -(-n // _TILE_M.value), k // _TILE_N.value, n, k, 0)
    form = PAIRED_COLUMNS.value if paired else 0
    _multiplied(dy, x, out, out.flatten(0, 1), tables, ends, sizes, form, wgrad=True)
    return out


def _tables(rows: Tensor, columns: Tensor, differ: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(BYTES of a, VALUES of b, what is 0 if b's squares share their scales, the 0 that tiles are counted from)."""
    if in_table(rows) and in_table(columns):
        ticket = torch.zeros(1, dtype=torch.int32, device=rows.device)
        return rows.view(torch.uint8), columns, ticket if differ is None else differ, ticket
    row_table, column_table, numbers = transposed_scales(
        rows.new_empty(0, 4 * rows.shape[0], dtype=torch.uint8) if in_table(rows) else rows,
        columns.new_empty(0, 4 * columns.shape[0], dtype=torch.uint8) if in_table(columns) else columns,
    )
    return (
        rows.view(torch.uint8) if in_table(rows) else row_table,
        columns if in_table(columns) else column_table,
        numbers if differ is None else differ,
        numbers[1:],
    )


def _multiplied(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    ends: Tensor,
    sizes: tuple[int, ...],
    form: int,
    *,
    wgrad: bool,
) -> None:
    row_scales, column_scales, differ, ticket = tables
    _launch(
        (processors(a.device), 1, 1),
        (a.device, out.dtype, ends.dtype, aligned(ends), sizes[4:], wgrad, form),
        descriptor(a, ROWS.value, _BLOCK_K.value),
        descriptor(b, _TILE_N.value, _BLOCK_K.value),
        table_descriptor(row_scales, _TILE_M.value),
        table_descriptor(column_scales, _TILE_N.value),
        descriptor(rows, ROWS.value, COLUMNS.value),
        out,
        differ,
        ticket,
        ends,
        *sizes,
        wgrad,
        form,
    )


@gluon.jit
def _row_factors(scales, C: gl.constexpr):
    """[64, 1] float32: what the rows of a tile's block C are multiplied by. `scales` [1, 256] are E8M0 bytes.

    Byte 0 gives 0 and not 2^-127, which is a subnormal float32; byte 255, beside NaNs, gives infinity.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    block = scales.slice(C * ROWS, ROWS, 1).permute((1, 0))
    return (block.load(LAYOUT).to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _add(acc, partial, rows, columns, SHARED: gl.constexpr):
    """acc + partial * rows * columns; `rows` has them both if SHARED."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    if SHARED:
        acc += partial * rows
    else:
        acc += partial * rows * columns.load(LAYOUT).to(gl.float32)
    return acc


@gluon.jit
def _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, SHARED: gl.constexpr,
          TWO: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(sums of block C, sums of block C + 2 if TWO, `done` and the steps of this tile).

    SHARED: the rows of B in this tile share a scale.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    acc = gl.zeros((ROWS, _TILE_N), gl.float32, LAYOUT)
    more = acc
    partial = acc
    for step in range(steps):
        stage = done % _STAGES
        mbarrier.wait(full.index(stage), (done // _STAGES) & 1)
        b = b_smem.index(stage).permute((1, 0))
        partial = warpgroup_mma(a_smem.index(stage * 4 + C), b, partial, use_acc=False, is_async=True)
        columns = columns_smem.index(stage)
        rows = _row_factors(rows_smem.index(stage), C)
        if TWO:
            more_rows = _row_factors(rows_smem.index(stage), C + 2)
        if SHARED:
            column = columns.slice(0, 1, 1).load(LAYOUT).to(gl.float32)
            rows *= column
            if TWO:
                more_rows *= column
        partial = warpgroup_mma_wait(0, deps=(partial,))
        acc = _add(acc, partial, rows, columns, SHARED)
        if TWO:
            block = a_smem.index(stage * 4 + C + 2)
            partial = warpgroup_mma(block, b, partial, use_acc=False, is_async=True)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            more = _add(more, partial, more_rows, columns, SHARED)
        mbarrier.arrive(empty.index(stage), count=1)
        if C == 0:
            mbarrier.arrive(order, count=1, pred=first & (step == _LAG))
        done += 1
    return acc, more, done


@gluon.jit
def _store(out_desc, out, out_smem, acc, more, row, count, column, N, TWO: gl.constexpr,
           C: gl.constexpr):  # fmt: skip
    FIRST: gl.constexpr = C * PIECES
    store_rows(out_desc, out, out_smem, acc, row + C * ROWS, count - C * ROWS, column, N, FIRST, 0)
    if TWO:
        BELOW: gl.constexpr = (C + 2) * ROWS
        PIECE: gl.constexpr = _TILE_N // COLUMNS
        store_rows(out_desc, out, out_smem, more, row + BELOW, count - BELOW, column, N, FIRST, PIECE)


@gluon.jit
def _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, first, done,
          row, count, column, steps, N, WGRAD: gl.constexpr, TWO: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    """Consumer C's part of a tile, its second block only if TWO; `done` and its steps."""
    if WGRAD:
        acc, more, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, False,
                                TWO, C)  # fmt: skip
        _store(out_desc, out, out_smem, acc, more, row, count, column, N, TWO, C)
    elif shared:
        acc, more, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, True,
                                TWO, C)  # fmt: skip
        _store(out_desc, out, out_smem, acc, more, row, count, column, N, TWO, C)
    else:
        acc, more, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, False,
                                TWO, C)  # fmt: skip
        _store(out_desc, out, out_smem, acc, more, row, count, column, N, TWO, C)
    return done


@gluon.jit
def _multiply(out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, places,
              written, read, N, WGRAD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: blocks C, and C + 2 if there is one and the tile has such rows, of each tile."""
    done = 0
    received = 0
    shared = gl.load(differ) == 0
    if C == 1:
        mbarrier.wait(order, 0)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        if count > 2 * ROWS:
            done = _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         received == 0, done, row, count, column, steps, N, WGRAD, True, C)  # fmt: skip
        else:
            done = _tile(out_desc, out, shared, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         received == 0, done, row, count, column, steps, N, WGRAD, False, C)  # fmt: skip
        if C == 0:  # the loader goes on only when both have accepted the tile
            mbarrier.arrive(order, count=1, pred=(received == 0) & (steps <= _LAG))
        received += 1
        count = await_tile(places, written, received)
    if C == 0:
        mbarrier.arrive(order, count=1, pred=received == 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["differ", "ticket", "num_groups", "tiles_m", "tiles_n", "M"])
def _kernel(
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
    a_smem = gl.allocate_shared_memory(dtype, [_STAGES * 4] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [_STAGES] + b_desc.block_type.shape, b_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.uint8, [_STAGES] + rows_desc.block_type.shape, rows_desc.layout)
    columns_smem = gl.allocate_shared_memory(
        gl.bfloat16, [_STAGES] + columns_desc.block_type.shape, columns_desc.layout
    )
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = orders.index(0)
    places, written, read = announcements(2)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(order, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, N, WGRAD, 0)),
            (_multiply, (out_desc, out, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, N, WGRAD, 1)),
            (load_tiles, (a_desc, b_desc, rows_desc, columns_desc, a_smem, b_smem, rows_smem, columns_smem, full, empty,
                          ticket, places, written, read, ends, num_groups, tiles_m, tiles_n, M, N, K, _TILE_N,
                          _BLOCK_K, _BAND, 4, _STAGES, WGRAD, A_FORM, False, True, True, False, False)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
