"""The computing warpgroups of `jagged_linear` on Hopper with float32 operands; `hopper.linear` has the whole.

A consumer has every other tile of 64 values. The operand's pieces are free as soon as they are multiplied, and results
leave from registers. Tensor cores take the leading bits of operands, 10 of the fraction, which is a tf32 product.

Where tf32 is not allowed, operands are split into those bits and the rest: the weight once, in shared memory, values in
registers on their way to the tensor cores. Three products keep about float32's accuracy. Those with a rest are summed
apart, so that a value that is not finite, whose rest is no number, is that of the one without.
"""

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
from kernels.jagged.hopper.linear.tiles import ROWS
from kernels.jagged.triton.activations import activate, with_slope


@gluon.jit
def _row_biases(row_bias, row, column, stride, E, WIDTH: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Of WIDTH columns from `column` on, for places of rows `row`."""
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(row_bias + row.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
    if EVEN:
        values = gl.load(at)
    else:
        values = gl.load(at, mask=gl.expand_dims(columns < E, 0), other=0)
    return values


@gluon.jit
def _biased(z, column, bias, E, BIAS: gl.constexpr, EVEN: gl.constexpr):
    """Columns from `column` on with the bias of all places."""
    if BIAS:
        columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
        if EVEN:
            values = gl.load(bias + columns)
        else:
            values = gl.load(bias + columns, mask=columns < E, other=0)
        z += gl.expand_dims(values.to(gl.float32), 0)
    return z


@gluon.jit
def _store(out, z, first, column, total, E):
    LAYOUT: gl.constexpr = z.type.layout
    places = first + gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(out + places.to(gl.int64) * E, 1) + gl.expand_dims(columns, 0)
    gl.store(at, z, gl.expand_dims(places < total, 1) & gl.expand_dims(columns < E, 0))


@gluon.jit
def _finish(z, out, for_backward, bias, row_bias, row, row_bias_stride, first, column, total, E,
            ACTIVATION: gl.constexpr, BIAS: gl.constexpr, LATE: gl.constexpr, KEEP: gl.constexpr,
            SLOPE: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """From registers: four threads of a matrix instruction's result have a whole sector of 32 bytes.

    LATE: the biases of rows are added here, because there are no registers for all of them beside what is kept or
    parts of operands. SLOPE: what is kept is the activation's slope, and not what that was applied to.
    """
    if z.shape[1] > (32 if KEEP else 64):
        left, right = halves(z)
        HALF: gl.constexpr = z.shape[1] // 2
        _finish(left, out, for_backward, bias, row_bias, row, row_bias_stride, first, column, total, E, ACTIVATION,
                BIAS, LATE, KEEP, SLOPE, EVEN)  # fmt: skip
        _finish(right, out, for_backward, bias, row_bias, row, row_bias_stride, first, column + HALF, total, E,
                ACTIVATION, BIAS, LATE, KEEP, SLOPE, EVEN)  # fmt: skip
    else:
        z = _biased(z, column, bias, E, BIAS, EVEN)
        if LATE:
            LAYOUT: gl.constexpr = z.type.layout
            row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
            z += _row_biases(row_bias, row, column, row_bias_stride, E, z.shape[1], EVEN, LAYOUT)
        if KEEP and SLOPE:
            y, point = with_slope(z, ACTIVATION)
        else:
            y, point = activate(z, ACTIVATION, False), z
        if KEEP:
            _store(for_backward, point, first, column, total, E)
        _store(out, y, first, column, total, E)


@gluon.jit
def high_and_rest(x):
    """The bits of float32 that a tf32 product takes, and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def _split_weight(weights, rests, ready, split, D_PIECES: gl.constexpr, C: gl.constexpr):
    """Both consumers split every other piece."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(ready, 0)
    for p in gl.static_range(C, D_PIECES, 2):
        high, rest = high_and_rest(weights.index(p).load(LINES))
        weights.index(p).store(high)
        rests.index(p).store(rest)
    fence_async_shared()
    barrier()
    mbarrier.arrive(split, count=1)
    mbarrier.wait(split, 0)


@gluon.jit
def _once(ring, weights, full, empty, begin, D_PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """The tf32 product of a tile, whose pieces are those from number `begin` on, with the weight."""
    RING: gl.constexpr = ring.shape[0]
    WIDTH: gl.constexpr = weights.shape[1]
    z = gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)
    for p in gl.static_range(D_PIECES):
        piece = begin + p
        slot = piece % RING
        mbarrier.wait(full.index(slot), (piece // RING) & 1)
        z = warpgroup_mma(ring.index(slot), weights.index(p).permute((1, 0)), z, use_acc=p > 0, is_async=True)
        if p > 0:
            z = warpgroup_mma_wait(1, deps=(z,))
            barrier()
            mbarrier.arrive(empty.index((piece - 1) % RING), count=1)
    z = warpgroup_mma_wait(0, deps=(z,))
    barrier()
    mbarrier.arrive(empty.index((begin + D_PIECES - 1) % RING), count=1)
    return z


@gluon.jit
def _thrice(ring, weights, rests, full, empty, begin, D_PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """The product in three, as `_once`; a piece is free as soon as it is in registers.

    Tensor cores round sums towards zero, threads to nearest: they add what pieces have of the large product.
    """
    RING: gl.constexpr = ring.shape[0]
    WIDTH: gl.constexpr = weights.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    z = gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)
    part = z
    small = z
    for p in gl.static_range(D_PIECES):
        piece = begin + p
        slot = piece % RING
        mbarrier.wait(full.index(slot), (piece // RING) & 1)
        if p == 0:
            high, rest = high_and_rest(ring.index(slot).load(OPERAND))
        else:
            next_high, next_rest = high_and_rest(ring.index(slot).load(OPERAND))
            part, small, high, rest = warpgroup_mma_wait(0, deps=(part, small, high, rest))
            z += part
            high, rest = next_high, next_rest
        weight = weights.index(p).permute((1, 0))
        small = warpgroup_mma(rest, weight, small, use_acc=p > 0, is_async=True)
        small = warpgroup_mma(high, rests.index(p).permute((1, 0)), small, is_async=True)
        part = warpgroup_mma(high, weight, part, use_acc=False, is_async=True)
        # Not before: what these products wait for is that the piece has been read.
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    part, small, high, rest = warpgroup_mma_wait(0, deps=(part, small, high, rest))
    return z + part + gl.where(small == small, small, 0.0)


@gluon.jit
def multiply_single(ring, weights, rests, rows, barriers, split, out, for_backward, bias, row_bias, row_bias_stride,
                    total, E, COLUMNS: gl.constexpr, D_PIECES: gl.constexpr, ACTIVATION: gl.constexpr,
                    BIAS: gl.constexpr, ROW_BIAS: gl.constexpr, KEEP: gl.constexpr, EVEN: gl.constexpr,
                    THRICE: gl.constexpr, SLOPE: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C of float32 operands: every other tile."""
    WIDTH: gl.constexpr = weights.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 8])
    LATE: gl.constexpr = KEEP or THRICE
    full, empty, placed, taken, ready = barriers
    column = gl.program_id(0) % COLUMNS * WIDTH
    if THRICE:
        _split_weight(weights, rests, ready, split, D_PIECES, C)
    else:
        mbarrier.wait(ready, 0)
    tile = C
    step = gl.num_programs(0) // COLUMNS * ROWS
    for first in range(gl.program_id(0) // COLUMNS * ROWS + C * step, total, 2 * step):
        index = tile % rows.shape[0]
        begin = tile // 2 * D_PIECES
        if ROW_BIAS:  # on their way while the tensor cores work
            mbarrier.wait(placed.index(index), (tile // rows.shape[0]) & 1)
            row = rows.index(index).load(gl.SliceLayout(1, LAYOUT))
            if not LATE:
                added = _row_biases(row_bias, row, column, row_bias_stride, E, WIDTH, EVEN, LAYOUT)
        if THRICE:
            z = _thrice(ring, weights, rests, full, empty, begin, D_PIECES, LAYOUT)
        else:
            z = _once(ring, weights, full, empty, begin, D_PIECES, LAYOUT)
        if ROW_BIAS:
            mbarrier.arrive(taken.index(index), count=1)
            if not LATE:
                z += added
        _finish(z, out, for_backward, bias, row_bias, row if ROW_BIAS else 0, row_bias_stride, first, column, total, E,
                ACTIVATION, BIAS, ROW_BIAS and LATE, KEEP, SLOPE, EVEN)  # fmt: skip
        tile += 2
