"""Tiles of the rows of a square layout on Hopper: which a program has, found ahead by a warp of its own.

A tile is 64 places of a row, and its work is that of all blocks of places of that row. `kernels/core/scheduling.py`
deals them to persistent programs.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.core.hopper import barrier
from kernels.core.scheduling import (
    COLUMNS,
    MAIN_POSITION,
    OTHER_BEGIN,
    OTHER_LENGTH,
    ROW,
    dealt_position,
    num_rounds,
    tile_schedule,
)

ROWS = gl.constexpr(64)  # places of a tile and of a block
HELD = gl.constexpr(4)  # tiles that are found ahead
NUMBERS = gl.constexpr(4)  # of a tile


@gluon.jit
def find_tiles(tiles, schedule, squares):
    """A warp: first place of each tile in its row, first one of the row, its length, its matrix; then a length of 0."""
    table, known, used = tiles
    one = gl.arange(0, 1, layout=gl.BlockedLayout([1], [32], [1], [0])).to(gl.int64)
    rounds = num_rounds(gl.load(schedule))
    for turn in range(rounds):
        entry = schedule + (1 + dealt_position(turn)) * COLUMNS
        first = gl.load(entry + MAIN_POSITION)
        begin = gl.load(entry + OTHER_BEGIN)
        count = gl.load(entry + OTHER_LENGTH)
        square = gl.load(squares + gl.load(entry + ROW)).to(gl.int64)
        index = turn % HELD
        mbarrier.wait(used.index(index), ((turn // HELD) & 1) ^ 1)
        table.index(index * NUMBERS).store(one + first)
        table.index(index * NUMBERS + 1).store(one + begin)
        table.index(index * NUMBERS + 2).store(one + count)
        table.index(index * NUMBERS + 3).store(one + square)
        barrier()
        mbarrier.arrive(known.index(index), count=1)
    index = rounds % HELD
    mbarrier.wait(used.index(index), ((rounds // HELD) & 1) ^ 1)
    table.index(index * NUMBERS + 2).store(one * 0)
    barrier()
    mbarrier.arrive(known.index(index), count=1)


@gluon.jit
def tile_table(READERS: gl.constexpr):
    """What `find_tiles` writes and READERS warps or warpgroups read."""
    table = gl.allocate_shared_memory(gl.int64, [HELD * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    known = ring_barriers(HELD, 1)
    used = ring_barriers(HELD, READERS)
    return table, known, used


@gluon.jit
def ring_barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each slot of a ring, which waits for COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def tile_numbers(tiles, number):
    """What `find_tiles` found out about a tile: the first three int32; a length of 0 says that there is none."""
    table, known, used = tiles
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = number % HELD
    mbarrier.wait(known.index(index), (number // HELD) & 1)
    first = gl.sum(table.index(index * NUMBERS).load(LANES), 0).to(gl.int32)
    begin = gl.sum(table.index(index * NUMBERS + 1).load(LANES), 0).to(gl.int32)
    count = gl.sum(table.index(index * NUMBERS + 2).load(LANES), 0).to(gl.int32)
    square = gl.sum(table.index(index * NUMBERS + 3).load(LANES), 0)
    barrier()
    mbarrier.arrive(used.index(index), count=1)
    return first, begin, count, square


def tile_list(offsets: Tensor, total: int) -> Tensor:
    """What `find_tiles` reads: the tiles of rows of `total` places together, those of the longest rows first."""
    return tile_schedule(offsets, offsets, total, total, ROWS.value, ROWS.value)
