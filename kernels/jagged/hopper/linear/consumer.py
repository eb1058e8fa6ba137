"""The computing warpgroups of `jagged_linear` on Hopper in half precision; `hopper.linear` has the whole.

A consumer has 128 columns at most: half of those of each tile of 64 values, or all of every other one. The product of
its next tile runs on the tensor cores while it finishes this one. Results leave through shared memory by TMA.

Biases are a product as well, because threads that look each up and add it are what a tile waits for: the rows of a
tile's places follow each other, so that the biases of the first WINDOW of them, and of all places, are 16 more lines of
the weight, and a matrix of ones and zeros says which of them a place adds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.hopper import barrier, halves
from kernels.jagged.hopper.linear.tiles import ROWS, WINDOW
from kernels.jagged.triton.activations import activate, kept


@gluon.jit
def _put(desc, slot, value, first, column):
    """To global memory through `slot`, once what it had before has been copied out."""
    tma.store_wait(0)
    slot.store(value.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [first, column], slot)


@gluon.jit
def _finish(z, out_desc, kept_desc, slot, first, column, ACTIVATION: gl.constexpr, KEEP: gl.constexpr):
    """Activation and half-precision stores of 64 columns."""
    if KEEP:
        _put(kept_desc, slot, kept(z, ACTIVATION, True), first, column)
    _put(out_desc, slot, activate(z, ACTIVATION, True), first, column)


@gluon.jit
def _parts(z, COUNT: gl.constexpr):
    """One or two equal parts of the columns."""
    if COUNT == 1:
        parts = (z,)
    else:
        parts = halves(z)
    return parts


@gluon.jit
def _adding(rows, placed, index, phase, dtype: gl.constexpr, ROW_BIAS: gl.constexpr, OPERAND: gl.constexpr):
    """[64, 2 WINDOW]: ones where a place adds a line, which is that of its row, if it has one, and the bias."""
    line = gl.expand_dims(gl.arange(0, 2 * WINDOW, gl.SliceLayout(0, OPERAND)), 0)
    row = gl.full((ROWS,), -1, gl.int32, gl.SliceLayout(1, OPERAND))
    mbarrier.wait(placed.index(index), phase)
    if ROW_BIAS:
        row = rows.index(index).load(gl.SliceLayout(1, OPERAND))
    return (((gl.expand_dims(row, 1) == line) & (line < WINDOW)) | (line == WINDOW)).to(dtype)


@gluon.jit
def _begin(ring, weights, full, tile, WIDTH: gl.constexpr, D_PIECES: gl.constexpr, TRANSPOSED: gl.constexpr,
           HALF: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """The product of a tile, which is only ordered."""
    z = gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)
    for p in gl.static_range(D_PIECES):
        piece = tile * D_PIECES + p
        slot = piece % ring.shape[0]
        mbarrier.wait(full.index(slot), (piece // ring.shape[0]) & 1)
        weight = weights.index(HALF * D_PIECES + p)
        if not TRANSPOSED:
            weight = weight.permute((1, 0))
        z = warpgroup_mma(ring.index(slot), weight, z, use_acc=p > 0, is_async=True)
    return z


@gluon.jit
def _add(z, added, rows, placed, tile, PARTS: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
         HALF: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """The product with the biases, ordered behind that of the tile, and of it the operand in registers."""
    ones = tile
    if BIAS or ROW_BIAS:
        HELD: gl.constexpr = rows.shape[0]
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
        index = tile % HELD if ROW_BIAS else 0  # without biases of rows all tiles add the same lines
        phase = (tile // HELD) & 1 if ROW_BIAS else 0
        ones = _adding(rows, placed, index, phase, added.dtype, ROW_BIAS, OPERAND)
        z = warpgroup_mma(ones, added.index(index * PARTS + HALF), z, is_async=True)
    return z, ones


@gluon.jit
def _release(z, ones, empty, tile, RING: gl.constexpr, D_PIECES: gl.constexpr, BEGIN: gl.constexpr,
             END: gl.constexpr, BIASED: gl.constexpr):  # fmt: skip
    """Waits for the product with pieces [BEGIN, END), with the last ones for all, and gives their places back."""
    LEFT: gl.constexpr = D_PIECES - END + 1 if BIASED and END < D_PIECES else D_PIECES - END
    if BIASED:
        z, ones = warpgroup_mma_wait(LEFT, deps=(z, ones))
    else:
        z = warpgroup_mma_wait(LEFT, deps=(z,))
    barrier()
    for p in gl.static_range(BEGIN, END):
        mbarrier.arrive(empty.index((tile * D_PIECES + p) % RING), count=1)
    return z, ones


@gluon.jit
def _moved(z):
    """In other registers, which the compiler would otherwise change while the next product is on its way to them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [z], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _number(numbers, index, LAYOUT: gl.constexpr):
    return gl.sum(numbers.index(index).load(LAYOUT), 0)


@gluon.jit
def multiply(out_desc, kept_desc, ring, weights, added, slots, rows, firsts, others, barriers, row_bias,
             row_bias_stride, total, E, WIDTH: gl.constexpr, SHARED: gl.constexpr, D_PIECES: gl.constexpr,
             TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
             KEEP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: half of the columns of all tiles if they are SHARED, else all of every other tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    HALF: gl.constexpr = C if SHARED else 0
    EVERY: gl.constexpr = 1 if SHARED else 2
    BIASED: gl.constexpr = BIAS or ROW_BIAS
    RING: gl.constexpr = ring.shape[0]
    PIECE: gl.constexpr = 64
    PARTS: gl.constexpr = WIDTH // PIECE
    full, empty, placed, taken, ready = barriers
    mbarrier.wait(ready, 0)
    tile = C - HALF
    step = gl.num_programs(0) * ROWS
    z = _begin(ring, weights, full, tile, WIDTH, D_PIECES, TRANSPOSED, HALF, LAYOUT)
    z, ones = _add(z, added, rows, placed, tile, 2 if SHARED else 1, BIAS, ROW_BIAS, HALF, LAYOUT)
    z, ones = _release(z, ones, empty, tile, RING, D_PIECES, 0, D_PIECES, BIASED)
    for first in range(gl.program_id(0) * ROWS + tile * step, total, EVERY * step):
        done = _moved(z)
        if ROW_BIAS:
            index = tile % rows.shape[0]
            if _number(others, index, ONE) > 0:  # places have rows that are not among the lines
                row = rows.index(index).load(gl.SliceLayout(1, LAYOUT))
                columns = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
                line = _number(firsts, index, ONE) + gl.where(row < 0, ~row, row)
                at = gl.expand_dims(row_bias + line.to(gl.int64) * row_bias_stride, 1) + gl.expand_dims(columns, 0)
                mask = gl.expand_dims((row < 0) | (row >= WINDOW), 1) & gl.expand_dims(columns < E, 0)
                done += gl.load(at, mask, other=0).to(gl.float32)
            barrier()
            mbarrier.arrive(taken.index(index), count=1)
        tile += EVERY
        z = _begin(ring, weights, full, tile, WIDTH, D_PIECES, TRANSPOSED, HALF, LAYOUT)
        parts = _parts(done, PARTS)
        for i in gl.static_range(PARTS):
            _finish(parts[i], out_desc, kept_desc, slots.index(C), first, HALF * WIDTH + i * PIECE, ACTIVATION, KEEP)
            if i == 0:
                z, ones = _add(z, added, rows, placed, tile, 2 if SHARED else 1, BIAS, ROW_BIAS, HALF, LAYOUT)
            z, ones = _release(z, ones, empty, tile, RING, D_PIECES, D_PIECES * i // PARTS,
                               D_PIECES * (i + 1) // PARTS, BIASED)  # fmt: skip
    tma.store_wait(0)
