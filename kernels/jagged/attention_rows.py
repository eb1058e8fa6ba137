"""What the attention backward prepares: tiles of keys in the order of their work, and per-query numbers.

Per-query numbers lie on an axis of tiles of TILE queries on which every row starts a new tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launcher, aligned

# Columns of both tables; the kernels read them by position.
FIELDS = ("q_start", "q_length", "k_start", "k_length", "first_tile", "key_tile", "q_tiles_before", "k_tiles_before")
TILE = 64
KEY_TILE = tl.constexpr(128)
LOG2_E = 1.4426950408889634


@triton.jit
def _work(q_offsets_ptr, k_offsets_ptr, rows, num_rows):
    inside = rows < num_rows
    q = tl.load(q_offsets_ptr + rows + 1, inside, 0) - tl.load(q_offsets_ptr + rows, inside, 0)
    k = tl.load(k_offsets_ptr + rows + 1, inside, 0) - tl.load(k_offsets_ptr + rows, inside, 0)
    # Rows without queries or keys still have outputs to write; padding comes behind them.
    return tl.where(inside, (q.to(tl.int64) + 64) * (k.to(tl.int64) + 64), -1)


@triton.jit
def _tiles(q_offsets_ptr, k_offsets_ptr, rows, num_rows):
    inside = rows < num_rows
    q = tl.load(q_offsets_ptr + rows + 1, inside, 0) - tl.load(q_offsets_ptr + rows, inside, 0)
    k = tl.load(k_offsets_ptr + rows + 1, inside, 0) - tl.load(k_offsets_ptr + rows, inside, 0)
    q_tiles = tl.maximum((q.to(tl.int32) + 63) // 64, 1)
    return q_tiles, tl.maximum((k.to(tl.int32) + KEY_TILE - 1) // KEY_TILE, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _row_table_kernel(q_offsets_ptr, k_offsets_ptr, table_ptr, num_rows, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = _work(q_offsets_ptr, k_offsets_ptr, rows, num_rows)
    rank = tl.zeros([BLOCK], tl.int32)
    q_before = tl.zeros([BLOCK], tl.int32)
    k_before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, OTHERS):
        others = start + tl.arange(0, OTHERS)
        work = _work(q_offsets_ptr, k_offsets_ptr, others, num_rows)
        before = (work[None, :] > own[:, None]) | ((work[None, :] == own[:, None]) & (others[None, :] < rows[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
        q_tiles, k_tiles = _tiles(q_offsets_ptr, k_offsets_ptr, others, num_rows)
        q_before += tl.sum(tl.where(before, q_tiles[None, :], 0), 1)
        k_before += tl.sum(tl.where(before, k_tiles[None, :], 0), 1)
    inside = rows < num_rows
    q_start = tl.load(q_offsets_ptr + rows, inside, 0).to(tl.int32)
    q_end = tl.load(q_offsets_ptr + rows + 1, inside, 0).to(tl.int32)
    k_start = tl.load(k_offsets_ptr + rows, inside, 0).to(tl.int32)
    k_end = tl.load(k_offsets_ptr + rows + 1, inside, 0).to(tl.int32)
    entry = table_ptr + rank.to(tl.int64) * 8
    tl.store(entry, q_start, inside)
    tl.store(entry + 1, q_end - q_start, inside)
    tl.store(entry + 2, k_start, inside)
    tl.store(entry + 3, k_end - k_start, inside)
    tl.store(entry + 4, q_start // 64 + rows, inside)
    tl.store(entry + 6, q_before, inside)
    tl.store(entry + 7, k_before, inside)


def row_table(q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    """int32 [B, 8], fields FIELDS but `key_tile`: the rows with the most scores first, ties in their own order.

    `first_tile` is where the row begins on the axis of query tiles.
    Ranks come from comparing all pairs of rows, which spares the many launches of a sort.
    """
    num_rows = q_offsets.shape[0] - 1
    table = torch.empty(num_rows, len(FIELDS), dtype=torch.int32, device=q_offsets.device)
    block = 16
    key = (table.device, q_offsets.dtype, k_offsets.dtype, *aligned(q_offsets, k_offsets))
    grid = (-(-num_rows // block), 1, 1)
    _launch_row_table(grid, key, q_offsets, k_offsets, table, num_rows, block, 256)
    return table


@triton.jit(do_not_specialize=["num_rows"])
def _tile_table_kernel(rows_ptr, table_ptr, num_rows, MEMBERS: tl.constexpr, SCAN: tl.constexpr):
    first = tl.program_id(0) * MEMBERS
    earlier = tl.zeros([SCAN], tl.int32)
    for start in range(0, first, SCAN):
        rows = start + tl.arange(0, SCAN)
        k_length = tl.load(rows_ptr + rows * 8 + 3, rows < first, 0)
        earlier += tl.where(rows < first, tl.maximum((k_length + KEY_TILE - 1) // KEY_TILE, 1), 0)
    place = 1 + tl.sum(earlier)
    rows = first + tl.arange(0, MEMBERS)
    inside = rows < num_rows
    q_start = tl.load(rows_ptr + rows * 8, inside, 0)
    q_length = tl.load(rows_ptr + rows * 8 + 1, inside, 0)
    k_start = tl.load(rows_ptr + rows * 8 + 2, inside, 0)
    k_length = tl.load(rows_ptr + rows * 8 + 3, inside, 0)
    first_tile = tl.load(rows_ptr + rows * 8 + 4, inside, 0)
    tiles = tl.where(inside, tl.maximum((k_length + KEY_TILE - 1) // KEY_TILE, 1), 0)
    for j in range(tl.max(tiles)):
        has = tiles > j
        count = tl.cumsum(has.to(tl.int32), 0)
        entry = table_ptr + (place + count - 1).to(tl.int64) * 8
        tl.store(entry, q_start, has)
        tl.store(entry + 1, q_length, has)
        tl.store(entry + 2, k_start, has)
        tl.store(entry + 3, k_length, has)
        tl.store(entry + 4, first_tile, has)
        tl.store(entry + 5, rows * 0 + j, has)
        place += tl.sum(has.to(tl.int32))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(table_ptr, place - 1)


@triton.jit(do_not_specialize=["num_rows"])
def _wave_table_kernel(rows_ptr, table_ptr, num_rows, TOGETHER: tl.constexpr):
    row = tl.program_id(0)
    q_start = tl.load(rows_ptr + row * 8)
    q_length = tl.load(rows_ptr + row * 8 + 1)
    k_start = tl.load(rows_ptr + row * 8 + 2)
    k_length = tl.load(rows_ptr + row * 8 + 3)
    first_tile = tl.load(rows_ptr + row * 8 + 4)
    wave = tl.load(rows_ptr + row * 8 + 6) // TOGETHER
    k_before = tl.load(rows_ptr + row * 8 + 7)
    own_tiles = tl.maximum((k_length + KEY_TILE - 1) // KEY_TILE, 1)
    # A row has a tile of queries at least, so that its wave is among its neighbours.
    others = row - TOGETHER + tl.arange(0, 2 * TOGETHER)
    inside = (others >= 0) & (others < num_rows)
    member = inside & (tl.load(rows_ptr + others * 8 + 6, inside, 0) // TOGETHER == wave)
    k_lengths = tl.load(rows_ptr + others * 8 + 3, member, 0)
    tiles = tl.where(member, tl.maximum((k_lengths + KEY_TILE - 1) // KEY_TILE, 1), 0)
    earlier = others < row
    place = 1 + k_before - tl.sum(tl.where(earlier, tiles, 0))
    for j in range(own_tiles):
        ahead = tl.minimum(tiles, j) + (earlier & (tiles > j)).to(tl.int32)
        entry = table_ptr + (place + tl.sum(ahead)).to(tl.int64) * 8
        tl.store(entry, q_start)
        tl.store(entry + 1, q_length)
        tl.store(entry + 2, k_start)
        tl.store(entry + 3, k_length)
        tl.store(entry + 4, first_tile)
        tl.store(entry + 5, j)
    if row == num_rows - 1:
        tl.store(table_ptr, k_before + own_tiles)


def wave_table(q_offsets: Tensor, k_offsets: Tensor, num_keys: int, together: int) -> Tensor:
    """As `tile_table`, but rows are taken as many at a time as have `together` (a power of two) tiles of queries.

    Tile j of a row waits for what its tile j - 1 does step by step, so that of short rows more have to be under way.
    """
    rows = row_table(q_offsets, k_offsets)
    num_rows = rows.shape[0]
    table = rows.new_empty(1 + num_keys // KEY_TILE.value + num_rows, len(FIELDS))
    _launch_wave_table((num_rows, 1, 1), (rows.device, together), rows, table, num_rows, together)
    return table


def tile_table(q_offsets: Tensor, k_offsets: Tensor, num_keys: int, members: int) -> Tensor:
    """int32 [1 + capacity, 8]: element [0, 0] is the number of key tiles, tile t is row 1 + t, with
    the first six of FIELDS.

    The rows of `row_table` are taken `members` (a power of two) at a time: first the first key tile of each, then the
    second, and so on, so that tile j of a row comes some time after its tile j - 1, and not too long. A row without
    keys has one tile.
    """
    rows = row_table(q_offsets, k_offsets)
    num_rows = rows.shape[0]
    table = rows.new_empty(1 + num_keys // KEY_TILE.value + num_rows, len(FIELDS))
    grid = (-(-num_rows // members), 1, 1)
    _launch_tile_table(grid, (rows.device, members), rows, table, num_rows, members, 1024)
    return table


@triton.jit(do_not_specialize=["num_queries", "stride"])
def _row_statistics_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    offsets_ptr,
    statistics_ptr,
    flags_ptr,
    num_queries,
    stride,
    out_row,
    out_head,
    grad_row,
    grad_head,
    D: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    # In 64 bits: a head's stride may be that of all rows.
    head = tl.program_id(2).to(tl.int64)
    start = tl.load(offsets_ptr + row).to(tl.int64)
    length = tl.load(offsets_ptr + row + 1).to(tl.int64) - start
    if tile * 64 >= length:
        return
    position = tile * 64 + tl.arange(0, 64)
    inside = position < length
    column = tl.arange(0, D)
    query = (start + position)[:, None]
    target = (start // 64 + row) * 64 + position
    out = tl.load(out_ptr + query * out_row + head * out_head + column, inside[:, None], 0.0)
    grad = tl.load(grad_ptr + query * grad_row + head * grad_head + column, inside[:, None], 0.0)
    lse = tl.load(lse_ptr + head * num_queries + start + position, inside, float("inf"))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(statistics_ptr + head * stride + target, lse * 1.4426950408889634)
    tl.store(statistics_ptr + (tl.num_programs(2) + head) * stride + target, delta)
    tl.store(flags_ptr + head * (stride // 64) + start // 64 + row + tile, 0)


def row_statistics(out: Tensor, grad_out: Tensor, lse: Tensor, q_offsets: Tensor, max_q: int) -> tuple[Tensor, Tensor]:
    """(lse in base 2 and delta = sum over d of out * grad_out, float32 [2, H, tiles * TILE]; zeros, int32 [H, tiles]).

    Places behind a row's end hold lse = +inf and delta = 0, so that scores there exponentiate to zero.
    """
    num_queries, num_heads, head_dim = out.shape
    num_rows = q_offsets.shape[0] - 1
    tiles = num_queries // TILE + num_rows
    device = out.device
    statistics = torch.empty(2, num_heads, tiles * TILE, dtype=torch.float32, device=device)
    flags = torch.empty(num_heads, tiles, dtype=torch.int32, device=device)
    strides = (*out.stride()[:2], *grad_out.stride()[:2])
    _launch_statistics(
        (num_rows, -(-min(max_q, num_queries) // TILE), num_heads),
        (device, out.dtype, grad_out.dtype, q_offsets.dtype, *aligned(out, grad_out, lse, q_offsets), *strides,
         head_dim),
        out, grad_out, lse, q_offsets, statistics, flags, num_queries, tiles * TILE, *strides, head_dim,
    )  # fmt: skip
    return statistics, flags


_launch_row_table = Launcher(_row_table_kernel, num_warps=4)
_launch_tile_table = Launcher(_tile_table_kernel, num_warps=4)
_launch_wave_table = Launcher(_wave_table_kernel, num_warps=4)
_launch_statistics = Launcher(_row_statistics_kernel, num_warps=4)
