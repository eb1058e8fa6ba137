"""The warps of `jagged_linear` on Hopper that fetch: the weight and the tiles, and what rows add to these.

`hopper.linear` has the whole.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.hopper import barrier
from kernels.jagged.hopper.linear.tiles import ROWS, WINDOW, rows_of

HELD = gl.constexpr(2)  # tiles whose rows are known
PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0]))  # of columns, for a warp


@gluon.jit
def load(x_desc, weight_desc, ring, weights, barriers, total, COLUMNS: gl.constexpr, D_PIECES: gl.constexpr,
          AHEAD: gl.constexpr, TRANSPOSED: gl.constexpr, TILE: gl.constexpr,
          EVERY: gl.constexpr):  # fmt: skip
    """A warp that loads pieces of tiles, from TILE on EVERY one, into a ring that does not stop between tiles.

    The one with the first tile loads the weight before.
    """
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    PARTS: gl.constexpr = weights.shape[0] // D_PIECES
    WIDTH: gl.constexpr = weights.shape[2] if TRANSPOSED else weights.shape[1]
    full, empty, _, _, ready = barriers
    if TILE == 0:
        mbarrier.expect(ready, PARTS * D_PIECES * weight_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            column = (gl.program_id(0) % COLUMNS * PARTS + part) * WIDTH
            for p in gl.static_range(D_PIECES):
                place = [p * PIECE, column] if TRANSPOSED else [column, p * PIECE]
                tma.async_copy_global_to_shared(weight_desc, place, ready, weights.index(part * D_PIECES + p))
    step = gl.num_programs(0) // COLUMNS * ROWS
    piece = 0
    for first in range(gl.program_id(0) // COLUMNS * ROWS + TILE * step, total + AHEAD * step, EVERY * step):
        for p in gl.static_range(D_PIECES):
            slot = piece % ring.shape[0]
            mbarrier.wait(empty.index(slot), ((piece // ring.shape[0]) & 1) ^ 1)
            if first < total:
                mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(x_desc, [first, p * PIECE], full.index(slot), ring.index(slot))
            else:
                mbarrier.arrive(full.index(slot), count=1)
            piece += 1


@gluon.jit
def _put_bias(bias, E, lines, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr):
    """What tiles have in common: the bias is the line behind WINDOW others, and the rest zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    PIECE: gl.constexpr = lines.shape[2]
    CHUNKS: gl.constexpr = lines.shape[0] // (2 * HELD)
    line = gl.expand_dims(gl.arange(0, WINDOW, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT)), 0)
    zeros = gl.zeros((WINDOW, PIECE), lines.dtype, LAYOUT)
    for c in gl.static_range(CHUNKS):
        values = zeros
        if BIAS:
            at = bias + c * PIECE + column + line * 0
            values = gl.load(at, (line == 0) & (c * PIECE + column < E), other=0).to(lines.dtype)
        for i in gl.static_range(HELD):
            lines.index((i * CHUNKS + c) * 2 + 1).store(values)
            if not ROW_BIAS:
                lines.index((i * CHUNKS + c) * 2).store(zeros)


@gluon.constexpr_function
def _times_zero(dtype):
    """PTX of a pair of values, times 0, plus a pair of zeros or of what is not a number."""
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"{{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.{kind} $0, $1, zero, $2; }}"


@gluon.jit
def _clear(lines, index):
    """Puts zeros where one of the WINDOW lines has what is not finite, and returns a bit for each such line.

    Places of other rows multiply it by zero, which would be no zero. Nearly always all are finite, and to find that out
    is one instruction for two values: this warp has to keep ahead of others that need most of the issue slots.
    """
    PIECE: gl.constexpr = lines.shape[2]
    CHUNKS: gl.constexpr = lines.shape[0] // (2 * HELD)
    EXPONENT: gl.constexpr = 0x7F80 if lines.dtype == gl.bfloat16 else 0x7C00
    MULTIPLY: gl.constexpr = _times_zero(lines.dtype)
    pairs = lines._reinterpret(gl.int32, [lines.shape[0], WINDOW, PIECE // 2], gl.NVMMASharedLayout(128, 32, 2))
    zeros = gl.zeros((WINDOW, PIECE // 2), gl.int32, PAIRS)
    product = zeros
    for c in gl.static_range(CHUNKS):
        words = pairs.index((index * CHUNKS + c) * 2).load(PAIRS)
        product = gl.inline_asm_elementwise(MULTIPLY, "=r,r,r", [words, product], gl.int32, True, 1)
    bits = 0
    if gl.max(gl.max(product & 0x7FFF7FFF, 1), 0) > 0:
        barrier()  # so that values are read again, and not kept until here, for which there are no registers
        found = zeros
        for c in gl.static_range(CHUNKS):
            words = pairs.index((index * CHUNKS + c) * 2).load(PAIRS)
            high = (words & (EXPONENT << 16)) == EXPONENT << 16
            found |= (high | ((words & EXPONENT) == EXPONENT)).to(gl.int32)
        wrong = gl.max(found, 1)
        bits = gl.sum(wrong << gl.arange(0, WINDOW, gl.SliceLayout(1, PAIRS)), 0)
        for c in gl.static_range(CHUNKS):
            line = pairs.index((index * CHUNKS + c) * 2)
            line.store(gl.where(gl.expand_dims(wrong, 1) > 0, 0, line.load(PAIRS)))
        fence_async_shared()
    return bits


@gluon.jit
def find(rows, known, used, offsets, num_rows, total, COLUMNS: gl.constexpr, AHEAD: gl.constexpr,
         LEVELS: gl.constexpr):  # fmt: skip
    """A warp that looks up the rows of the places of the tiles; `known` says so, `used` that they were read."""
    tile = 0
    step = gl.num_programs(0) // COLUMNS * ROWS
    for first in range(gl.program_id(0) // COLUMNS * ROWS, total + AHEAD * step, step):
        index = tile % HELD
        row = rows_of(offsets, num_rows, gl.minimum(first, total - 1), total, ROWS, LEVELS)
        mbarrier.wait(used.index(index), ((tile // HELD) & 1) ^ 1)
        rows.index(index).store(row)
        barrier()
        mbarrier.arrive(known.index(index), count=1)
        tile += 1  # noqa: SIM113


@gluon.jit
def place(row_bias_desc, bias, E, lines, found, rows, firsts, others, landed, known, used, barriers, total,
          AHEAD: gl.constexpr, BIAS: gl.constexpr, ROW_BIAS: gl.constexpr):  # fmt: skip
    """A warp that loads the biases of the first WINDOW rows of the tiles, of which `find` has found all.

    Of a place whose row's bias is not among the lines, the row is stored as a number that no line has.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    CHUNKS: gl.constexpr = lines.shape[0] // (2 * HELD)
    _, _, placed, taken, _ = barriers
    _put_bias(bias, E, lines, BIAS, ROW_BIAS)
    fence_async_shared()
    if not ROW_BIAS:
        barrier()
        mbarrier.arrive(placed.index(0), count=1)
    else:
        tile = 0
        step = gl.num_programs(0) * ROWS
        for _first in range(gl.program_id(0) * ROWS, total + AHEAD * step, step):
            index = tile % HELD
            phase = (tile // HELD) & 1
            mbarrier.wait(known.index(index), phase)
            row = found.index(index).load(ONE)
            barrier()
            mbarrier.arrive(used.index(index), count=1)
            low = gl.min(row, 0)
            row -= low
            mbarrier.wait(taken.index(index), phase ^ 1)
            mbarrier.expect(landed.index(index), CHUNKS * row_bias_desc.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                at = [low, c * row_bias_desc.block_type.shape[1]]
                tma.async_copy_global_to_shared(
                    row_bias_desc, at, landed.index(index), lines.index((index * CHUNKS + c) * 2)
                )
            mbarrier.wait(landed.index(index), phase)
            row = gl.where(((_clear(lines, index) >> gl.minimum(row, WINDOW)) & 1) > 0, ~row, row)
            other = ((row < 0) | (row >= WINDOW)).to(gl.int32)
            rows.index(index).store(row)
            firsts.index(index).store(gl.full((1,), 0, gl.int32, ONE) + low)
            others.index(index).store(gl.full((1,), 0, gl.int32, ONE) + gl.max(other, 0))
            barrier()
            mbarrier.arrive(placed.index(index), count=1)
            tile += 1  # noqa: SIM113
