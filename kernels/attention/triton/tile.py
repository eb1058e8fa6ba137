"""Device code that the Triton attention kernels share: which rows a program works on, masks, biases, tile loads.

Positions i (queries) and j (keys) count within a row. No limit is a number that no position reaches, `UNLIMITED`, so
that one compiled kernel serves every mask.

Shared with `gdpa`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
UNLIMITED = 2**30


@triton.jit(do_not_specialize=["num_tiles"])
def attention_tile_rows_kernel(offsets, tile_rows, num_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(offsets + row).to(tl.int64) // TILE + row
    end = tl.load(offsets + row + 1).to(tl.int64) // TILE + row + 1
    # If there are values after the last row, their tiles count as empty ones of that row.
    end = tl.where(row == tl.num_programs(0) - 1, num_tiles, end)
    for start in range(begin, end, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(tile_rows + tile, tl.full((BLOCK,), 1, tl.int32) * row, mask=tile < end)


def tile_rows_of(offsets: Tensor, total: int, tile: int) -> Tensor:
    """[total // tile + B] int32: the row that each program's tile of `tile` values belongs to.

    Row b owns the programs from offsets[b] // tile + b on, up to those of row b + 1: never fewer than it has tiles, at
    most one more, and known without a sum over the rows before it. The number of programs is known to the host.
    """
    num_rows = offsets.shape[0] - 1
    rows = torch.empty(total // tile + num_rows, dtype=torch.int32, device=offsets.device)
    if num_rows:
        attention_tile_rows_kernel[(num_rows,)](offsets, rows, rows.shape[0], TILE=tile, BLOCK=256, num_warps=1)
    return rows


@triton.jit
def locate(tile_rows, offsets, other_offsets, program, TILE: tl.constexpr):
    """(begin int64, length, first position) of a program's tile and (begin int64, length) of its row's other side."""
    row = tl.load(tile_rows + program)
    begin = tl.load(offsets + row).to(tl.int64)
    length = (tl.load(offsets + row + 1).to(tl.int64) - begin).to(tl.int32)
    first = ((program - row - begin // TILE) * TILE).to(tl.int32)
    other_begin = tl.load(other_offsets + row).to(tl.int64)
    other_length = (tl.load(other_offsets + row + 1).to(tl.int64) - other_begin).to(tl.int32)
    return begin, length, first, other_begin, other_length


@triton.jit
def span(first, last, back, ahead, block_size, count, STEP: tl.constexpr):
    """(begin, middle_begin, middle_end, end) of the partners of positions first..last, out of `count`.

    All partners are in [begin, end). From middle_begin to middle_end, whole steps away from each other and from begin,
    every position sees every partner, so that no mask is needed there.
    """
    begin = tl.maximum(tl.maximum(first - back, first // block_size * block_size), 0)
    end = tl.minimum(tl.minimum(last + ahead + 1, (last // block_size + 1) * block_size), count)
    full_begin = tl.maximum(last - back, last // block_size * block_size)
    full_end = tl.minimum(tl.minimum(first + ahead + 1, (first // block_size + 1) * block_size), count)
    middle_begin = begin + tl.cdiv(tl.maximum(full_begin - begin, 0), STEP) * STEP
    middle_end = middle_begin + tl.maximum(full_end - middle_begin, 0) // STEP * STEP
    return begin, tl.minimum(middle_begin, end), tl.minimum(middle_end, end), end


@triton.jit
def part_of_span(begin, middle_begin, middle_end, end, MASKED: tl.constexpr):
    """(begin, end, cut, gap): the loop over the middle, or the loop over the rest, whose steps from `cut` on skip
    `gap`.
    """
    if MASKED:
        gap = middle_end - middle_begin
        part = (begin, end - gap, middle_begin, gap)
    else:
        part = (middle_begin, middle_end, middle_end, 0)
    return part


@triton.jit
def sees(i, j, masks):
    """Whether query i sees key j; i and j broadcast.

    `masks` is (number of queries, number of keys, left, right, block size).
    """
    num_queries, num_keys, left, right, block_size = masks
    inside = (i < num_queries) & (j < num_keys)
    return inside & (j >= i - left) & (j <= i + right) & (i // block_size == j // block_size)


@triton.jit
def load_rows(base, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[ROWS, BLOCK] of rows `stride` apart; zeros beyond WIDTH columns and, if MASKED, beyond `count` rows."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    pointers = base + row * stride + column
    if MASKED:
        tile = tl.load(pointers, mask=(row < count) & (column < WIDTH), other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=column < WIDTH, other=0.0)
    return tile


@triton.jit
def store_rows(base, stride, count, values, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(base + row * stride + column, values.to(base.dtype.element_ty), mask=(row < count) & (column < WIDTH))


@triton.jit
def time_bucket(q_time, k_time, edges, num_buckets, buckets_per_octave):
    """`kernels.attention.bias.time_bucket`: the logarithm is a guess, the table of edges decides."""
    gap = tl.minimum(tl.abs(q_time - k_time), 2147483646).to(tl.int32)
    # The margin is far above the error of a float32 logarithm, so the guess is right or one too low.
    guess = tl.log2(tl.maximum(gap, 1).to(tl.float32)) * buckets_per_octave - 1e-3
    guess = tl.minimum(tl.maximum(guess, 0.0).to(tl.int32), num_buckets - 1)
    return guess + (gap >= tl.load(edges + guess + 1)).to(tl.int32)


@triton.jit
def scaled_scores(s, i, j, q_time, k_time, scale2, bias, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr):
    """Scores and biases in units of log 2, for positions and times that broadcast to the tile's shape.

    `bias` is (position table, time table, edges, reach, number of buckets, buckets per octave), tables of one head.
    """
    position_table, time_table, edges, reach, num_buckets, buckets_per_octave = bias
    s = s * scale2
    if HAS_POSITION:
        index = tl.minimum(tl.maximum(j - i, -reach), reach) + reach
        s += tl.load(position_table + index) * LOG2E
    if HAS_TIME:
        s += tl.load(time_table + time_bucket(q_time, k_time, edges, num_buckets, buckets_per_octave)) * LOG2E
    return s


@triton.jit
def load_times(times, position, count, HAS_TIME: tl.constexpr):
    """Times int64 at the positions of a row that has `count`; anything if there are none."""
    time = position
    if HAS_TIME:
        time = tl.load(times + position, mask=position < count, other=0).to(tl.int64)
    return time
