"""Gradient of a weight of linear compression for Hopper, in Gluon: sum_b grad[b] x[b]^T.

The sum runs over the entries of the batch and their columns. It is cut into as many slices as keep all multiprocessors
busy; a program computes one tile of the result for one slice. Programs of a slice are neighbours, because they read the
same entries. Slices are added up in order, so runs give equal bits.

Tiles are those of `hopper.lce_tiles`: 3 blocks of 64 of one operand by 4 of the other, in two forms. Both operands run
along the columns, so the consumers need not know the form: only who fills which blocks of the ring differs.
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

from kernels.core.launch import Launcher, processors
from kernels.core.partial_sums import add_partial_sums
from kernels.ikbo.hopper.lce_forward import batch_descriptor, tiling
from kernels.ikbo.hopper.lce_tiles import PANELS, SHARED_PANELS

STAGES = 4

_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """sum_b grad[b] x[b]^T: [M, K] of x's dtype for grad [B, M, N] and x [B, K, N], float16 or bfloat16, any strides.

    N is a multiple of 64. Sums are float32; the scratch holds the result once a slice, in float32.
    """
    num_entries, num_rows, width = grad.shape
    depth = x.shape[1]
    if grad.numel() == 0 or x.numel() == 0:
        return x.new_zeros(num_rows, depth)
    row_tiles, column_tiles = tiling(num_rows)
    depth_blocks = -(-depth // 64)
    tiles = row_tiles * -(-depth_blocks // 4) + column_tiles * -(-depth_blocks // 3)
    steps = num_entries * (width // 64)
    slices = max(1, min(processors(x.device) // tiles, steps))
    parts = torch.empty(slices, num_rows, depth, dtype=torch.float32, device=x.device)
    constants = row_tiles, column_tiles, width // 64, STAGES
    _launch_weight(
        (slices * tiles, 1, 1), (x.device, grad.dtype, x.dtype, *constants),
        batch_descriptor(grad), batch_descriptor(x), parts, num_rows, depth, steps, slices, *constants,
    )  # fmt: skip
    return add_partial_sums(parts, x.dtype)


@gluon.jit
def _item(depth, steps, slices, ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr):
    """(slice, its first step, the step after its last, form is rows, first block of the gradient, of the inputs)."""
    depth_blocks = (depth + 63) // 64
    by_rows = (depth_blocks + 3) // 4
    by_columns = (depth_blocks + 2) // 3
    tiles = ROW_TILES * by_rows + COLUMN_TILES * by_columns
    program = gl.program_id(0)
    part = program // tiles
    tile = program % tiles
    rows = tile < ROW_TILES * by_rows
    other = tile - ROW_TILES * by_rows
    grad_block = gl.where(rows, tile // by_rows * 3, ROW_TILES * 3 + other // by_columns * 4)
    x_block = gl.where(rows, tile % by_rows * 4, other % by_columns * 3)
    begin = (part.to(gl.int64) * steps // slices).to(gl.int32)
    end = ((part + 1).to(gl.int64) * steps // slices).to(gl.int32)
    return part, begin, end, rows, grad_block, x_block


@gluon.jit
def _load_slice(
    shared_desc, own_desc, ring, full, empty, begin, end, shared_block, own_block,
    BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = shared_desc.dtype
    LAYOUT: gl.constexpr = shared_desc.layout
    for position in range(begin, end):
        step = position - begin
        stage = step % STAGES
        entry = position // BLOCKS_N
        column = position % BLOCKS_N * 64
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), PANELS * shared_desc.block_type.nbytes)
        for i in gl.static_range(PANELS):
            panel = ring.index(stage * PANELS + i)._reinterpret(dtype, [1, 64, 64], LAYOUT)
            if i < SHARED_PANELS:
                tma.async_copy_global_to_shared(
                    shared_desc, [entry, (shared_block + i) * 64, column], full.index(stage), panel
                )
            else:
                tma.async_copy_global_to_shared(
                    own_desc, [entry, (own_block + i - SHARED_PANELS) * 64, column], full.index(stage), panel
                )


@gluon.jit
def _load(
    grad_desc, x_desc, ring, full, empty, depth, steps, slices,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _part, begin, end, rows, grad_block, x_block = _item(depth, steps, slices, ROW_TILES, COLUMN_TILES)
    if rows:
        _load_slice(grad_desc, x_desc, ring, full, empty, begin, end, grad_block, x_block, BLOCKS_N, STAGES)
    else:
        _load_slice(x_desc, grad_desc, ring, full, empty, begin, end, x_block, grad_block, BLOCKS_N, STAGES)


@gluon.jit
def _store(parts, acc, shared_at, own_at, num_rows, depth, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Write an accumulator [64 of the shared blocks, 128 of the own ones] to its place in the slice's result."""
    shared = shared_at + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    own = own_at + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)), 0)
    if ROWS:
        gl.store(parts + (shared * depth + own), acc, (shared < num_rows) & (own < depth))
    else:
        gl.store(parts + (own * depth + shared), acc, (own < num_rows) & (shared < depth))


@gluon.jit
def _sum_slice(
    ring, full, empty, parts, num_rows, depth, num_steps, shared_block, own_block,
    STAGES: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = ring.dtype
    OPERAND: gl.constexpr = ring.layout
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc0 = gl.zeros((64, 128), gl.float32, LAYOUT)
    acc1 = acc0
    acc2 = acc0
    for step in range(num_steps):
        stage = step % STAGES
        first = stage * PANELS
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        own = ring.index(first + SHARED_PANELS + 2 * C)._reinterpret(dtype, [128, 64], OPERAND).permute((1, 0))
        acc0 = warpgroup_mma(ring.index(first), own, acc0, is_async=True)
        acc1 = warpgroup_mma(ring.index(first + 1), own, acc1, is_async=True)
        acc2 = warpgroup_mma(ring.index(first + 2), own, acc2, is_async=True)
        acc0, acc1, acc2 = warpgroup_mma_wait(3, deps=(acc0, acc1, acc2))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
    accumulators = (acc0, acc1, acc2)
    for i in gl.static_range(3):
        _store(
            parts, accumulators[i], (shared_block + i) * 64, (own_block + 2 * C) * 64, num_rows, depth, LAYOUT, ROWS
        )  # fmt: skip


@gluon.jit
def _consume(
    ring, full, empty, parts, num_rows, depth, steps, slices,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    part, begin, end, rows, grad_block, x_block = _item(depth, steps, slices, ROW_TILES, COLUMN_TILES)
    parts += part.to(gl.int64) * num_rows * depth
    if rows:
        _sum_slice(
            ring, full, empty, parts, num_rows, depth, end - begin, grad_block, x_block, STAGES, True, C
        )  # fmt: skip
    else:
        _sum_slice(
            ring, full, empty, parts, num_rows, depth, end - begin, x_block, grad_block, STAGES, False, C
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "depth", "steps", "slices"])
def _compress_weight_kernel(
    grad_desc, x_desc, parts, num_rows, depth, steps, slices,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = grad_desc.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(dtype, [STAGES * PANELS, 64, 64], OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (ring, full, empty, parts, num_rows, depth, steps, slices, ROW_TILES, COLUMN_TILES, STAGES, 0)),
            (_consume, (ring, full, empty, parts, num_rows, depth, steps, slices, ROW_TILES, COLUMN_TILES, STAGES, 1)),
            (_load, (grad_desc, x_desc, ring, full, empty, depth, steps, slices,
                     ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch_weight = Launcher(_compress_weight_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
