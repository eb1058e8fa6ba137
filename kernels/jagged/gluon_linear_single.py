"""The computing warpgroups of `jagged_linear` on Hopper with float32 operands; `gluon_linear` has the whole.

A consumer has every other tile of 64 values. The operand's pieces are free as soon as they are multiplied, and results
leave from registers. Tensor cores take the leading bits of operands, 10 of the fraction, which is a tf32 product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper import barrier, halves
from kernels.jagged.gluon_linear_tiles import ROWS
from kernels.jagged.triton_activations import activate


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
            EVEN: gl.constexpr):  # fmt: skip
    """From registers: four threads of a matrix instruction's result have a whole sector of 32 bytes.

    LATE: the biases of rows are added here, because there are no registers for all of them beside what is kept.
    """
    if z.shape[1] > (32 if KEEP else 64):
        left, right = halves(z)
        HALF: gl.constexpr = z.shape[1] // 2
        _finish(left, out, for_backward, bias, row_bias, row, row_bias_stride, first, column, total, E, ACTIVATION,
                BIAS, LATE, KEEP, EVEN)  # fmt: skip
        _finish(right, out, for_backward, bias, row_bias, row, row_bias_stride, first, column + HALF, total, E,
                ACTIVATION, BIAS, LATE, KEEP, EVEN)  # fmt: skip
    else:
        z = _biased(z, column, bias, E, BIAS, EVEN)
        if LATE:
            LAYOUT: gl.constexpr = z.type.layout
            row = gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))
            z += _row_biases(row_bias, row, column, row_bias_stride, E, z.shape[1], EVEN, LAYOUT)
        if KEEP:
            _store(for_backward, z, first, column, total, E)
        _store(out, activate(z, ACTIVATION, False), first, column, total, E)


@gluon.jit
def multiply_single(ring, weights, rows, barriers, out, for_backward, bias, row_bias, row_bias_stride, total, E,
                    COLUMNS: gl.constexpr, D_PIECES: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
                    ROW_BIAS: gl.constexpr, KEEP: gl.constexpr, EVEN: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C of float32 operands: every other tile."""
    WIDTH: gl.constexpr = weights.shape[1]
    RING: gl.constexpr = ring.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 8])
    full, empty, placed, taken, ready = barriers
    column = gl.program_id(0) % COLUMNS * WIDTH
    mbarrier.wait(ready, 0)
    tile = C
    step = gl.num_programs(0) // COLUMNS * ROWS
    for first in range(gl.program_id(0) // COLUMNS * ROWS + C * step, total, 2 * step):
        z = gl.zeros((ROWS, WIDTH), gl.float32, LAYOUT)
        index = tile % rows.shape[0]
        if ROW_BIAS:  # on their way while the tensor cores work
            mbarrier.wait(placed.index(index), (tile // rows.shape[0]) & 1)
            row = rows.index(index).load(gl.SliceLayout(1, LAYOUT))
            if not KEEP:
                added = _row_biases(row_bias, row, column, row_bias_stride, E, WIDTH, EVEN, LAYOUT)
        for p in gl.static_range(D_PIECES):
            piece = tile * D_PIECES + p
            slot = piece % RING
            mbarrier.wait(full.index(slot), (piece // RING) & 1)
            z = warpgroup_mma(ring.index(slot), weights.index(p).permute((1, 0)), z, use_acc=p > 0, is_async=True)
            if p > 0:
                z = warpgroup_mma_wait(1, deps=(z,))
                barrier()
                mbarrier.arrive(empty.index((piece - 1) % RING), count=1)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()
        mbarrier.arrive(empty.index((tile * D_PIECES + D_PIECES - 1) % RING), count=1)
        if ROW_BIAS:
            mbarrier.arrive(taken.index(index), count=1)
            if not KEEP:
                z += added
        _finish(z, out, for_backward, bias, row_bias, row if ROW_BIAS else 0, row_bias_stride, first, column, total, E,
                ACTIVATION, BIAS, ROW_BIAS and KEEP, KEEP, EVEN)  # fmt: skip
        tile += 2
