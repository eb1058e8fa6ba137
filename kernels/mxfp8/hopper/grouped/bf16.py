"""Grouped products of bfloat16 operands for Hopper, in Gluon: persistent, warp-specialised, TMA in and out.

A tile has 128 rows and 256 columns. One warpgroup loads, two compute, each 64 rows at the full width: narrower products
read more shared memory for each operation. One consumer starts two steps behind the other, so that its products can
fill the time of the other's epilogue.

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.counters import counter
from kernels.core.hopper import let_other_start, start
from kernels.core.launch import Launcher, aligned, processors
from kernels.mxfp8.hopper.grouped.pieces import in_pieces
from kernels.mxfp8.hopper.grouped.tiles import (
    COLUMNS,
    CONSUMER_REGISTERS,
    LAG,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PIECES,
    ROWS,
    STAGES,
    accept_tile,
    await_tile,
    barriers,
    clear_rest,
    descriptor,
    load_tiles,
    store_rows,
)

_TILE_N = gl.constexpr(256)
_BLOCK_K = gl.constexpr(64)
_BAND = gl.constexpr(16)  # rows of tiles that are in flight together
_TILE_M = gl.constexpr(2 * ROWS)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] times its group's b [E, N, K].

    Rows of group e are ends[e - 1]:ends[e]; `ends` [E] is int32 or int64. One of the last two dimensions of b is
    contiguous. N and K are multiples of 64. Rows from ends[E - 1] on are zeros.
    """
    groups, n, k = b.shape
    transposed = b.stride(1) == 1
    matrices = (b.transpose(1, 2) if transposed else b).flatten(0, 1)
    m = a.shape[0]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    block = (_BLOCK_K.value, _TILE_N.value) if transposed else (_TILE_N.value, _BLOCK_K.value)
    _multiplied(
        descriptor(a, ROWS.value, _BLOCK_K.value),
        descriptor(matrices, *block),
        out,
        out,
        ends,
        (groups, 0, -(-n // _TILE_N.value), m, n, k),
        wgrad=False,
        transposed=transposed,
    )
    return out


def grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """[E, N, K] of `dtype`, bfloat16 or float32: the sum over each group's rows of dy^T x; dy [M, N], x [M, K].

    Groups are as for `grouped_mm` and have multiples of 64 rows; N and K are multiples of 64.
    """
    n, k = dy.shape[1], x.shape[1]

    def product(ends: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(ends.shape[0], n, k, dtype=dtype, device=dy.device)
        _multiplied(
            descriptor(dy, _BLOCK_K.value, ROWS.value),
            descriptor(x, _BLOCK_K.value, _TILE_N.value),
            out,
            out.flatten(0, 1),
            ends,
            (ends.shape[0], -(-n // _TILE_M.value), -(-k // _TILE_N.value), n, k, 0),
            wgrad=True,
            transposed=True,
        )
        return out

    return in_pieces(product, ends, dy.shape[0], (n, k), (_TILE_M.value, _TILE_N.value), dtype, True)


def _multiplied(
    a: TensorDescriptor,
    b: TensorDescriptor,
    out: Tensor,
    rows: Tensor,
    ends: Tensor,
    sizes: tuple[int, ...],
    *,
    wgrad: bool,
    transposed: bool,
) -> None:
    _launch(
        (processors(out.device), 1, 1),
        (out.device, out.dtype, ends.dtype, aligned(ends), sizes[4:], wgrad, transposed),
        a,
        b,
        descriptor(rows, ROWS.value, COLUMNS.value),
        out,
        counter(out.device),
        ends,
        *sizes,
        wgrad,
        transposed,
    )


@gluon.jit
def sums_of_tile(a_smem, b_smem, full, empty, order, first, done, steps, A_T: gl.constexpr, B_T: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    """(consumer C's sums of a tile, `done` and its steps)."""
    acc = gl.zeros((ROWS, _TILE_N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    for step in range(steps):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        a = a_smem.index(stage * 2 + C)
        b = b_smem.index(stage)
        if A_T:
            a = a.permute((1, 0))
        if not B_T:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=step > 0)
        let_other_start(order, first & (step == LAG), C)
        done += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return acc, done


@gluon.jit
def _multiply(out_desc, out, a_smem, b_smem, out_smem, full, empty, order, places, written, read, N,
              WGRAD: gl.constexpr, B_T: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    done = 0
    received = 0
    start(order, C)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        acc, done = sums_of_tile(a_smem, b_smem, full, empty, order, received == 0, done, steps, WGRAD, B_T, C)
        # The loader goes on only when both have accepted the tile.
        let_other_start(order, (received == 0) & (steps <= LAG), C)
        store_rows(out_desc, out, out_smem, acc, row + C * ROWS, count - C * ROWS, column, N, C * PIECES, 0)
        received += 1
        count = await_tile(places, written, received)
    let_other_start(order, received == 0, C)
    tma.store_wait(0)


@gluon.jit
def _load(a_desc, b_desc, a_smem, b_smem, full, empty, ticket, places, written, read, out, ends, num_groups, tiles_m,
          tiles_n, M, N, K, WGRAD: gl.constexpr, B_T: gl.constexpr):  # fmt: skip
    load_tiles(a_desc, b_desc, b_desc, b_desc, a_smem, b_smem, b_smem, b_smem, full, empty, ticket, places, written,
               read, ends, num_groups, tiles_m, tiles_n, M, N, K, _TILE_N, _BLOCK_K, _BAND, 2, STAGES, WGRAD, WGRAD,
               B_T, False, False, False, WGRAD)  # fmt: skip
    if not WGRAD:
        clear_rest(out, ends, num_groups, M, N)


@gluon.jit(do_not_specialize=["num_groups", "tiles_m", "tiles_n", "M"])
def _grouped_bf16_kernel(
    a_desc,
    b_desc,
    out_desc,
    out,
    ticket,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    WGRAD: gl.constexpr,
    B_T: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * 2] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES] + out_desc.block_type.shape, out_desc.layout)
    full, empty, order, places, written, read = barriers()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, a_smem, b_smem, out_smem, full, empty, order, places, written, read, N, WGRAD,
                         B_T, 0)),
            (_multiply, (out_desc, out, a_smem, b_smem, out_smem, full, empty, order, places, written, read, N, WGRAD,
                         B_T, 1)),
            (_load, (a_desc, b_desc, a_smem, b_smem, full, empty, ticket, places, written, read, out, ends, num_groups,
                     tiles_m, tiles_n, M, N, K, WGRAD, B_T)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_grouped_bf16_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
