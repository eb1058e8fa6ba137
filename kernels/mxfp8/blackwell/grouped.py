"""Grouped products of MXFP8 operands for sm_100, in Gluon: persistent, warp-specialised, block-scaled, TMA in and out.

A grouped product is `out[row, column] = sum over r of A[row, r] * B[column, r]`, as in `hopper.grouped.tiles`, and its
tiles are numbered as there. Each program works through every `num_programs`-th tile, and three groups of warps walk the
same tiles: one warp loads, one multiplies, eight store.

A step has 128 of r. TMA brings codes and their tiles of 128 x 4 scales, 512 bytes each, through a ring of stages that
does not stop between tiles. The scales go on to tensor memory as they are, and block-scaled products read them there.
The sums take half of tensor memory, so that a second set and the scales would not fit: the storing warps read a tile
into registers, in the dtype of the result, and the next one is multiplied while they store it.

One CTA multiplies: Triton 3.7.1 refuses pairs of CTAs for copies to tensor memory and for block-scaled products.
Compiled ahead of time, never run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import UncheckedDescriptor, barrier, operand_layout, swizzled_layout
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.triton import cdiv
from kernels.mxfp8.hopper.grouped.order import locate, seek

_TILE_M = gl.constexpr(128)  # lines of an instruction, and of a tile of scales
_TILE_N = gl.constexpr(256)
_BLOCK_K = gl.constexpr(128)  # elements whose scales are in one tile
_BAND = gl.constexpr(16)  # rows of tiles that are in flight together
_STAGES = gl.constexpr(4)
_COLUMNS = gl.constexpr(32)  # of the pieces in which results are stored
_STAGING = gl.constexpr(16384)  # bytes of pieces: what the stages leave
_WARPS = gl.constexpr(8)  # that store

# Twelve warps fill the register file: Triton allots four for the two that load and multiply.
_MAX_REGISTERS = 168
_WORKER_REGISTERS = gl.constexpr(48)


def grouped_mm(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor) -> Tensor:
    """[M, N] bfloat16: each row of a [M, K] e4m3 times its group's b [E, N, K], with the scales of both in TILES.

    Groups begin at multiples of 128 rows; N and K are multiples of 16. Rows after the last end are undefined.
    """
    (m, k), (groups, n, _) = a.shape, b.shape
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    sizes = (groups, 0, cdiv(n, _TILE_N.value), m, n, k)
    _multiplied(a, a_scales, b.flatten(0, 1), b_scales, out[None], ends, sizes, wgrad=False)
    return out


def grouped_wgrad(
    dy: Tensor, dy_scales: Tensor, x: Tensor, x_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[E, N, K] of `dtype`, bfloat16 or float32: dy [N, M] e4m3 times x [K, M], summed over each group's columns.

    Scales are in TILES. Groups begin and end at multiples of 128 columns, and so does M; K is a multiple of 8.
    """
    n, k, groups = dy.shape[0], x.shape[0], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=dy.device)
    sizes = (groups, cdiv(n, _TILE_M.value), cdiv(k, _TILE_N.value), n, k, 0)
    _multiplied(dy, dy_scales, x, x_scales, out, ends, sizes, wgrad=True)
    return out


def _codes(codes: Tensor, lines: int) -> TensorDescriptor:
    layout = operand_layout(lines, _BLOCK_K.value, codes.dtype)
    return UncheckedDescriptor(codes, list(codes.shape), list(codes.stride()), [lines, _BLOCK_K.value], layout)


def _scales(scales: Tensor, codes: Tensor, lines: int) -> TensorDescriptor:
    """Of the TILES of codes, row by row, those of one matrix below those of another."""
    tiles = scales.view(-1, cdiv(codes.shape[1], _BLOCK_K.value), 2, 256)  # no side of a block exceeds 256
    block = [lines // _TILE_M.value, 1, 2, 256]
    return UncheckedDescriptor(tiles, list(tiles.shape), list(tiles.stride()), block, swizzled_layout(0, 1, 4))


def _result(out: Tensor) -> TensorDescriptor:
    layout = swizzled_layout(_COLUMNS.value * out.element_size(), out.element_size(), 3)
    block = [1, _TILE_M.value, _COLUMNS.value]
    return UncheckedDescriptor(out, list(out.shape), list(out.stride()), block, layout)


def _multiplied(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out: Tensor,
    ends: Tensor,
    sizes: tuple[int, ...],
    *,
    wgrad: bool,
) -> None:
    _launch(
        (processors(out.device), 1, 1),
        (out.device, out.dtype, ends.dtype, aligned(ends), sizes[4:], wgrad),
        _codes(a, _TILE_M.value),
        _codes(b, _TILE_N.value),
        _scales(a_scales, a, _TILE_M.value),
        _scales(b_scales, b, _TILE_N.value),
        _result(out),
        ends,
        *sizes,
        wgrad,
    )


@gluon.jit
def _scale_matrix(tiles):
    """Scales in shared memory, as TMA brought their tiles, as a matrix [lines, 4]; no byte moves."""
    TILES: gl.constexpr = tiles.shape[0]
    return tiles.reshape((TILES, 32, 4, 4)).permute((0, 2, 1, 3)).reshape((TILES * 128, 4))


@gluon.jit
def _load(a_desc, b_desc, a_scales_desc, b_scales_desc, a_smem, b_smem, a_scales, b_scales, full, empty, ends,
          num_groups, tiles_m, tiles_n, M, N, K, WGRAD: gl.constexpr):  # fmt: skip
    BYTES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    SCALES: gl.constexpr = a_scales_desc.block_type.nbytes + b_scales_desc.block_type.nbytes
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)
    loaded = 0
    while group < num_groups:
        row, _, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, _TILE_M, _BAND, WGRAD)
        # Lines of B that the next group has, too, are in columns of the result that do not exist.
        b_row = column * _TILE_N
        b_tile = b_row // _TILE_M
        if not WGRAD:
            b_row += group * N
            b_tile += group * gl.cdiv(N, _TILE_M)
        for r in range(first, last, _BLOCK_K):
            stage = loaded % _STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((loaded // _STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES + SCALES)
            tma.async_copy_global_to_shared(a_desc, [row, r], bar, a_smem.index(stage))
            tma.async_copy_global_to_shared(b_desc, [b_row, r], bar, b_smem.index(stage))
            step = r // _BLOCK_K
            tma.async_copy_global_to_shared(a_scales_desc, [row // _TILE_M, step, 0, 0], bar, a_scales.index(stage))
            tma.async_copy_global_to_shared(b_scales_desc, [b_tile, step, 0, 0], bar, b_scales.index(stage))
            loaded += 1
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)


@gluon.jit
def _multiply(a_smem, b_smem, a_scales, b_scales, sums, a_factors, b_factors, full, empty, summed, taken, ends,
              num_groups, tiles_m, tiles_n, M, K, WGRAD: gl.constexpr):  # fmt: skip
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)
    multiplied = 0
    tiles = 0
    while group < num_groups:
        _, _, _, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, _TILE_M, _BAND, WGRAD)
        mbarrier.wait(taken, (tiles & 1) ^ 1)
        for r in range(first, last, _BLOCK_K):
            stage = multiplied % _STAGES
            mbarrier.wait(full.index(stage), (multiplied // _STAGES) & 1)
            # In the order of their issue: scales are there for the products, and not overwritten before.
            tcgen05_copy(_scale_matrix(a_scales.index(stage)), a_factors)
            tcgen05_copy(_scale_matrix(b_scales.index(stage)), b_factors)
            b = b_smem.index(stage).permute((1, 0))
            tcgen05_mma_scaled(a_smem.index(stage), b, sums, a_factors, b_factors, "e4m3", "e4m3", use_acc=r > first)
            tcgen05_commit(empty.index(stage))
            multiplied += 1
        tcgen05_commit(summed)
        tiles += 1
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)


@gluon.jit
def _store(out_desc, pieces, sums, summed, taken, ends, num_groups, tiles_m, tiles_n, M, K, WGRAD: gl.constexpr):
    PARTS: gl.constexpr = _TILE_N // _COLUMNS
    PIECES: gl.constexpr = pieces.shape[0]
    LAYOUT: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (_TILE_M, _COLUMNS), TensorMemoryLayout([_TILE_M, _COLUMNS], col_stride=1), _WARPS
    )
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)
    tiles = 0
    while group < num_groups:
        row, _, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, _TILE_M, _BAND, WGRAD)
        mbarrier.wait(summed, tiles & 1)
        parts = ()
        for part in gl.static_range(PARTS):
            value = sums.slice(part * _COLUMNS, _COLUMNS).load(LAYOUT)
            if WGRAD:  # of a group without rows nothing was summed
                value = gl.where(last > first, value, 0.0)
            parts += (value.to(out_desc.dtype),)
        barrier()
        mbarrier.arrive(taken, count=1)
        matrix = group if WGRAD else zero
        for part in gl.static_range(PARTS):
            tma.store_wait(PIECES - 1)
            piece = pieces.index(part % PIECES)
            piece.store(parts[part].reshape((1, _TILE_M, _COLUMNS)))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [matrix, row, column * _TILE_N + part * _COLUMNS], piece)
        tiles += 1
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, _TILE_M, WGRAD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "tiles_m", "tiles_n", "M"])
def _grouped_block_scaled_kernel(a_desc, b_desc, a_scales_desc, b_scales_desc, out_desc, ends, num_groups, tiles_m,
                                 tiles_n, M, N, K, WGRAD: gl.constexpr):  # fmt: skip
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [_STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [_STAGES] + b_desc.block_type.shape, b_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.uint8, [_STAGES] + a_scales_desc.block_type.shape, a_scales_desc.layout)
    b_scales = gl.allocate_shared_memory(gl.uint8, [_STAGES] + b_scales_desc.block_type.shape, b_scales_desc.layout)
    PIECES: gl.constexpr = _STAGING // out_desc.block_type.nbytes
    pieces = gl.allocate_shared_memory(out_desc.dtype, [PIECES] + out_desc.block_type.shape, out_desc.layout)
    sums = allocate_tensor_memory(gl.float32, [_TILE_M, _TILE_N], TensorMemoryLayout([_TILE_M, _TILE_N], col_stride=1))
    a_factors = allocate_tensor_memory(gl.uint8, [_TILE_M, _BLOCK_K // 32], TensorMemoryScalesLayout())
    b_factors = allocate_tensor_memory(gl.uint8, [_TILE_N, _BLOCK_K // 32], TensorMemoryScalesLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed, taken = turns.index(0), turns.index(1)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(summed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_store, (out_desc, pieces, sums, summed, taken, ends, num_groups, tiles_m, tiles_n, M, K, WGRAD)),
            (_multiply, (a_smem, b_smem, a_scales, b_scales, sums, a_factors, b_factors, full, empty, summed, taken,
                         ends, num_groups, tiles_m, tiles_n, M, K, WGRAD)),
            (_load, (a_desc, b_desc, a_scales_desc, b_scales_desc, a_smem, b_smem, a_scales, b_scales, full, empty,
                     ends, num_groups, tiles_m, tiles_n, M, N, K, WGRAD)),
        ],
        [1, 1],
        [_WORKER_REGISTERS, _WORKER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_grouped_block_scaled_kernel, num_warps=_WARPS.value, maxnreg=_MAX_REGISTERS)
