"""`jagged_jagged_bmm_jagged_out` on Hopper: one stream of tiles past two multiplying warpgroups.

    out[b] = x[row b] @ y[row b]^T              [N, D], [N, D] -> [sum of L_b^2]

A tile is 64 places of a row of x. A persistent program takes every so-and-so-many-th one: a warp finds out ahead which
row each is of, another one loads it and then all of that row's y with TMA, a block of places at a time, and two
warpgroups multiply the tile with every other block. A program for each tile, as Triton has it, waits for one of these
behind the other.
"""

from __future__ import annotations

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

from kernels.core.hopper import addressable, barrier
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, num_tiles, steps_of
from kernels.jagged.hopper.linear.tiles import descriptor
from kernels.jagged.triton.square import inner, register_outer

ROWS = gl.constexpr(64)  # places of a tile
HELD = gl.constexpr(4)  # tiles that are found ahead
PIECE = 64  # columns, 128 bytes
TILES = gl.constexpr(2)  # of x in shared memory
# Blocks of y, an even number, so that a slot is always of one consumer: it could be ahead of the other one by a round.
BLOCKS = gl.constexpr(4)

_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(208)
_LOADER_REGISTERS = gl.constexpr(48)


@gluon.jit
def _number(numbers, index, LAYOUT: gl.constexpr):
    return gl.sum(numbers.index(index).load(LAYOUT), 0)


@gluon.jit
def _find(firsts, begins, counts, corners, known, used, offsets, squares, num_rows, num_tiles, LEVELS: gl.constexpr):
    """A warp that looks up the tiles: first place, first one of the row, length of the row (0: no tile), matrix."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    way = gl.arange(0, 32, layout=LANES)
    one = gl.arange(0, 1, layout=LANES)
    number = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = tile * 0
        for level in gl.static_range(LEVELS):
            step = 1 << (5 * (LEVELS - 1 - level))
            candidate = row + way * step
            real = candidate < num_rows
            begin = gl.load(offsets + candidate, mask=real, other=0).to(gl.int32)
            row += (gl.sum((real & (begin // ROWS + candidate <= tile)).to(gl.int32), 0) - 1) * step
        begin = gl.load(offsets + row).to(gl.int32)
        count = gl.load(offsets + row + 1).to(gl.int32) - begin
        square = gl.load(squares + row).to(gl.int64)
        first = (tile - begin // ROWS - row) * ROWS  # in the row
        count = gl.where(first < count, count, 0)
        index = number % HELD
        mbarrier.wait(used.index(index), ((number // HELD) & 1) ^ 1)
        firsts.index(index).store(one + first)
        begins.index(index).store(one + begin)
        counts.index(index).store(one + count)
        corners.index(index).store(one + (square + first.to(gl.int64) * count))
        barrier()
        mbarrier.arrive(known.index(index), count=1)
        number += 1  # noqa: SIM113


@gluon.jit
def _load(x_desc, y_desc, xs, ys, firsts, begins, counts, known, used, x_full, x_empty, full, empty, num_tiles,
          D_PIECES: gl.constexpr):  # fmt: skip
    """A warp that loads a tile and all blocks of its row."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    number = 0
    tiles = 0
    blocks = 0
    for _tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        index = number % HELD
        mbarrier.wait(known.index(index), (number // HELD) & 1)
        first = _number(firsts, index, LANES)
        begin = _number(begins, index, LANES)
        count = _number(counts, index, LANES)
        barrier()
        mbarrier.arrive(used.index(index), count=1)
        if count > 0:
            slot = tiles % TILES
            mbarrier.wait(x_empty.index(slot), ((tiles // TILES) & 1) ^ 1)
            mbarrier.expect(x_full.index(slot), D_PIECES * x_desc.block_type.nbytes)
            for p in gl.static_range(D_PIECES):
                tma.async_copy_global_to_shared(
                    x_desc, [begin + first, p * PIECE], x_full.index(slot), xs.index(slot * D_PIECES + p)
                )
            tiles += 1
        for at in range(0, count, ROWS):
            slot = blocks % BLOCKS
            mbarrier.wait(empty.index(slot), ((blocks // BLOCKS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), D_PIECES * y_desc.block_type.nbytes)
            for p in gl.static_range(D_PIECES):
                tma.async_copy_global_to_shared(
                    y_desc, [begin + at, p * PIECE], full.index(slot), ys.index(slot * D_PIECES + p)
                )
            blocks += 1
        number += 1  # noqa: SIM113


@gluon.jit
def _multiply(out, xs, ys, firsts, counts, corners, known, used, x_full, x_empty, full, empty, num_tiles,
              D_PIECES: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: every other block of all tiles."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Matrices begin anywhere: lanes take neighbouring elements.
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, LINES))
    number = 0
    tiles = 0
    blocks = 0
    for _tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        index = number % HELD
        mbarrier.wait(known.index(index), (number // HELD) & 1)
        first = _number(firsts, index, ONE)
        count = _number(counts, index, ONE)
        corner = _number(corners, index, ONE)
        barrier()
        mbarrier.arrive(used.index(index), count=1)
        if count > 0:
            x_slot = tiles % TILES
            mbarrier.wait(x_full.index(x_slot), (tiles // TILES) & 1)
            at = out + corner + gl.expand_dims(i * count, 1) + gl.expand_dims(j, 0)
            for start in range(0, count, ROWS):
                if blocks % 2 == C:
                    slot = blocks % BLOCKS
                    mbarrier.wait(full.index(slot), (blocks // BLOCKS) & 1)
                    z = gl.zeros((ROWS, ROWS), gl.float32, LAYOUT)
                    for p in gl.static_range(D_PIECES):
                        block = ys.index(slot * D_PIECES + p).permute((1, 0))
                        z = warpgroup_mma(xs.index(x_slot * D_PIECES + p), block, z, use_acc=p > 0, is_async=True)
                    z = warpgroup_mma_wait(0, deps=(z,))
                    barrier()
                    mbarrier.arrive(empty.index(slot), count=1)
                    value = gl.convert_layout(z.to(out.dtype.element_ty), LINES)
                    mask = gl.expand_dims(i < count - first, 1) & gl.expand_dims(j < count - start, 0)
                    gl.store(at + start, value, mask)
                blocks += 1
            barrier()
            mbarrier.arrive(x_empty.index(x_slot), count=1)
            tiles += 1
        number += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def _bmm_outer_kernel(
    x_desc,
    y_desc,
    offsets,
    squares,
    out,
    num_rows,
    num_tiles,
    D_PIECES: gl.constexpr,
    LEVELS: gl.constexpr,
):
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = x_desc.dtype
    xs = gl.allocate_shared_memory(dtype, [TILES * D_PIECES] + x_desc.block_type.shape, x_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [BLOCKS * D_PIECES] + y_desc.block_type.shape, y_desc.layout)
    firsts = gl.allocate_shared_memory(gl.int32, [HELD, 1], ONE)
    begins = gl.allocate_shared_memory(gl.int32, [HELD, 1], ONE)
    counts = gl.allocate_shared_memory(gl.int32, [HELD, 1], ONE)
    corners = gl.allocate_shared_memory(gl.int64, [HELD, 1], ONE)
    known = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(HELD):
        mbarrier.init(known.index(i), count=1)
        mbarrier.init(used.index(i), count=3)
    for i in gl.static_range(TILES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(BLOCKS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out, xs, ys, firsts, counts, corners, known, used, x_full, x_empty, full, empty, num_tiles,
                         D_PIECES, 0)),
            (_multiply, (out, xs, ys, firsts, counts, corners, known, used, x_full, x_empty, full, empty, num_tiles,
                         D_PIECES, 1)),
            (_load, (x_desc, y_desc, xs, ys, firsts, begins, counts, known, used, x_full, x_empty, full, empty,
                     num_tiles, D_PIECES)),
            (_find, (firsts, begins, counts, corners, known, used, offsets, squares, num_rows, num_tiles, LEVELS)),
        ],
        [4, 1, 1],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_bmm_outer_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)


@custom_op("gemsmith::jagged_outer_stream")
def outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int) -> Tensor:
    """As `triton.square.outer` in half precision, for D in multiples of 8 up to 256."""
    out = x.new_empty(total)
    if total == 0:
        return out
    x, y = addressable(x), addressable(y)
    offsets, squares = offsets.contiguous(), squares.contiguous()
    num_rows, width = offsets.shape[0] - 1, x.shape[1]
    constants = (cdiv(width, PIECE), cdiv(steps_of(num_rows), 5))
    tiles = num_tiles(x.shape[0], num_rows, ROWS.value)
    key = (x.device, x.dtype, offsets.dtype, squares.dtype, aligned(offsets, squares), constants)
    _launch(
        (min(processors(x.device), tiles), 1, 1),
        key,
        descriptor(x, ROWS.value, PIECE),
        descriptor(y, ROWS.value, PIECE),
        offsets,
        squares,
        out,
        num_rows,
        tiles,
        *constants,
    )
    return out


@outer.register_fake
def _(x, y, offsets, squares, total):
    return x.new_empty(total)


register_outer(outer, inner)
