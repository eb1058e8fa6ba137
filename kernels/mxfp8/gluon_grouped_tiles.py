"""What the grouped products for Hopper share: which tile a program works on, loading its operands, storing its result.

A grouped product is `out[row, column] = sum over r of A[row, r] * B[column, r]`. Forward and input gradient have a
matrix B per group, and a group's rows are its rows of A and of the result. The weight gradient has a result per group,
and a group's rows are what it sums over.

Tiles are numbered group by group, so that a group's operands are read while they are in L2; within a group they run
through bands of BAND rows of tiles, column by column, so that the tiles in flight at a time form a near-square region.
A tile never crosses into the next group. Program p takes tiles p, p + P, ...; each role of a program walks the groups
for itself, on the device, and only ever forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BAND = gl.constexpr(8)
ROWS = gl.constexpr(64)  # of one accumulator: a matrix instruction has 64

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv}


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA descriptor of blocks of a matrix, in shared memory in the layout that matrix instructions read."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@gluon.jit
def _bounds(ends, group):
    """Begin and end of a group, read where they are used: MLIR takes a value that is carried around a loop only to
    bound a loop inside it for dead, and every tile would do as many steps as the first."""
    begin = gl.load(ends + gl.maximum(group - 1, 0)).to(gl.int32)
    return gl.where(group > 0, begin, 0), gl.load(ends + group).to(gl.int32)


@gluon.jit
def _count(ends, group, tiles_m, tiles_n, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """Tiles of a group: `tiles_m` x `tiles_n` if WGRAD, otherwise a row of tiles for each TILE_M of its rows."""
    if WGRAD:
        count = tiles_m * tiles_n
    else:
        begin, end = _bounds(ends, group)
        count = gl.cdiv(end - begin, TILE_M) * tiles_n
    return count


@gluon.jit
def seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """(group that `tile` is in, number of that group's first tile), from those of an earlier tile.

    Start with group 0 and base 0. Behind the last tile the group is `num_groups`.
    """
    count = _count(ends, gl.minimum(group, num_groups - 1), tiles_m, tiles_n, TILE_M, WGRAD)
    while (group < num_groups) & (tile >= base + count):
        base += count
        group += 1
        count = _count(ends, gl.minimum(group, num_groups - 1), tiles_m, tiles_n, TILE_M, WGRAD)
    return group, base


@gluon.jit
def locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """Of a tile: (row of A, how many rows there are from it on, column of tiles, first r, end of r)."""
    begin, end = _bounds(ends, group)
    if not WGRAD:
        tiles_m = gl.cdiv(end - begin, TILE_M)
    inside = tile - base
    band = inside // (BAND * tiles_n)
    rows = gl.minimum(tiles_m - band * BAND, BAND)
    inside -= band * (BAND * tiles_n)
    row = (band * BAND + inside % rows) * TILE_M
    column = inside // rows
    if WGRAD:
        return row, M - row, column, begin, end
    return begin + row, end - begin - row, column, begin * 0, K


@gluon.jit
def _block(desc, position, r, full, smem, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:
        tma.async_copy_global_to_shared(desc, [r, position], full, smem)
    else:
        tma.async_copy_global_to_shared(desc, [position, r], full, smem)


@gluon.jit
def load_tiles(
    a_desc,
    b_desc,
    table_desc,
    a_smem,
    b_smem,
    table_smem,
    full,
    empty,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    TILE_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
    A_T: gl.constexpr,
    B_T: gl.constexpr,
    TABLE: gl.constexpr,
):
    """The loading warpgroup: the ring of stages never stops between tiles.

    A stage has BLOCKS blocks of ROWS rows of A, of which those behind 128 are left out when the tile has no such rows,
    and TILE_N rows of B. A_T and B_T: the operand lies in memory with r along its rows. TABLE: a stage also has a row
    of the table of the scales of B, whose rows are blocks of r.
    """
    FIXED: gl.constexpr = b_desc.block_type.nbytes + (table_desc.block_type.nbytes if TABLE else 0)
    TILE_M: gl.constexpr = BLOCKS * ROWS
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    loaded = 0
    while group < num_groups:
        row, count, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M, WGRAD)
        for r in range(first, last, BLOCK_K):
            stage = loaded % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            if count > 2 * ROWS:
                mbarrier.expect(bar, BLOCKS * a_desc.block_type.nbytes + FIXED)
                for c in gl.static_range(2, BLOCKS):
                    _block(a_desc, row + c * ROWS, r, bar, a_smem.index(stage * BLOCKS + c), A_T)
            else:
                mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + FIXED)
            for c in gl.static_range(2):
                _block(a_desc, row + c * ROWS, r, bar, a_smem.index(stage * BLOCKS + c), A_T)
            if WGRAD:
                position = column * TILE_N
            else:
                position = group * N + column * TILE_N
            if TABLE:
                _block(table_desc, position, r // BLOCK_K, bar, table_smem.index(stage), True)
            if B_T and not WGRAD:
                _block(b_desc, column * TILE_N, group * K + r, bar, b_smem.index(stage), True)
            else:
                _block(b_desc, position, r, bar, b_smem.index(stage), B_T)
            loaded += 1
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)


@gluon.jit
def halves(x):
    """The left and the right half of an accumulator."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_rows(out_desc, out, buffer, value, row, count, column, N):
    """Write the first `count` of ROWS rows of the result: bfloat16 through shared memory, float32 from registers."""
    if out_desc.dtype == gl.float32:
        # Four threads of a matrix instruction's result have a whole sector of 32 bytes.
        _store_masked(out, value, row, count, column, N)
    elif value.shape[1] > buffer.shape[1]:
        left, right = halves(value)
        store_rows(out_desc, out, buffer, left, row, count, column, N)
        store_rows(out_desc, out, buffer, right, row, count, column + value.shape[1] // 2, N)
    else:
        tma.store_wait(0)
        buffer.store(value.to(out_desc.dtype))
        if count >= ROWS:
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, column], buffer)
        elif count > 0:  # a whole block would write over the next group's rows
            WIDTH: gl.constexpr = buffer.shape[1]
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
            _store_masked(out, buffer.load(LAYOUT), row, count, column, N)


@gluon.jit
def _store_masked(out, value, row, count, column, N):
    LAYOUT: gl.constexpr = value.type.layout
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = out + gl.expand_dims((row + rows).to(gl.int64) * N, 1) + gl.expand_dims(columns, 0)
    gl.store(pointers, value, gl.expand_dims(rows < count, 1) & gl.expand_dims(columns < N, 0))
