"""The copying and the computing warpgroups of `hopper.square.inner` in half precision."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.hopper import barrier, halves
from kernels.jagged.hopper.square.tiles import ROWS, tile_numbers


@gluon.jit
def _block_of(a, first, start, count, square, LINES: gl.constexpr):
    """A block of a row's matrix: lines from `first` and columns from `start` on if LINES, else the other way round."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    line = first if LINES else start
    column = start if LINES else first
    # 64-bit arithmetic for the corner of a block, 32-bit within it.
    at = gl.expand_dims(a + square + line.to(gl.int64) * count + column + i * count, 1) + gl.expand_dims(j, 0)
    mask = gl.expand_dims(i < count - line, 1) & gl.expand_dims(j < count - column, 0)
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def copy_half(a, squares, tiles, barriers, LINES: gl.constexpr, COPIES: gl.constexpr, C: gl.constexpr):
    """Warps that copy every COPIES-th block of the matrix, with zeros behind the end of the row."""
    _own_full, _own_empty, _full, _empty, square_full, square_empty = barriers
    SQUARES: gl.constexpr = squares.shape[0]
    number = 0
    blocks = 0
    first, _begin, count, square = tile_numbers(tiles, number)
    while count > 0:
        for start in range(0, count, ROWS):
            if blocks % COPIES == C:
                value = _block_of(a, first, start, count, square, LINES)
                slot = blocks % SQUARES
                mbarrier.wait(square_empty.index(slot), ((blocks // SQUARES) & 1) ^ 1)
                squares.index(slot).store(value)
                fence_async_shared()
                barrier()
                mbarrier.arrive(square_full.index(slot), count=1)
            blocks += 1
        number += 1
        first, _begin, count, square = tile_numbers(tiles, number)


@gluon.jit
def _clear_behind(block, count):
    """Zeros for the places of a block from `count` on: those of another row need not be finite."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    value = block.load(LAYOUT)
    block.store(gl.where(gl.expand_dims(place < count, 1), value, gl.zeros_like(value)))
    fence_async_shared()
    barrier()


@gluon.jit
def _store(out, z, tall, column, D: gl.constexpr):
    """The first `tall` places of columns from `column` on."""
    if z.shape[1] > 64:
        left, right = halves(z)
        HALF: gl.constexpr = z.shape[1] // 2
        _store(out, left, tall, column, D)
        _store(out, right, tall, column + HALF, D)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        value = gl.convert_layout(z.to(out.dtype.element_ty), LAYOUT)
        place = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
        at = gl.expand_dims(out + place * D, 1) + gl.expand_dims(columns, 0)
        gl.store(at, value, gl.expand_dims(place < tall, 1) & gl.expand_dims(columns < D, 0))


@gluon.jit
def _store_pairs(da, pairs, line, column, count):
    """A block of a matrix of `count` lines at da, from the given line and column on."""
    # Matrices begin anywhere: lanes take neighbouring elements.
    SINGLE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    line += gl.arange(0, ROWS, gl.SliceLayout(1, SINGLE))
    column += gl.arange(0, ROWS, gl.SliceLayout(0, SINGLE))
    at = gl.expand_dims(da + line.to(gl.int64) * count, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(line < count, 1) & gl.expand_dims(column < count, 0)
    gl.store(at, gl.convert_layout(pairs, SINGLE), mask)


@gluon.jit
def multiply_half(da, out, streams, owns, squares, tiles, barriers, LINES: gl.constexpr, GRADIENTS: gl.constexpr,
                  D: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: one half of the columns of the result, and da of every other block."""
    own_full, own_empty, full, empty, square_full, square_empty = barriers
    TILES: gl.constexpr = own_full.shape[0]
    BLOCKS: gl.constexpr = full.shape[0]
    SQUARES: gl.constexpr = squares.shape[0]
    WIDTH: gl.constexpr = streams.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    number = 0
    blocks = 0
    first, begin, count, square = tile_numbers(tiles, number)
    while count > 0:
        own_slot = number % TILES
        if GRADIENTS:
            mbarrier.wait(own_full.index(own_slot), (number // TILES) & 1)
        z = gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)
        for start in range(0, count, ROWS):
            slot = blocks % BLOCKS
            square_slot = blocks % SQUARES
            mbarrier.wait(full.index(slot), (blocks // BLOCKS) & 1)
            if count - start < ROWS:
                _clear_behind(streams.index(slot * 2 + C), count - start)
            mbarrier.wait(square_full.index(square_slot), (blocks // SQUARES) & 1)
            left = squares.index(square_slot)
            left = left if LINES else left.permute((1, 0))
            z = warpgroup_mma(left, streams.index(slot * 2 + C), z, is_async=True)
            pairs = gl.zeros((ROWS, ROWS), gl.float32, PAIRS)
            if GRADIENTS and blocks % 2 == C:
                product = pairs
                for p in gl.static_range(2):
                    own = owns.index(own_slot * 2 + p)
                    block = streams.index(slot * 2 + p)
                    lines, columns = (own, block) if LINES else (block, own)
                    product = warpgroup_mma(lines, columns.permute((1, 0)), product, use_acc=p > 0, is_async=True)
                pairs = warpgroup_mma_wait(0, deps=(product,))
            z = warpgroup_mma_wait(0, deps=(z,))
            barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(square_empty.index(square_slot), count=1)
            if GRADIENTS and blocks % 2 == C:
                line, column = (first, start) if LINES else (start, first)
                _store_pairs(da + square, pairs.to(da.dtype.element_ty), line, column, count)
            blocks += 1
        if GRADIENTS:
            barrier()
            mbarrier.arrive(own_empty.index(own_slot), count=1)
        _store(out + (begin + first).to(gl.int64) * D, z, count - first, C * WIDTH, D)
        number += 1
        first, begin, count, square = tile_numbers(tiles, number)
