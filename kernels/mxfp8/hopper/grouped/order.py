"""Which tile of a grouped product a program works on: device functions in Gluon.

Tiles are numbered group by group, so that a group's operands are read while they are in L2; within a group they run
through bands of BAND rows of tiles, column by column, so that the tiles in flight read as little as possible of both
operands. A tile never crosses into the next group. Groups differ in size, so tiles differ in work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_FEW = gl.constexpr(16)  # rounds of tiles
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def bounds(ends, group):
    """Begin and end of a group, read where they are used (see `accept_tile`)."""
    begin = gl.load(ends + gl.maximum(group - 1, 0)).to(gl.int32)
    return gl.where(group > 0, begin, 0), gl.load(ends + group).to(gl.int32)


@gluon.jit
def _count(ends, group, tiles_m, tiles_n, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """Tiles of a group: `tiles_m` x `tiles_n` if WGRAD, otherwise a row of tiles for each TILE_M of its rows."""
    if WGRAD:
        count = tiles_m * tiles_n
    else:
        begin, end = bounds(ends, group)
        count = gl.cdiv(end - begin, TILE_M) * tiles_n
    return count


@gluon.jit
def seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """(group that `tile` is in, number of that group's first tile), from those of an earlier tile.

    Start with group 0 and base 0. After the last tile the group is `num_groups`.
    """
    count = _count(ends, gl.minimum(group, num_groups - 1), tiles_m, tiles_n, TILE_M, WGRAD)
    while (group < num_groups) & (tile >= base + count):
        base += count
        group += 1
        count = _count(ends, gl.minimum(group, num_groups - 1), tiles_m, tiles_n, TILE_M, WGRAD)
    return group, base


@gluon.jit
def take(ticket, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M: gl.constexpr, WGRAD: gl.constexpr):
    """(the next free tile, its group, number of that group's first tile), from the last two of an earlier tile.

    Programs start with the tiles of their own numbers and take another one after each, so there are as many takes as
    tiles, which is `base` after the last group. The last take clears the ticket for the next kernel.
    """
    taken = gl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    tile = gl.num_programs(0) + taken
    group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    gl.store(ticket, 0, (group == num_groups) & (taken + 1 == base))
    return tile, group, base


@gluon.jit
def order_of_groups(ends, num_groups, tiles, LONGEST_FIRST: gl.constexpr):
    """How many groups come before the group of each thread's number.

    The time of a weight gradient's tile is proportional to the size of its group. If there are few tiles the longest
    come first, so that programs end together.
    """
    index = gl.arange(0, 128, _THREADS)
    sort = (num_groups <= 128) & (num_groups * tiles <= _FEW * gl.num_programs(0)) if LONGEST_FIRST else False
    rank = index
    if sort:
        known = index < num_groups
        size = gl.load(ends + index, mask=known, other=-1).to(gl.int32)
        size -= gl.load(ends + (index - 1), mask=known & (index > 0), other=0).to(gl.int32)
        rank = index * 0
        for group in range(num_groups):
            begin, end = bounds(ends, group)
            before = (end - begin > size) | ((end - begin == size) & (group < index))
            rank += before.to(gl.int32)
    return rank


@gluon.jit
def group_at(order, turn, num_groups, LONGEST_FIRST: gl.constexpr):
    """The group that comes after `turn` others."""
    if LONGEST_FIRST:
        index = gl.arange(0, 128, _THREADS)
        ordered = turn < gl.minimum(num_groups, 128)
        group = gl.where(ordered, gl.sum(gl.where(order == turn, index, 0), 0), turn)
    else:
        group = turn
    return group


@gluon.jit
def locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M: gl.constexpr, BAND: gl.constexpr,
            WGRAD: gl.constexpr):  # fmt: skip
    """A tile's (row of A, number of rows from it on, column of tiles, first r, end of r)."""
    begin, end = bounds(ends, group)
    if not WGRAD:
        tiles_m = gl.cdiv(end - begin, TILE_M)
    inside = tile - base
    band = inside // (BAND * tiles_n)
    rows = gl.minimum(tiles_m - band * BAND, BAND)
    inside -= band * (BAND * tiles_n)
    row = (band * BAND + inside % rows) * TILE_M
    column = inside // rows
    if WGRAD:
        return row, M - row, column, begin, end
    return begin + row, end - begin - row, column, begin * 0, K
