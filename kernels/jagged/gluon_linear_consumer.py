"""The computing warpgroups of `jagged_linear` on Hopper; `gluon_linear` has the whole.

A consumer has every other tile of 64 values. Half-precision results take the place of their operand in shared memory
and leave by TMA; float32 ones leave from registers, and the operand's pieces are free as soon as they are multiplied.

Tensor cores take the leading bits of float32 operands, 10 of the fraction, which is one tf32 product. For about
float32's accuracy two more make up for what was left out of either operand; what is left out of both, is left out.
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

from kernels.gdpa.gluon_activations import value_and_slope
from kernels.jagged.triton_activations import activate

ROWS = gl.constexpr(64)  # values of a tile
RING = gl.constexpr(12)  # pieces of a tile in shared memory, each of ROWS lines; what the weight leaves room for

_GELU = gl.constexpr(("gelu",))
_SILU = gl.constexpr(("silu",))
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _low(x):
    """What tensor cores leave out of float32 operands: they take the leading 10 bits of the fraction."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return x - high


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _activate(z, ACTIVATION: gl.constexpr, SINGLE: gl.constexpr):
    """float32 -> float32; for half-precision results with the hardware's tanh, whose relative error is 5e-4."""
    if SINGLE or ACTIVATION == "none" or ACTIVATION == "relu":
        y = activate(z, ACTIVATION, False)
    elif ACTIVATION == "sigmoid":
        y = 0.5 + 0.5 * _tanh(0.5 * z)
    elif ACTIVATION == "tanh":
        y = _tanh(z)
    elif ACTIVATION == "gelu":
        y, _slope = value_and_slope(z, 1.0, 0, _GELU)
    else:
        y, _slope = value_and_slope(z, 1.0, 0, _SILU)
    return y


@gluon.jit
def _biased(z, column, row, bias, row_bias, row_bias_stride, E, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
            EVEN: gl.constexpr):  # fmt: skip
    """Columns from `column` on with their biases; `row` are the rows of the places."""
    LAYOUT: gl.constexpr = z.type.layout
    columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = columns < E
    if BIAS:
        if EVEN:
            values = gl.load(bias + columns)
        else:
            values = gl.load(bias + columns, mask=inside, other=0)
        z += gl.expand_dims(values.to(gl.float32), 0)
    if ROW_BIAS:
        at = gl.expand_dims(row_bias + row.to(gl.int64) * row_bias_stride, 1) + gl.expand_dims(columns, 0)
        if EVEN:
            z += gl.load(at).to(gl.float32)
        else:
            z += gl.load(at, mask=gl.expand_dims(inside, 0), other=0).to(gl.float32)
    return z


@gluon.jit
def _put(desc, slot, value, first, column):
    slot.store(value.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [first, column], slot)


@gluon.jit
def _halves(x):
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _finish(z, out_desc, before_desc, ring, rows, bias, row_bias, row_bias_stride, first, piece, E,
            COLUMN: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
            KEEP: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Biases, activation and half-precision stores of the columns from COLUMN on, from the operand's own place.

    What is kept from before the activation goes through the same place, two pieces at a time, so that one is activated
    while the other is copied out.
    """
    PIECE: gl.constexpr = out_desc.block_type.shape[1]
    HALF: gl.constexpr = z.shape[1] // 2
    if HALF > PIECE:
        left, right = _halves(z)
        _finish(left, out_desc, before_desc, ring, rows, bias, row_bias, row_bias_stride, first, piece, E, COLUMN,
                ACTIVATION, BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
        _finish(right, out_desc, before_desc, ring, rows, bias, row_bias, row_bias_stride, first,
                piece + HALF // PIECE, E, COLUMN + HALF, ACTIVATION, BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
    elif HALF == PIECE:
        left, right = _halves(z)
        NEXT: gl.constexpr = COLUMN + PIECE
        row = rows.load(gl.SliceLayout(1, left.type.layout))
        left_slot = ring.index(piece % RING)
        right_slot = ring.index((piece + 1) % RING)
        left = _biased(left, COLUMN, row, bias, row_bias, row_bias_stride, E, BIAS, ROW_BIAS, EVEN)
        if KEEP:
            _put(before_desc, left_slot, left, first, COLUMN)
        else:
            _put(out_desc, left_slot, _activate(left, ACTIVATION, False), first, COLUMN)
        right = _biased(right, NEXT, row, bias, row_bias, row_bias_stride, E, BIAS, ROW_BIAS, EVEN)
        if KEEP:
            _put(before_desc, right_slot, right, first, NEXT)
            left = _activate(left, ACTIVATION, False)
            tma.store_wait(1)
            _put(out_desc, left_slot, left, first, COLUMN)
            right = _activate(right, ACTIVATION, False)
            tma.store_wait(1)
            _put(out_desc, right_slot, right, first, NEXT)
        else:
            _put(out_desc, right_slot, _activate(right, ACTIVATION, False), first, NEXT)
    else:
        slot = ring.index(piece % RING)
        row = rows.load(gl.SliceLayout(1, z.type.layout))
        z = _biased(z, COLUMN, row, bias, row_bias, row_bias_stride, E, BIAS, ROW_BIAS, EVEN)
        if KEEP:
            _put(before_desc, slot, z, first, COLUMN)
            tma.store_wait(0)
        _put(out_desc, slot, _activate(z, ACTIVATION, False), first, COLUMN)


@gluon.jit
def _store(out, z, first, column, total, E):
    LAYOUT: gl.constexpr = z.type.layout
    places = first + gl.arange(0, z.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(out + places.to(gl.int64) * E, 1) + gl.expand_dims(columns, 0)
    gl.store(at, z, gl.expand_dims(places < total, 1) & gl.expand_dims(columns < E, 0))


@gluon.jit
def _finish_single(z, out, before, row, bias, row_bias, row_bias_stride, first, column, total, E,
                   ACTIVATION: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr, KEEP: gl.constexpr,
                   EVEN: gl.constexpr):  # fmt: skip
    """float32 from registers: four threads of a matrix instruction's result have a whole sector of 32 bytes."""
    if z.shape[1] > 64:
        left, right = _halves(z)
        HALF: gl.constexpr = z.shape[1] // 2
        _finish_single(left, out, before, row, bias, row_bias, row_bias_stride, first, column, total, E, ACTIVATION,
                       BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
        _finish_single(right, out, before, row, bias, row_bias, row_bias_stride, first, column + HALF, total, E,
                       ACTIVATION, BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
    else:
        row = gl.convert_layout(row, gl.SliceLayout(1, z.type.layout))
        z = _biased(z, column, row, bias, row_bias, row_bias_stride, E, BIAS, ROW_BIAS, EVEN)
        if KEEP:
            _store(before, z, first, column, total, E)
        _store(out, _activate(z, ACTIVATION, True), first, column, total, E)


@gluon.jit
def multiply(out_desc, before_desc, ring, weights, lows, rows, barriers, out, before, bias, row_bias, row_bias_stride,
              total, E, BLOCK_E: gl.constexpr, COLUMNS: gl.constexpr, D_PIECES: gl.constexpr, SLOTS: gl.constexpr,
              TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr,
              KEEP: gl.constexpr, EVEN: gl.constexpr, SINGLE: gl.constexpr, EXACT: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Consumer C: every other tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_E, 256 // ring.dtype.primitive_bitwidth]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    full, empty, placed, ready, split = barriers
    column = gl.program_id(0) % COLUMNS * BLOCK_E
    mbarrier.wait(ready, 0)
    if EXACT:
        LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        for p in gl.static_range(C, D_PIECES, 2):
            lows.index(p).store(_low(weights.index(p).load(LINES)))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(split, count=1)
        mbarrier.wait(split, 0)
    tile = C
    step = gl.num_programs(0) // COLUMNS * ROWS
    for first in range(gl.program_id(0) // COLUMNS * ROWS + C * step, total, 2 * step):
        z = gl.zeros((ROWS, BLOCK_E), gl.float32, LAYOUT)
        index = tile % rows.shape[0]
        for p in gl.static_range(SLOTS):
            piece = tile * SLOTS + p
            slot = piece % RING
            mbarrier.wait(full.index(slot), (piece // RING) & 1)
            if p < D_PIECES:
                weight = weights.index(p)
                if not TRANSPOSED:
                    weight = weight.permute((1, 0))
                z = warpgroup_mma(ring.index(slot), weight, z, use_acc=p > 0, is_async=True)
                if EXACT:
                    z = warpgroup_mma(ring.index(slot), lows.index(p).permute((1, 0)), z, is_async=True)
                    z = warpgroup_mma(_low(ring.index(slot).load(OPERAND)), weight, z, is_async=True)
            if SINGLE and p > 0:
                z = warpgroup_mma_wait(3 if EXACT else 1, deps=(z,))
                _barrier()
                mbarrier.arrive(empty.index((piece - 1) % RING), count=1)
        z = warpgroup_mma_wait(0, deps=(z,))
        if ROW_BIAS:
            mbarrier.wait(placed.index(index), (tile // rows.shape[0]) & 1)
        if SINGLE:
            row = rows.index(index).load(gl.SliceLayout(1, LAYOUT))
            _barrier()
            mbarrier.arrive(empty.index((tile * SLOTS + SLOTS - 1) % RING), count=1)
            _finish_single(z, out, before, row, bias, row_bias, row_bias_stride, first, column, total, E, ACTIVATION,
                           BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
        else:
            _barrier()  # all of the operand is read
            _finish(z, out_desc, before_desc, ring, rows.index(index), bias, row_bias, row_bias_stride, first,
                    tile * SLOTS, E, 0, ACTIVATION, BIAS, ROW_BIAS, KEEP, EVEN)  # fmt: skip
            tma.store_wait(0)
            _barrier()
            for p in gl.static_range(SLOTS):
                mbarrier.arrive(empty.index((tile * SLOTS + p) % RING), count=1)
        tile += 2
