"""What the attention backward prepares: tiles of keys in the order of their work, and per-query numbers.

Per-query numbers lie on an axis of tiles of TILE queries on which every row starts a new tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned

# Columns of both tables: where a row's queries and keys start, how many there are, and where it begins on the axis of
# query tiles. For a tile also its number within the row and the query tiles of the row's later runs; for a row also the
# query and key tiles of the rows before it.
Q_START = tl.constexpr(0)
Q_LENGTH = tl.constexpr(1)
K_START = tl.constexpr(2)
K_LENGTH = tl.constexpr(3)
FIRST_TILE = tl.constexpr(4)
NUMBER = tl.constexpr(5)
LATER = tl.constexpr(6)
Q_TILES_BEFORE = tl.constexpr(6)
K_TILES_BEFORE = tl.constexpr(7)
COLUMNS = tl.constexpr(8)

TILE = tl.constexpr(64)
KEY_TILE = tl.constexpr(128)
LOG2_E = 1.4426950408889634


@triton.jit
def _tiles(length, SIZE: tl.constexpr):
    """Number of tiles; an empty row has one, too."""
    return tl.maximum((length.to(tl.int32) + SIZE - 1) // SIZE, 1)


@triton.jit
def _lengths(q_offsets_ptr, k_offsets_ptr, rows, num_rows, RUNS: tl.constexpr):
    inside = rows < num_rows
    q = tl.load(q_offsets_ptr + rows + 1, inside, 0) - tl.load(q_offsets_ptr + rows, inside, 0)
    for run in tl.static_range(1, RUNS):
        own = q_offsets_ptr + run * (num_rows + 1) + rows
        q += tl.load(own + 1, inside, 0) - tl.load(own, inside, 0)
    k = tl.load(k_offsets_ptr + rows + 1, inside, 0) - tl.load(k_offsets_ptr + rows, inside, 0)
    return q, k


@triton.jit
def _key_tiles(q_length, k_length, SHORT: tl.constexpr):
    """Number of key tiles of a row; 0 if it is left out."""
    tiles = _tiles(k_length, KEY_TILE)
    if SHORT:
        tiles = tl.where((q_length <= SHORT) & (k_length <= SHORT), 0, tiles)
    return tiles


@triton.jit
def _work(q_offsets_ptr, k_offsets_ptr, rows, num_rows, RUNS: tl.constexpr, SHORT: tl.constexpr):
    """The sorting key of rows. Rows without queries or keys still have outputs to write; after them come rows that are
    left out, and padding. float32, because its comparison is a single instruction."""
    q, k = _lengths(q_offsets_ptr, k_offsets_ptr, rows, num_rows, RUNS)
    work = (q + TILE).to(tl.float32) * (k + TILE).to(tl.float32)
    if SHORT:
        work = tl.where((q <= SHORT) & (k <= SHORT), 0.0, work)
    return tl.where(rows < num_rows, work, -1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _row_table_kernel(
    q_offsets_ptr, k_offsets_ptr, table_ptr, num_rows, RUNS: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = _work(q_offsets_ptr, k_offsets_ptr, rows, num_rows, RUNS, SHORT)
    ranks = tl.zeros([BLOCK, OTHERS], tl.int32)
    q_tiles = tl.zeros([BLOCK, OTHERS], tl.int32)
    k_tiles = tl.zeros([BLOCK, OTHERS], tl.int32)
    for start in range(0, num_rows, OTHERS):
        others = start + tl.arange(0, OTHERS)
        work = _work(q_offsets_ptr, k_offsets_ptr, others, num_rows, RUNS, SHORT)
        before = (work[None, :] > own[:, None]) | ((work[None, :] == own[:, None]) & (others[None, :] < rows[:, None]))
        ranks += before.to(tl.int32)
        q_length, k_length = _lengths(q_offsets_ptr, k_offsets_ptr, others, num_rows, RUNS)
        if RUNS == 1:
            q_tiles += tl.where(before, _tiles(q_length, TILE)[None, :], 0)
        k_tiles += tl.where(before, _key_tiles(q_length, k_length, SHORT)[None, :], 0)
    rank = tl.sum(ranks, 1)
    inside = rows < num_rows
    k_start = tl.load(k_offsets_ptr + rows, inside, 0).to(tl.int32)
    k_end = tl.load(k_offsets_ptr + rows + 1, inside, 0).to(tl.int32)
    for run in tl.static_range(RUNS):
        own_row = run * (num_rows + 1) + rows
        q_start = tl.load(q_offsets_ptr + own_row, inside, 0).to(tl.int32)
        q_end = tl.load(q_offsets_ptr + own_row + 1, inside, 0).to(tl.int32)
        entry = table_ptr + (rank.to(tl.int64) * RUNS + run) * COLUMNS
        tl.store(entry + Q_START, q_start, inside)
        tl.store(entry + Q_LENGTH, q_end - q_start, inside)
        tl.store(entry + K_START, k_start, inside)
        tl.store(entry + K_LENGTH, k_end - k_start, inside)
        tl.store(entry + FIRST_TILE, q_start // TILE + own_row, inside)
        if RUNS == 1:
            tl.store(entry + Q_TILES_BEFORE, tl.sum(q_tiles, 1), inside)
        tl.store(entry + K_TILES_BEFORE, tl.sum(k_tiles, 1), inside)


def row_table(q_offsets: Tensor, k_offsets: Tensor, runs: int = 1, short: int = 0) -> Tensor:
    """int32 [B * runs, COLUMNS] without NUMBER: the rows with the most scores first, ties in their own order.

    q_offsets are [runs * (B + 1)], those of each run of queries of all rows in turn. Row r has an entry for each of its
    runs; Q_TILES_BEFORE is set if there is one run. Rows of at most `short` queries and keys come last. Ranks come from
    comparing all pairs of rows, which avoids the many launches of a sort. Pairs are summed at the end, in few
    instructions, because loading a kernel's instructions takes longer than running them here.
    """
    num_rows = k_offsets.shape[0] - 1
    table = torch.empty(num_rows * runs, COLUMNS.value, dtype=torch.int32, device=q_offsets.device)
    block = 4
    key = (table.device, q_offsets.dtype, k_offsets.dtype, *aligned(q_offsets, k_offsets), runs, short)
    grid = (-(-num_rows // block), 1, 1)
    _launch_row_table(grid, key, q_offsets, k_offsets, table, num_rows, runs, short, block, 256)
    return table


@triton.jit
def _store_tile(table_ptr, place, fields, number, chosen):
    """`fields` are the columns Q_START to FIRST_TILE of the tile's row in the table of rows."""
    entry = table_ptr + place.to(tl.int64) * COLUMNS
    for column in tl.static_range(NUMBER):
        tl.store(entry + column, fields[column], chosen)
    tl.store(entry + NUMBER, number, chosen)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_table_kernel(
    rows_ptr, table_ptr, num_rows, RUNS: tl.constexpr, SHORT: tl.constexpr, MEMBERS: tl.constexpr, SCAN: tl.constexpr
):
    first = tl.program_id(0) * MEMBERS
    earlier = tl.zeros([SCAN], tl.int32)
    for start in range(0, first, SCAN):
        rows = start + tl.arange(0, SCAN)
        q_length = tl.load(rows_ptr + rows * RUNS * COLUMNS + Q_LENGTH, rows < first, 0)
        k_length = tl.load(rows_ptr + rows * RUNS * COLUMNS + K_LENGTH, rows < first, 0)
        earlier += tl.where(rows < first, _key_tiles(q_length, k_length, SHORT), 0)
    place = tl.sum(earlier)
    rows = first + tl.arange(0, MEMBERS)
    inside = rows < num_rows
    q_length = tl.load(rows_ptr + rows * RUNS * COLUMNS + Q_LENGTH, inside, 0)
    k_length = tl.load(rows_ptr + rows * RUNS * COLUMNS + K_LENGTH, inside, 0)
    tiles = tl.where(inside, _key_tiles(q_length, k_length, SHORT), 0)
    later = tl.zeros([MEMBERS], tl.int32)
    for run in tl.static_range(RUNS - 1, -1, -1):
        entry = rows_ptr + (rows * RUNS + run) * COLUMNS
        q_start = tl.load(entry + Q_START, inside, 0)
        q_length = tl.load(entry + Q_LENGTH, inside, 0)
        k_start = tl.load(entry + K_START, inside, 0)
        first_tile = tl.load(entry + FIRST_TILE, inside, 0)
        fields = (q_start, q_length, k_start, k_length, first_tile)
        next_place = place
        for j in range(tl.max(tiles)):
            has = tiles > j
            count = tl.cumsum(has.to(tl.int32), 0)
            own = 1 + (next_place + count - 1) * RUNS + run
            _store_tile(table_ptr, own, fields, rows * 0 + j, has)
            if RUNS > 1:
                tl.store(table_ptr + own.to(tl.int64) * COLUMNS + LATER, later, has)
            next_place += tl.sum(has.to(tl.int32))
        later += (q_length + TILE - 1) // TILE
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(table_ptr, place + tl.sum(tiles))


@triton.jit(do_not_specialize=["num_rows"])
def _wave_table_kernel(rows_ptr, table_ptr, num_rows, TOGETHER: tl.constexpr, SHORT: tl.constexpr):
    row = tl.program_id(0)
    entry = rows_ptr + row * COLUMNS
    q_start = tl.load(entry + Q_START)
    q_length = tl.load(entry + Q_LENGTH)
    k_start = tl.load(entry + K_START)
    k_length = tl.load(entry + K_LENGTH)
    first_tile = tl.load(entry + FIRST_TILE)
    wave = tl.load(entry + Q_TILES_BEFORE) // TOGETHER
    k_before = tl.load(entry + K_TILES_BEFORE)
    own_tiles = _key_tiles(q_length, k_length, SHORT)
    # A row has at least one tile of queries here, so that its wave is that of its neighbours.
    others = row - TOGETHER + tl.arange(0, 2 * TOGETHER)
    inside = (others >= 0) & (others < num_rows)
    member = inside & (tl.load(rows_ptr + others * COLUMNS + Q_TILES_BEFORE, inside, 0) // TOGETHER == wave)
    q_lengths = tl.load(rows_ptr + others * COLUMNS + Q_LENGTH, member, 0)
    k_lengths = tl.load(rows_ptr + others * COLUMNS + K_LENGTH, member, 0)
    tiles = tl.where(member, _key_tiles(q_lengths, k_lengths, SHORT), 0)
    earlier = others < row
    place = 1 + k_before - tl.sum(tl.where(earlier, tiles, 0))
    for j in range(own_tiles):
        ahead = tl.minimum(tiles, j) + (earlier & (tiles > j)).to(tl.int32)
        _store_tile(table_ptr, place + tl.sum(ahead), (q_start, q_length, k_start, k_length, first_tile), j, None)
    if row == num_rows - 1:
        tl.store(table_ptr, k_before + own_tiles)


def wave_table(q_offsets: Tensor, k_offsets: Tensor, num_keys: int, together: int, short: int = 0) -> Tensor:
    """Like `tile_table`, but so many rows are taken at a time that they have `together` (a power of two) query tiles.

    Tile j of a row waits for its tile j - 1 at every step, so more rows must be in progress where rows are short.
    """
    rows = row_table(q_offsets, k_offsets, short=short)
    num_rows = rows.shape[0]
    table = _empty_tiles(rows, num_rows, num_keys)
    _launch_wave_table((num_rows, 1, 1), (rows.device, together, short), rows, table, num_rows, together, short)
    return table


def tile_table(
    q_offsets: Tensor, k_offsets: Tensor, num_keys: int, members: int, runs: int = 1, short: int = 0
) -> Tensor:
    """int32 [1 + capacity * runs, COLUMNS] up to LATER: element [0, 0] is the number of key tiles; those of tile t and
    run g of the row's queries are in row 1 + t * runs + g, LATER only if there are several runs.

    The rows of `row_table` are taken `members` (a power of two) at a time: first the first key tile of each, then the
    second, and so on, so that tile j of a row comes some time after its tile j - 1, but not too long after it. A row
    without keys has one tile. With one run, rows of at most `short` queries and keys are left out: another kernel takes
    them.
    """
    rows = row_table(q_offsets, k_offsets, runs, short)
    num_rows = k_offsets.shape[0] - 1
    table = _empty_tiles(rows, num_rows, num_keys, runs)
    grid = (-(-num_rows // members), 1, 1)
    _launch_tile_table(grid, (rows.device, runs, short, members), rows, table, num_rows, runs, short, members, 1024)
    return table


def _empty_tiles(rows: Tensor, num_rows: int, num_keys: int, runs: int = 1) -> Tensor:
    return rows.new_empty(1 + (num_keys // KEY_TILE.value + num_rows) * runs, COLUMNS.value)


@triton.jit(do_not_specialize=["num_queries", "stride", "lse_factor"])
def _attention_statistics_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    offsets_ptr,
    k_offsets_ptr,
    statistics_ptr,
    flags_ptr,
    num_queries,
    stride,
    lse_factor,
    out_row,
    out_head,
    grad_row,
    grad_head,
    D: tl.constexpr,
    SHORT: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    # In 64 bits: the stride of a head may span all rows.
    head = tl.program_id(2).to(tl.int64)
    start = tl.load(offsets_ptr + row).to(tl.int64)
    length = tl.load(offsets_ptr + row + 1).to(tl.int64) - start
    if tile * TILE >= length:
        return
    if SHORT:
        keys = tl.load(k_offsets_ptr + row + 1) - tl.load(k_offsets_ptr + row)
        if (length <= SHORT) & (keys <= SHORT):
            return
    position = tile * TILE + tl.arange(0, TILE)
    inside = position < length
    column = tl.arange(0, D)
    query = (start + position)[:, None]
    target = (start // TILE + row) * TILE + position
    out = tl.load(out_ptr + query * out_row + head * out_head + column, inside[:, None], 0.0)
    grad = tl.load(grad_ptr + query * grad_row + head * grad_head + column, inside[:, None], 0.0)
    lse = tl.load(lse_ptr + head * num_queries + start + position, inside, float("inf"))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(statistics_ptr + head * stride + target, lse * lse_factor)
    tl.store(statistics_ptr + (tl.num_programs(2) + head) * stride + target, delta)
    tl.store(flags_ptr + head * (stride // TILE) + start // TILE + row + tile, 0)


def row_statistics(
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    max_q: int,
    lse_factor: float,
    k_offsets: Tensor | None = None,
    short: int = 0,
) -> tuple[Tensor, Tensor]:
    """(lse times lse_factor and delta = sum over d of out * grad_out, float32 [2, H, tiles * TILE]; flags).

    The flags are zeros, int32 [H, tiles]. Entries beyond a row's end have lse = +inf and delta = 0: with a negative
    factor, the exponential of scores that start from them is zero. Nothing is written for rows of at most `short`
    queries and keys; to find them, `k_offsets` is needed.
    """
    num_queries, num_heads, head_dim = out.shape
    num_rows = q_offsets.shape[0] - 1
    k_offsets = q_offsets if k_offsets is None else k_offsets
    tiles = num_queries // TILE.value + num_rows
    device = out.device
    statistics = torch.empty(2, num_heads, tiles * TILE.value, dtype=torch.float32, device=device)
    flags = torch.empty(num_heads, tiles, dtype=torch.int32, device=device)
    strides = (*out.stride()[:2], *grad_out.stride()[:2])
    _launch_statistics(
        (num_rows, -(-min(max_q, num_queries) // TILE.value), num_heads),
        (device, out.dtype, grad_out.dtype, q_offsets.dtype, k_offsets.dtype,
         *aligned(out, grad_out, lse, q_offsets, k_offsets), *strides, head_dim, short),
        out, grad_out, lse, q_offsets, k_offsets, statistics, flags, num_queries, tiles * TILE.value, lse_factor,
        *strides, head_dim, short,
    )  # fmt: skip
    return statistics, flags


_launch_row_table = Launcher(_row_table_kernel, num_warps=4)
_launch_tile_table = Launcher(_tile_table_kernel, num_warps=4)
_launch_wave_table = Launcher(_wave_table_kernel, num_warps=4)
_launch_statistics = Launcher(_attention_statistics_kernel, num_warps=4)
