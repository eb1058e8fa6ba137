"""Grouped products of bfloat16 operands for Hopper, in Gluon: persistent, warp-specialised, TMA in and out.

A tile has 192 rows and 256 columns. One warpgroup loads, two compute. Each of these two has 64 rows of the tile at its
full width, and a half of the last 64 rows: products of the full width read less shared memory for each operation than
those of 128 columns, and a tile of 192 rows loads less for each operation than one of 128. One consumer starts two
steps behind the other, so that its products can fill the time of the other's epilogue.

A tile with at most 128 rows, the last of its group, leaves the last 64 out. Where rounds of tiles of 192 rows would
leave many programs without work in the last round, all tiles have 128.
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

from kernels.launch import processors
from kernels.mxfp8.gluon_grouped_tiles import (
    ROWS,
    descriptor,
    load_tiles,
    locate,
    seek,
    store_rows,
)

_TILE_N = gl.constexpr(256)
_BLOCK_K = gl.constexpr(64)
_STAGES = {2: 4, 3: 3}  # by blocks of 64 rows in a tile: what fits into shared memory
_LAG = gl.constexpr(2)  # steps between the consumers; fewer than there are stages
_LARGER_IS_FASTER = 1.25  # an estimate, not measured: tiles of 128 rows load 1.29 times as much for each operation

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor, blocks: int | None = None) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] times its group's b [E, N, K].

    Rows of group e are ends[e - 1]:ends[e]; `ends` [E] is int32 or int64. Either of the last two dimensions of b is the
    contiguous one. N and K are multiples of 64. Rows from ends[E - 1] on are not written. `blocks` of 64 rows make a
    tile, 2 or 3; by default the number that takes less time.
    """
    groups, n, k = b.shape
    transposed = b.stride(1) == 1
    matrices = (b.transpose(1, 2) if transposed else b).flatten(0, 1)
    m = a.shape[0]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles_n = -(-n // _TILE_N.value)
    blocks = blocks or _blocks(m, tiles_n, a.device)
    _kernel[(processors(a.device),)](
        descriptor(a, [ROWS.value, _BLOCK_K.value]),
        descriptor(matrices, [_BLOCK_K.value, _TILE_N.value] if transposed else [_TILE_N.value, _BLOCK_K.value]),
        descriptor(out, [ROWS.value, 128]),
        out,
        ends,
        groups,
        0,
        tiles_n,
        0,
        n,
        k,
        WGRAD=False,
        B_T=transposed,
        BLOCKS=blocks,
        STAGES=_STAGES[blocks],
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )
    return out


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype, blocks: int | None = None) -> Tensor:
    """[E, N, K] of `dtype`, bfloat16 or float32: the sum over each group's rows of dy^T x; dy [M, N], x [M, K].

    Groups are as for `grouped_mm` and have multiples of 64 rows; N and K are multiples of 64.
    """
    n, k, groups = dy.shape[1], x.shape[1], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=dy.device)
    tiles_n = -(-k // _TILE_N.value)
    blocks = blocks or _blocks(n, groups * tiles_n, dy.device)
    _kernel[(processors(dy.device),)](
        descriptor(dy, [_BLOCK_K.value, ROWS.value]),
        descriptor(x, [_BLOCK_K.value, _TILE_N.value]),
        descriptor(out.flatten(0, 1), [ROWS.value, 128 if dtype is torch.bfloat16 else 64]),
        out,
        ends,
        groups,
        -(-n // (blocks * ROWS.value)),
        tiles_n,
        n,
        k,
        0,
        WGRAD=True,
        B_T=True,
        BLOCKS=blocks,
        STAGES=_STAGES[blocks],
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )
    return out


def _blocks(rows: int, columns: int, device: torch.device) -> int:
    """Blocks of 64 rows in a tile, for the product that ends first; `columns` counts tiles side by side."""

    def rounds(blocks: int) -> int:
        tiles = -(-rows // (blocks * ROWS.value)) * columns
        return -(-tiles // processors(device))

    return 2 if 2 * _LARGER_IS_FASTER * rounds(2) < 3 * rounds(3) else 3


@gluon.jit
def _tile(out_desc, out, a_smem, b_smem, buffer, full, empty, order, done, row, count, column, first, last, N,
          ALL: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    """Consumer C's part of a tile; `done` and its steps. The last 64 of 192 rows only if ALL."""
    wide = gl.zeros((ROWS, 256), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    narrow = gl.zeros((ROWS, 128), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
    for r in range(first, last, _BLOCK_K):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        b = b_smem.index(stage)
        half = b.slice(C * 128, 128, 1 if B_T else 0)
        own = a_smem.index(stage * BLOCKS + C)
        if not B_T:
            b = b.permute((1, 0))
            half = half.permute((1, 0))
        if A_T:
            own = own.permute((1, 0))
        wide = warpgroup_mma(own, b, wide, is_async=True)
        if ALL:
            shared = a_smem.index(stage * BLOCKS + 2)
            if A_T:
                shared = shared.permute((1, 0))
            narrow = warpgroup_mma(shared, half, narrow, is_async=True)
            wide, narrow = warpgroup_mma_wait(2, deps=(wide, narrow))
        else:
            wide = warpgroup_mma_wait(1, deps=(wide,))
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=r > first)
        if C == 0:
            mbarrier.arrive(order, count=1, pred=done == _LAG)
        done += 1
    wide, narrow = warpgroup_mma_wait(0, deps=(wide, narrow))
    mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=last > first)
    store_rows(out_desc, out, buffer, wide, row + C * ROWS, count - C * ROWS, column, N)
    if ALL:
        store_rows(out_desc, out, buffer, narrow, row + 2 * ROWS, count - 2 * ROWS, column + C * 128, N)
    return done


@gluon.jit
def _multiply(out_desc, out, a_smem, b_smem, out_smem, full, empty, order, ends, num_groups, tiles_m, tiles_n, M, N, K,
              WGRAD: gl.constexpr, B_T: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Consumer C."""
    TILE_M: gl.constexpr = BLOCKS * ROWS
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    done = 0
    buffer = out_smem.index(C)
    if C == 1:
        mbarrier.wait(order, 0)
    while group < num_groups:
        row, count, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M, WGRAD)
        if WGRAD:
            row += group * M
        column *= _TILE_N
        if BLOCKS == 2:
            done = _tile(out_desc, out, a_smem, b_smem, buffer, full, empty, order, done, row, count, column, first,
                         last, N, False, WGRAD, B_T, BLOCKS, STAGES, C)  # fmt: skip
        elif count > 2 * ROWS:
            done = _tile(out_desc, out, a_smem, b_smem, buffer, full, empty, order, done, row, count, column, first,
                         last, N, True, WGRAD, B_T, BLOCKS, STAGES, C)  # fmt: skip
        else:
            done = _tile(out_desc, out, a_smem, b_smem, buffer, full, empty, order, done, row, count, column, first,
                         last, N, False, WGRAD, B_T, BLOCKS, STAGES, C)  # fmt: skip
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    if C == 0:  # a program with less work than the lag lets the other consumer see that there is none
        mbarrier.arrive(order, count=1, pred=done <= _LAG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "tiles_m", "tiles_n", "M"])
def _kernel(
    a_desc,
    b_desc,
    out_desc,
    out,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    WGRAD: gl.constexpr,
    B_T: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * BLOCKS] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = orders.index(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(order, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, a_smem, b_smem, out_smem, full, empty, order, ends, num_groups, tiles_m,
                         tiles_n, M, N, K, WGRAD, B_T, BLOCKS, STAGES, 0)),
            (_multiply, (out_desc, out, a_smem, b_smem, out_smem, full, empty, order, ends, num_groups, tiles_m,
                         tiles_n, M, N, K, WGRAD, B_T, BLOCKS, STAGES, 1)),
            (load_tiles, (a_desc, b_desc, b_desc, a_smem, b_smem, b_smem, full, empty, ends, num_groups, tiles_m,
                          tiles_n, M, N, K, _TILE_N, _BLOCK_K, BLOCKS, STAGES, WGRAD, WGRAD, B_T, False)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip
