"""The computing warpgroups of `jagged_linear` on Hopper; `gluon_linear` has the whole.

A consumer has every other tile of 64 values. Half-precision results take the place of their operand in shared memory
and leave by TMA; float32 ones leave from registers, and the operand's pieces are free as soon as they are multiplied.

Tensor cores take the leading bits of float32 operands, 10 of the fraction, which is a tf32 product.
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

from kernels.hopper import barrier, halves
from kernels.jagged.gluon_linear_tiles import ROWS
from kernels.jagged.triton_activations import activate, kept

RING = gl.constexpr(12)  # pieces of a tile in shared memory, each of ROWS lines; what the weight leaves room for


@gluon.jit
def _row_biases(row_bias, row, column, stride, E, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Of columns from `column` on, as many as an instruction of LAYOUT has, for places of rows `row`."""
    columns = column + gl.arange(0, LAYOUT.instr_shape[1], gl.SliceLayout(0, LAYOUT))
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
def _put(desc, slot, value, first, column):
    slot.store(value.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [first, column], slot)


@gluon.jit
def _finish(z, out_desc, kept_desc, ring, bias, first, piece, E,
            COLUMN: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, KEEP: gl.constexpr,
            EVEN: gl.constexpr):  # fmt: skip
    """Bias, activation and half-precision stores of one or two pieces from column COLUMN on, from the operand's place.

    What is kept for the backward goes through the same place: one piece is activated while the other is
    copied out.
    """
    PIECE: gl.constexpr = out_desc.block_type.shape[1]
    if z.shape[1] > PIECE:
        left, right = halves(z)
        NEXT: gl.constexpr = COLUMN + PIECE
        left_slot = ring.index(piece % RING)
        right_slot = ring.index((piece + 1) % RING)
        left = _biased(left, COLUMN, bias, E, BIAS, EVEN)
        if KEEP:
            _put(kept_desc, left_slot, kept(left, ACTIVATION, True), first, COLUMN)
        else:
            _put(out_desc, left_slot, activate(left, ACTIVATION, True), first, COLUMN)
        right = _biased(right, NEXT, bias, E, BIAS, EVEN)
        if KEEP:
            _put(kept_desc, right_slot, kept(right, ACTIVATION, True), first, NEXT)
            left = activate(left, ACTIVATION, True)
            tma.store_wait(1)
            _put(out_desc, left_slot, left, first, COLUMN)
            right = activate(right, ACTIVATION, True)
            tma.store_wait(1)
            _put(out_desc, right_slot, right, first, NEXT)
        else:
            _put(out_desc, right_slot, activate(right, ACTIVATION, True), first, NEXT)
    else:
        slot = ring.index(piece % RING)
        z = _biased(z, COLUMN, bias, E, BIAS, EVEN)
        if KEEP:
            _put(kept_desc, slot, kept(z, ACTIVATION, True), first, COLUMN)
            tma.store_wait(0)
        _put(out_desc, slot, activate(z, ACTIVATION, True), first, COLUMN)


@gluon.jit
def _store(out, z, first, column, total, E):
    LAYOUT: gl.constexpr = z.type.layout
    places = first + gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(out + places.to(gl.int64) * E, 1) + gl.expand_dims(columns, 0)
    gl.store(at, z, gl.expand_dims(places < total, 1) & gl.expand_dims(columns < E, 0))


@gluon.jit
def _finish_single(z, out, for_backward, bias, first, column, total, E,
                   ACTIVATION: gl.constexpr, BIAS: gl.constexpr, KEEP: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """float32 from registers: four threads of a matrix instruction's result have a whole sector of 32 bytes."""
    if z.shape[1] > 64:
        left, right = halves(z)
        HALF: gl.constexpr = z.shape[1] // 2
        _finish_single(left, out, for_backward, bias, first, column, total, E, ACTIVATION,
                       BIAS, KEEP, EVEN)  # fmt: skip
        _finish_single(right, out, for_backward, bias, first, column + HALF, total, E,
                       ACTIVATION, BIAS, KEEP, EVEN)  # fmt: skip
    else:
        z = _biased(z, column, bias, E, BIAS, EVEN)
        if KEEP:
            _store(for_backward, z, first, column, total, E)
        _store(out, activate(z, ACTIVATION, False), first, column, total, E)


@gluon.jit
def multiply(out_desc, kept_desc, ring, weights, rows, barriers, out, for_backward, bias, row_bias, row_bias_stride,
              total, E, BLOCK_E: gl.constexpr, COLUMNS: gl.constexpr, D_PIECES: gl.constexpr, SLOTS: gl.constexpr,
              TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
              KEEP: gl.constexpr, EVEN: gl.constexpr, SINGLE: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: every other tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_E, 256 // ring.dtype.primitive_bitwidth]
    )
    PIECE: gl.constexpr = ring.shape[2]
    WIDTH: gl.constexpr = min(BLOCK_E, 128)
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // ring.dtype.primitive_bitwidth])
    full, empty, placed, ready = barriers
    column = gl.program_id(0) % COLUMNS * BLOCK_E
    mbarrier.wait(ready, 0)
    tile = C
    step = gl.num_programs(0) // COLUMNS * ROWS
    for first in range(gl.program_id(0) // COLUMNS * ROWS + C * step, total, 2 * step):
        z = gl.zeros((ROWS, BLOCK_E), gl.float32, LAYOUT)
        index = tile % rows.shape[0]
        if ROW_BIAS:  # of the first half, on their way while the tensor cores work
            mbarrier.wait(placed.index(index), (tile // rows.shape[0]) & 1)
            row = rows.index(index).load(gl.SliceLayout(1, PART))
            added = _row_biases(row_bias, row, column, row_bias_stride, E, EVEN, PART)
        for p in gl.static_range(SLOTS):
            piece = tile * SLOTS + p
            slot = piece % RING
            mbarrier.wait(full.index(slot), (piece // RING) & 1)
            if p < D_PIECES:
                weight = weights.index(p)
                if not TRANSPOSED:
                    weight = weight.permute((1, 0))
                z = warpgroup_mma(ring.index(slot), weight, z, use_acc=p > 0, is_async=True)
            if SINGLE and p > 0:
                z = warpgroup_mma_wait(1, deps=(z,))
                barrier()
                mbarrier.arrive(empty.index((piece - 1) % RING), count=1)
        z = warpgroup_mma_wait(0, deps=(z,))
        barrier()  # all of the operand is read
        if SINGLE:
            mbarrier.arrive(empty.index((tile * SLOTS + SLOTS - 1) % RING), count=1)
            if ROW_BIAS:
                z += gl.convert_layout(added, LAYOUT).to(gl.float32)
            _finish_single(z, out, for_backward, bias, first, column, total, E, ACTIVATION, BIAS, KEEP, EVEN)
        else:
            base = tile * SLOTS
            if BLOCK_E > WIDTH:
                left, right = halves(z)
                if ROW_BIAS:
                    left += gl.convert_layout(added, left.type.layout).to(gl.float32)
                    added = _row_biases(row_bias, row, WIDTH, row_bias_stride, E, EVEN, PART)
                _finish(left, out_desc, kept_desc, ring, bias, first, base, E, 0, ACTIVATION, BIAS, KEEP, EVEN)
                if ROW_BIAS:
                    right += gl.convert_layout(added, right.type.layout).to(gl.float32)
                _finish(right, out_desc, kept_desc, ring, bias, first, base + WIDTH // PIECE, E, WIDTH, ACTIVATION,
                        BIAS, KEEP, EVEN)  # fmt: skip
            else:
                if ROW_BIAS:
                    z += gl.convert_layout(added, LAYOUT).to(gl.float32)
                _finish(z, out_desc, kept_desc, ring, bias, first, base, E, 0, ACTIVATION, BIAS, KEEP, EVEN)
            tma.store_wait(0)
            barrier()
            for p in gl.static_range(SLOTS):
                mbarrier.arrive(empty.index((base + p) % RING), count=1)
        tile += 2
