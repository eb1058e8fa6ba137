"""Which tile of a jagged attention each program works on, decided on the device from the offsets.

A persistent kernel over rows of unequal length needs a list of the tiles that exist, and an order in which every
program gets the same amount of work. Tiles are sorted by their number of blocks, the most first, and dealt to the
programs like cards, in alternating directions: round r gives position r * P + p to program p when r is even and to
program P - 1 - p when it is odd. Within equal work, tiles of a row stay neighbours and share its blocks in L2.

A tile is a run of `block_main` positions of one row of the main side; a block is a run of `block_other` positions of
the same row of the other side. Attention forward has queries on the main side and keys on the other, the gradient of
keys and values the reverse. The list depends only on offsets and masks: layers that share these share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.caches import cached
from kernels.core.launch import Launcher, aligned

# Columns of the list: where the tile starts in the main values, how many of its positions exist, its first position
# within the row, where the row starts in the other values and how long it is there, the first block with any visible
# pair and how many blocks from there on have one, and the row.
MAIN_BEGIN = tl.constexpr(0)
MAIN_COUNT = tl.constexpr(1)
MAIN_POSITION = tl.constexpr(2)
OTHER_BEGIN = tl.constexpr(3)
OTHER_LENGTH = tl.constexpr(4)
FIRST_BLOCK = tl.constexpr(5)
NUM_BLOCKS = tl.constexpr(6)
ROW = tl.constexpr(7)
COLUMNS = tl.constexpr(8)

# With a window.
_MAX_BINS = 64
_ROWS_PER_STEP = 1024
_ROWS_PER_PART = 128
# Without one. A program places the tiles of one row, or of several if there are more than _FEW_ROWS.
_FEW_ROWS = 4096
_ROWS_PER_PROGRAM = 8
_ROWS_PER_SCAN = 128
_TILES_PER_STEP = 32


def tile_schedule(
    main_offsets: Tensor,
    other_offsets: Tensor,
    main_total: int,
    max_other: int,
    block_main: int,
    block_other: int,
    window: tuple[int, int] = (-1, -1),
    max_main: int | None = None,
    span: int | None = None,
    short: int = 0,
) -> Tensor:
    """int32 [1 + capacity, COLUMNS]: element [0, 0] is the number of tiles, tile t is row 1 + t.

    Offsets are [B + 1] int32 or int64 on one CUDA device; `main_total` is the number of main values, fewer than 2^31.
    Main position i sees other position j when i - left <= j <= i + right with window = (left, right), -1 for
    unlimited; a causal attention has right = 0, and its transpose left = 0. A tile that sees nothing is listed too,
    with 0 blocks, because its output has to be written. Under a window lengths above `max_other` are sorted as if they
    were equal, and with `max_main` given a row longer than that or than `max_other` is a device assertion. Without one,
    MAIN_COUNT counts up to `span` positions, those of neighbouring tiles too; without `span` those of the tile. Rows of
    at most `short` positions on both sides are left out: another kernel takes them.

    Calls with the same offsets and equal numbers share one list, which must not be written to.
    """
    numbers = (main_total, max_other, block_main, block_other, window, max_main, span or block_main, short)
    return cached(
        lambda: _tile_schedule(main_offsets, other_offsets, *numbers), ("tiles", *numbers), main_offsets, other_offsets
    )


def _tile_schedule(
    main_offsets: Tensor,
    other_offsets: Tensor,
    main_total: int,
    max_other: int,
    block_main: int,
    block_other: int,
    window: tuple[int, int],
    max_main: int | None,
    span: int,
    short: int,
) -> Tensor:
    num_rows = main_offsets.shape[0] - 1
    capacity = main_total // block_main + min(num_rows, main_total)
    table = torch.empty(1 + capacity, COLUMNS.value, dtype=torch.int32, device=main_offsets.device)
    max_other = min(max_other, 2**31 - 1)
    checked = max_main is not None
    longest = min(max_main, 2**31 - 1) if max_main is not None else 0
    left, right = window
    if left < 0 and right < 0:
        rows = 1 if num_rows <= _FEW_ROWS else _ROWS_PER_PROGRAM
        constants = (block_main, block_other, span, checked, short, rows, _ROWS_PER_SCAN, _TILES_PER_STEP)
        _launch_whole_rows(
            (-(-num_rows // rows), 1, 1),
            (table.device, main_offsets.dtype, other_offsets.dtype, *aligned(main_offsets, other_offsets), *constants),
            main_offsets, other_offsets, table, num_rows, longest, max_other, *constants,
        )  # fmt: skip
        return table
    max_blocks = -(-max_other // block_other)
    bin_width = -(-(max_blocks + 1) // _MAX_BINS)
    num_bins = max_blocks // bin_width + 1
    constants = (block_main, block_other, left >= 0, right >= 0, checked, short)
    _launch_schedule(
        (num_bins, -(-num_rows // _ROWS_PER_PART), 1),
        (table.device, main_offsets.dtype, other_offsets.dtype, *aligned(main_offsets, other_offsets), *constants),
        main_offsets, other_offsets, table, num_rows, bin_width, left, right, longest, max_other, *constants,
        _ROWS_PER_STEP, _ROWS_PER_PART,
    )  # fmt: skip
    return table


@triton.jit
def _lengths(offsets, rows, num_rows):
    """(begin, length) int32 of `rows`; rows that do not exist are empty."""
    inside = rows < num_rows
    begin = tl.load(offsets + rows, inside, 0).to(tl.int32)
    return begin, tl.load(offsets + rows + 1, inside, 0).to(tl.int32) - begin


@triton.jit
def _tiles(main_length, other_length, BLOCK_MAIN: tl.constexpr, SHORT: tl.constexpr):
    """How many tiles a row has in the list."""
    tiles = (main_length + BLOCK_MAIN - 1) // BLOCK_MAIN
    if SHORT:
        tiles = tl.where((main_length <= SHORT) & (other_length <= SHORT), 0, tiles)
    return tiles


@triton.jit
def _blocks(
    position,
    other_length,
    left,
    right,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """(first block, number of blocks) that main positions position .. position + BLOCK_MAIN - 1 see."""
    begin = position * 0
    end = other_length
    if LEFT:
        begin = tl.maximum(position - left, 0)
    if RIGHT:
        end = tl.minimum(end, position + BLOCK_MAIN + right)
    first = begin // BLOCK_OTHER
    return first, tl.where(begin < end, (end + BLOCK_OTHER - 1) // BLOCK_OTHER - first, 0)


@triton.jit(do_not_specialize=["num_rows", "max_main", "max_other"])
def _whole_rows_kernel(
    main_offsets,
    other_offsets,
    table,
    num_rows,
    max_main,
    max_other,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    SPAN: tl.constexpr,
    CHECKED: tl.constexpr,
    SHORT: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    STEP: tl.constexpr,
):
    """The list without a window, where all tiles of a row have equally many blocks: each program places those of ROWS.

    They come after the tiles of rows with more blocks, and of earlier rows with as many. A short list takes as long as
    loading the kernel's instructions, so there are few.
    """
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    main_begin, main_length = _lengths(main_offsets, own, num_rows)
    other_begin, other_length = _lengths(other_offsets, own, num_rows)
    if CHECKED:
        fits = (main_length <= max_main) & (other_length <= max_other)
        tl.device_assert(fits, "a jagged row is longer than its maximum")
    blocks = (other_length + BLOCK_OTHER - 1) // BLOCK_OTHER
    before = tl.zeros([ROWS, SCAN], tl.int32)
    every = tl.zeros([SCAN], tl.int32)
    for start in range(0, num_rows, SCAN):
        rows = start + tl.arange(0, SCAN)
        _, lengths = _lengths(main_offsets, rows, num_rows)
        _, others = _lengths(other_offsets, rows, num_rows)
        tiles = _tiles(lengths, others, BLOCK_MAIN, SHORT)
        theirs = ((others + BLOCK_OTHER - 1) // BLOCK_OTHER)[None, :]
        earlier = (theirs > blocks[:, None]) | ((theirs == blocks[:, None]) & (rows[None, :] < own[:, None]))
        before += tl.where(earlier, tiles[None, :], 0)
        every += tiles
    if tl.program_id(0) == 0:
        tl.store(table, tl.sum(every))
    place = 1 + tl.sum(before, 1)
    tiles = _tiles(main_length, other_length, BLOCK_MAIN, SHORT)
    for start in range(0, tl.max(tiles), STEP):
        number = start + tl.arange(0, STEP)[None, :]
        chosen = number < tiles[:, None]
        position = number * BLOCK_MAIN
        entry = table + (place[:, None] + number).to(tl.int64) * COLUMNS
        tl.store(entry + MAIN_BEGIN, main_begin[:, None] + position, chosen)
        tl.store(entry + MAIN_COUNT, tl.minimum(main_length[:, None] - position, SPAN), chosen)
        tl.store(entry + MAIN_POSITION, position, chosen)
        tl.store(entry + OTHER_BEGIN, other_begin[:, None], chosen)
        tl.store(entry + OTHER_LENGTH, other_length[:, None], chosen)
        tl.store(entry + FIRST_BLOCK, 0, chosen)
        tl.store(entry + NUM_BLOCKS, blocks[:, None], chosen)
        tl.store(entry + ROW, own[:, None], chosen)


@triton.jit(do_not_specialize=["num_rows", "bin_width", "left", "right", "max_main", "max_other"])
def _schedule_kernel(
    main_offsets,
    other_offsets,
    table,
    num_rows,
    bin_width,
    left,
    right,
    max_main,
    max_other,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHECKED: tl.constexpr,
    SHORT: tl.constexpr,
    SCAN: tl.constexpr,
    PART: tl.constexpr,
):
    """The list with a window: a counting sort without atomics.

    Program (bin, part) places the tiles of one bin and one part of the rows. They come after all tiles of higher bins
    and those of the same bin in earlier parts, which each program counts itself.
    """
    own = tl.program_id(0)
    last = tl.num_programs(0) - 1
    own_begin = tl.program_id(1) * PART
    every = tl.zeros([SCAN], tl.int32)
    before = tl.zeros([SCAN], tl.int32)
    for start in range(0, num_rows, SCAN):
        rows = start + tl.arange(0, SCAN)
        _, main_length = _lengths(main_offsets, rows, num_rows)
        _, other_length = _lengths(other_offsets, rows, num_rows)
        tiles = _tiles(main_length, other_length, BLOCK_MAIN, SHORT)
        every += tiles
        for t in range(tl.max(tiles)):
            _, blocks = _blocks(
                rows * 0 + t * BLOCK_MAIN, other_length, left, right, BLOCK_MAIN, BLOCK_OTHER, LEFT, RIGHT
            )
            bins = tl.minimum(blocks // bin_width, last)
            earlier = (bins > own) | ((bins == own) & (rows < own_begin))
            before += (earlier & (t < tiles)).to(tl.int32)
    if own + own_begin == 0:
        tl.store(table, tl.sum(every))

    rows = own_begin + tl.arange(0, PART)
    main_begin, main_length = _lengths(main_offsets, rows, num_rows)
    other_begin, other_length = _lengths(other_offsets, rows, num_rows)
    if CHECKED:
        fits = (main_length <= max_main) & (other_length <= max_other)
        tl.device_assert(fits, "a jagged row is longer than its maximum")
    tiles = _tiles(main_length, other_length, BLOCK_MAIN, SHORT)
    steps = tl.max(tiles)
    mine = tl.zeros([PART], tl.int32)
    for t in range(steps):
        _, blocks = _blocks(rows * 0 + t * BLOCK_MAIN, other_length, left, right, BLOCK_MAIN, BLOCK_OTHER, LEFT, RIGHT)
        mine += ((t < tiles) & (tl.minimum(blocks // bin_width, last) == own)).to(tl.int32)
    place = 1 + tl.sum(before) + tl.cumsum(mine, 0) - mine
    for t in range(tl.max(tl.where(mine > 0, tiles, 0))):
        position = rows * 0 + t * BLOCK_MAIN
        first, blocks = _blocks(position, other_length, left, right, BLOCK_MAIN, BLOCK_OTHER, LEFT, RIGHT)
        chosen = (t < tiles) & (tl.minimum(blocks // bin_width, last) == own)
        entry = table + place.to(tl.int64) * COLUMNS
        tl.store(entry + MAIN_BEGIN, main_begin + position, chosen)
        tl.store(entry + MAIN_COUNT, tl.minimum(main_length - position, BLOCK_MAIN), chosen)
        tl.store(entry + MAIN_POSITION, position, chosen)
        tl.store(entry + OTHER_BEGIN, other_begin, chosen)
        tl.store(entry + OTHER_LENGTH, other_length, chosen)
        tl.store(entry + FIRST_BLOCK, first, chosen)
        tl.store(entry + NUM_BLOCKS, blocks, chosen)
        tl.store(entry + ROW, rows, chosen)
        place += chosen.to(tl.int32)


# With assertions, except those for overflow.
_launch_whole_rows = Launcher(_whole_rows_kernel, num_warps=1, debug=True, sanitize_overflow=False)
_launch_schedule = Launcher(_schedule_kernel, num_warps=4, debug=True, sanitize_overflow=False)


@gluon.jit
def num_rounds(num_items):
    """How many of `num_items` items this program is dealt (Gluon)."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    full = num_items // programs
    place = program + (full % 2) * (programs - 1 - 2 * program)
    return full + (full * programs + place < num_items).to(gl.int32)


@gluon.jit
def dealt_position(turn):
    """Which item this program is dealt in round `turn` (Gluon)."""
    programs = gl.num_programs(0)
    return turn * programs + gl.program_id(0) + (turn % 2) * (programs - 1 - 2 * gl.program_id(0))


@gluon.jit
def dealt_item(schedule, turn, num_heads):
    """(pointer to the entry of its tile, head) of the item that this program is dealt in round `turn` (Gluon).

    Items are tiles times heads, the heads of a tile side by side.
    """
    position = dealt_position(turn)
    return schedule + (1 + position // num_heads) * COLUMNS, position % num_heads
