"""A product of many rows with a small weight for Hopper, in Gluon, for kernels that finish its sums in their own way.

A tile has 128 rows and 128 or 256 columns. One warpgroup loads by TMA, two compute, each 64 rows at the full width; one
consumer starts two steps behind the other, so that its products can fill the time of the other's epilogue. A program is
persistent and keeps to tiles of the same columns. Tiles lie in fixed order: results are the same bits every time.
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

from kernels.core.hopper import UncheckedDescriptor, let_other_start, operand_layout, ring
from kernels.core.launch import processors
from kernels.core.triton import cdiv

ROWS = gl.constexpr(64)  # of a consumer: a matrix instruction has 64
BLOCK_K = gl.constexpr(64)
PIECE = gl.constexpr(64)  # columns of a result that are stored together
PLACES = gl.constexpr(4)  # for pieces of a consumer in shared memory
STAGES = gl.constexpr(3)  # what fits into shared memory beside them
LAG = gl.constexpr(2)  # steps between the consumers; fewer than stages

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
MAX_REGISTERS = 168
CONSUMER_REGISTERS = gl.constexpr(240)
LOADER_REGISTERS = gl.constexpr(24)


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of blocks of a matrix, in shared memory as matrix instructions read them."""
    layout = operand_layout(rows, columns, x.dtype)
    return UncheckedDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def programs(device: torch.device, width: int, columns: int) -> int:
    """How many: as many for each tile of columns as fit on the device together, one at least."""
    tiles = cdiv(width, columns)
    return max(1, processors(device) // tiles) * tiles


@gluon.jit
def place_of(N, COLUMNS: gl.constexpr):
    """(first row of the program's first tile, rows to the next one, its first column, its number in that column)."""
    tiles = gl.cdiv(N, COLUMNS)
    line = gl.program_id(0) // tiles
    return line * 2 * ROWS, gl.num_programs(0) // tiles * 2 * ROWS, gl.program_id(0) % tiles * COLUMNS, line


@gluon.jit
def shared_memory(x_desc, w_desc, piece_desc):
    """(blocks of x and of the weight in the ring, places of pieces, barriers of full stages, of empty ones, and of the
    consumers' order)."""
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2] + x_desc.block_type.shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    pieces = gl.allocate_shared_memory(dtype, [2 * PLACES] + piece_desc.block_type.shape, piece_desc.layout)
    full, empty, order = ring(STAGES)
    return x_smem, w_smem, pieces, full, empty, order


@gluon.jit
def sums_of_tile(x_smem, w_smem, z_desc, z_smem, full, empty, order, z_full, row, column, first, done, steps,
                 COLUMNS: gl.constexpr, W_T: gl.constexpr, Z: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(consumer C's sums of a tile, `done` and its steps). W_T: the weight is [N, K]. Z: its tile of z is on the way
    behind them, to where results before are still read from at the tile's begin."""
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    for step in range(steps):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        x = x_smem.index(stage * 2 + C)
        w = w_smem.index(stage)
        if W_T:
            w = w.permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        if Z:
            _fetch(z_desc, z_smem, z_full, row, column, step == gl.minimum(LAG, steps - 1), COLUMNS, C)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=step > 0)
        let_other_start(order, first & (step == LAG), C)
        done += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
    let_other_start(order, first & (steps <= LAG), C)
    return acc, done


@gluon.jit
def _fetch(z_desc, z_smem, z_full, row, column, now, COLUMNS: gl.constexpr, C: gl.constexpr):
    if now:
        tma.store_wait(0)
        mbarrier.expect(z_full, COLUMNS // PIECE * z_desc.block_type.nbytes)
        for piece in gl.static_range(COLUMNS // PIECE):
            smem = z_smem.index(C * PLACES + piece)
            tma.async_copy_global_to_shared(z_desc, [row, column + piece * PIECE], z_full, smem)


@gluon.jit
def put(desc, smem, value, row, column):
    """Store a piece through a place in shared memory."""
    smem.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], smem)


@gluon.jit
def load_tiles(x_desc, w_desc, x_smem, w_smem, full, empty, M, N, K, COLUMNS: gl.constexpr, W_T: gl.constexpr):
    """The loading warpgroup: the ring of stages never stops between tiles."""
    first, stride, column, _line = place_of(N, COLUMNS)
    loaded = 0
    for row in range(first, M, stride):
        for k in range(0, K, BLOCK_K):
            stage = loaded % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(x_desc, [row + c * ROWS, k], bar, x_smem.index(stage * 2 + c))
            if W_T:
                tma.async_copy_global_to_shared(w_desc, [column, k], bar, w_smem.index(stage))
            else:
                tma.async_copy_global_to_shared(w_desc, [k, column], bar, w_smem.index(stage))
            loaded += 1
