"""The copying and the computing warpgroups of `hopper.square.inner` with float32 operands.

Tensor cores take them from shared memory only with what is summed over along their lines. So the transpose of the
result is made: what is multiplied comes by registers, which any order does, and blocks of the matrix are put into
shared memory an element at a time, in the order that they should have there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.hopper import barrier, halves
from kernels.jagged.hopper.linear.consumer_fp32 import high_and_rest
from kernels.jagged.hopper.square.tiles import ROWS, tile_numbers

PLACES = gl.constexpr(32)  # of a block, a line of 128 bytes of a block of the matrix


@gluon.jit
def _copied(full, blocks):
    """The block before has arrived."""
    SQUARES: gl.constexpr = full.shape[0]
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index((blocks - 1) % SQUARES), count=1)


@gluon.jit
def copy_single(a, squares, rests, tiles, barriers, LINES: gl.constexpr, THRICE: gl.constexpr):
    """Warps that copy the blocks of the matrix as [place of the tile, of the block], with zeros behind the row."""
    _own_full, _own_empty, _full, _empty, full, empty = barriers
    SQUARES: gl.constexpr = squares.shape[0]
    # Lanes take neighbouring elements.
    LAYOUT: gl.constexpr = (
        gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        if LINES
        else gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
    )
    own_place = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    block_place = gl.arange(0, PLACES, gl.SliceLayout(0, LAYOUT))
    number = 0
    blocks = 0
    first, _begin, count, square = tile_numbers(tiles, number)
    while count > 0:
        corner = a + square + (first.to(gl.int64) * count if LINES else first)
        if LINES:
            at = gl.expand_dims(own_place * count, 1) + gl.expand_dims(block_place, 0)
        else:
            at = gl.expand_dims(own_place, 1) + gl.expand_dims(block_place * count, 0)
        for start in range(0, count, PLACES):
            mask = gl.expand_dims(own_place < count - first, 1) & gl.expand_dims(block_place < count - start, 0)
            slot = blocks % SQUARES
            if THRICE:
                high, rest = high_and_rest(gl.load(corner + at, mask=mask, other=0))
                mbarrier.wait(empty.index(slot), ((blocks // SQUARES) & 1) ^ 1)
                squares.index(slot).store(high)
                rests.index(slot).store(rest)
                fence_async_shared()
                barrier()
                mbarrier.arrive(full.index(slot), count=1)
            else:
                mbarrier.wait(empty.index(slot), ((blocks // SQUARES) & 1) ^ 1)
                async_copy.async_copy_global_to_shared(squares.index(slot), corner + at, mask=mask)
                async_copy.commit_group()
                if blocks > 0:
                    async_copy.wait_group(1)
                    _copied(full, blocks)
            corner += PLACES if LINES else PLACES * count
            blocks += 1
        number += 1
        first, _begin, count, square = tile_numbers(tiles, number)
    if not THRICE:
        async_copy.wait_group(0)
        if blocks > 0:
            _copied(full, blocks)


@gluon.jit
def _store_pairs(da, pairs, first, start, count, LINES: gl.constexpr):
    """The places of a tile from `first` on with those of a block from `start` on, of a matrix at da."""
    if pairs.shape[1] > 16:
        left, right = halves(pairs)
        _store_pairs(da, left, first, start, count, LINES)
        _store_pairs(da, right, first, start + 16, count, LINES)
    else:
        SINGLE: gl.constexpr = (
            gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
            if LINES
            else gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
        )
        own_place = first + gl.arange(0, pairs.shape[0], gl.SliceLayout(1, SINGLE))
        block_place = start + gl.arange(0, pairs.shape[1], gl.SliceLayout(0, SINGLE))
        if LINES:
            at = gl.expand_dims(da + own_place.to(gl.int64) * count, 1) + gl.expand_dims(block_place, 0)
        else:
            at = gl.expand_dims(da + block_place.to(gl.int64) * count, 0) + gl.expand_dims(own_place, 1)
        mask = gl.expand_dims(own_place < count, 1) & gl.expand_dims(block_place < count, 0)
        gl.store(at, gl.convert_layout(pairs, SINGLE), mask)


@gluon.jit
def _thrice(z, block, squares, rests, tall, LAYOUT: gl.constexpr):
    """z + the transpose of the block's first `tall` places times a block of the matrix, in three products."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    place = gl.arange(0, PLACES // 2, gl.SliceLayout(0, OPERAND))
    part = gl.zeros(z.shape, gl.float32, LAYOUT)
    for h in gl.static_range(2):
        value = block.slice(h * (PLACES // 2), PLACES // 2, 0).permute((1, 0)).load(OPERAND)
        value = gl.where(gl.expand_dims(place < tall - h * (PLACES // 2), 0), value, 0.0)
        high, rest = high_and_rest(value)
        square = squares.slice(h * (PLACES // 2), PLACES // 2, 1).permute((1, 0))
        square_rest = rests.slice(h * (PLACES // 2), PLACES // 2, 1).permute((1, 0))
        part = warpgroup_mma(rest, square, part, use_acc=h > 0, is_async=True)
        part = warpgroup_mma(high, square_rest, part, is_async=True)
        part = warpgroup_mma(high, square, part, is_async=True)
        part, high, rest = warpgroup_mma_wait(0, deps=(part, high, rest))
    # Tensor cores round sums towards zero, threads to nearest: they add what blocks have.
    return z + part


@gluon.jit
def multiply_single(da, out, streams, owns, squares, rests, tiles, barriers, LINES: gl.constexpr,
                    GRADIENTS: gl.constexpr, THRICE: gl.constexpr, D: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: one half of the columns of the result, and da of every other block."""
    own_full, own_empty, full, empty, square_full, square_empty = barriers
    TILES: gl.constexpr = own_full.shape[0]
    BLOCKS: gl.constexpr = full.shape[0]
    SQUARES: gl.constexpr = squares.shape[0]
    WIDTH: gl.constexpr = streams.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLACES, 8])
    column = C * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))
    own_place = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    block_place = gl.arange(0, PLACES, gl.SliceLayout(0, OPERAND))
    number = 0
    blocks = 0
    first, begin, count, square = tile_numbers(tiles, number)
    while count > 0:
        own_slot = number % TILES
        if GRADIENTS:
            mbarrier.wait(own_full.index(own_slot), (number // TILES) & 1)
        z = gl.zeros((WIDTH, ROWS), gl.float32, LAYOUT)
        for start in range(0, count, PLACES):
            slot = blocks % BLOCKS
            square_slot = blocks % SQUARES
            mbarrier.wait(full.index(slot), (blocks // BLOCKS) & 1)
            mine = streams.index(slot * 2 + C)
            pairs = gl.zeros((ROWS, PLACES), gl.float32, PAIRS)
            if THRICE:
                mbarrier.wait(square_full.index(square_slot), (blocks // SQUARES) & 1)
                z = _thrice(z, mine, squares.index(square_slot), rests.index(square_slot), count - start, LAYOUT)
            else:
                value = mine.permute((1, 0)).load(OPERAND)
                # The places of another row need not be finite.
                value = gl.where(gl.expand_dims(block_place < count - start, 0), value, 0.0)
                mbarrier.wait(square_full.index(square_slot), (blocks // SQUARES) & 1)
                z = warpgroup_mma(value, squares.index(square_slot).permute((1, 0)), z, is_async=True)
                if GRADIENTS and blocks % 2 == C:
                    product = pairs
                    for p in gl.static_range(2):
                        block = streams.index(slot * 2 + p).permute((1, 0))
                        product = warpgroup_mma(
                            owns.index(own_slot * 2 + p), block, product, use_acc=p > 0, is_async=True
                        )
                    pairs = warpgroup_mma_wait(0, deps=(product,))
                z, value = warpgroup_mma_wait(0, deps=(z, value))
            barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(square_empty.index(square_slot), count=1)
            if GRADIENTS and blocks % 2 == C:
                _store_pairs(da + square, pairs, first, start, count, LINES)
            blocks += 1
        if GRADIENTS:
            barrier()
            mbarrier.arrive(own_empty.index(own_slot), count=1)
        # Eight threads of a matrix instruction's result have a whole sector of 32 bytes.
        at = gl.expand_dims(own_place * D, 0) + gl.expand_dims(column, 1)
        mask = gl.expand_dims(own_place < count - first, 0) & gl.expand_dims(column < D, 1)
        gl.store(out + (begin + first).to(gl.int64) * D + at, z, mask)
        number += 1
        first, begin, count, square = tile_numbers(tiles, number)
