"""Backward of `jagged_attention` in Triton: the gradients of the position and time tables.

A table entry sums ds over all pairs that read it. A fixed number of programs process the tiles in a fixed order, each
with a table of its own, and the tables are added at the end: no atomics, the same result every time, and memory that
does not grow with the batch.

Shared with `gdpa`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.bias import Bias
from kernels.attention.triton import launch
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import key_span, partner, places, structure_of, visible, walk
from kernels.attention.triton.tile import (
    LOG2E,
    load_rows,
    load_times,
    locate,
    scaled_scores,
    tile_rows_of,
    time_bucket,
)
from kernels.core.triton import block_width, cdiv

# Programs of all heads together. How sums are split affects the result, so it must not depend on the device.
PROGRAMS = 1024


@triton.jit
def _add(table, offset, values, reach):
    """table[reach + offset] += values where the offset is within the table's reach but not at its ends."""
    inside = (offset > -reach) & (offset < reach)
    # Threads of other warps may own what these threads stored the last time.
    tl.debug_barrier()
    before = tl.load(table + reach + offset, mask=inside, other=0.0)
    tl.store(table + reach + offset, before + values, mask=inside)


@triton.jit
def _sum_diagonals(ds, SIDE: tl.constexpr):
    """Sums of a square tile over column - row = c, and over column - row = c - SIDE, for c in 0..SIDE."""
    row = tl.arange(0, SIDE)[:, None]
    column = row + tl.arange(0, SIDE)[None, :]
    skewed = tl.gather(ds, column % SIDE, 1)
    upper = tl.sum(tl.where(column < SIDE, skewed, 0.0), 0)
    lower = tl.sum(tl.where(column < SIDE, 0.0, skewed), 0)
    return upper, lower


@triton.jit
def head_tables(
    position_table, time_table, head, reach, num_buckets, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr
):
    """Where the tables of a head begin."""
    if HAS_POSITION:
        position_table += head * (2 * reach + 1)
    if HAS_TIME:
        time_table += head * num_buckets
    return position_table, time_table


@triton.jit
def table_span(first, last, masks, structure, STRUCTURED: tl.constexpr, SIDE: tl.constexpr):
    """(begin, end, gaps) of the loop over all keys that the queries first..last see, in whole tiles of a row."""
    limits = key_span(first, last, masks, structure, STRUCTURED, SIDE, False)
    if STRUCTURED:
        part = walk(limits, True, STRUCTURED)
    else:
        part = (limits[0] // SIDE * SIDE, limits[3], (limits[3], 0))
    return (part[0], tl.where(first < masks[0], part[1], 0), part[2])


@triton.jit
def add_pairs(
    far_left, far_right, own, carried, time_sums, ds, seen, i, j, first, start, q_time, k_time, position_sums, bias,
    structure, SIDE: tl.constexpr, BLOCK_T: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    """Add ds of queries first.. and keys start.. to the sums of table entries: of a program's own table in memory, of
    its ends, of targets' own keys, of diagonals that the next tile goes on with, and of time buckets."""
    _position, _time, edges, reach, num_buckets, buckets_per_octave = bias
    lane = tl.arange(0, SIDE)
    if HAS_POSITION:
        i_place, j_place = places(i, j, structure, STRUCTURED)
        far_left += tl.sum(tl.where((j_place - i_place <= -reach) | (reach == 0), ds, 0.0), 0)
        # A table of one column has one end, not two.
        far_right += tl.sum(tl.where((j_place - i_place >= reach) & (reach > 0), ds, 0.0), 0)
        offset = start - first
        diagonals = ds
        if STRUCTURED:
            offset -= structure[0]
        if HAS_TARGETS:
            # All targets stand at one place, so that columns take the place of diagonals.
            history, target = structure[1], i + structure[0] >= structure[2]
            columns = tl.sum(tl.where(target & (j < history), ds, 0.0), 0)
            _add(position_sums, start - history + lane, columns, reach)
            own += tl.sum(tl.where(target & (j >= history), ds, 0.0), 0)
            diagonals = tl.where(target, 0.0, ds)
        upper, lower = _sum_diagonals(diagonals, SIDE)
        _add(position_sums, offset - SIDE + lane, carried + lower, reach)
        if STRUCTURED:  # the next tile may be elsewhere
            _add(position_sums, offset + lane, upper, reach)
        else:
            carried = upper
    if HAS_TIME:
        bucket = time_bucket(q_time, k_time, edges, num_buckets, buckets_per_octave)
        bucket_lane = tl.arange(0, BLOCK_T)
        lowest = tl.min(tl.min(tl.where(seen, bucket, num_buckets), 1), 0)
        highest = tl.max(tl.max(tl.where(seen, bucket, -1), 1), 0)
        for b in range(lowest, highest + 1):
            total = tl.sum(tl.sum(tl.where(bucket == b, ds, 0.0), 1), 0)
            time_sums += tl.where(bucket_lane == b, total, 0.0)
    return far_left, far_right, own, carried, time_sums


@triton.jit
def add_carried(
    carried, first, begin, end, position_sums, reach, SIDE: tl.constexpr, HAS_POSITION: tl.constexpr,
    STRUCTURED: tl.constexpr,
):  # fmt: skip
    if HAS_POSITION and not STRUCTURED:
        reached = begin + tl.cdiv(tl.maximum(end - begin, 0), SIDE) * SIDE
        _add(position_sums, reached - first - SIDE + tl.arange(0, SIDE), carried, reach)


@triton.jit
def store_sums(
    far_left, far_right, own, time_sums, position_sums, time_partial, reach, num_buckets, BLOCK_T: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    if HAS_POSITION:
        tl.debug_barrier()
        if HAS_TARGETS:
            tl.store(position_sums + reach, tl.load(position_sums + reach) + tl.sum(own, 0))
        tl.store(position_sums, tl.sum(far_left, 0))  # also over the line before, in a table of one column
        if reach > 0:
            tl.store(position_sums + 2 * reach, tl.sum(far_right, 0))
    if HAS_TIME:
        bucket_lane = tl.arange(0, BLOCK_T)
        tl.store(time_partial + bucket_lane, time_sums, mask=bucket_lane < num_buckets)


@triton.jit(
    do_not_specialize=["left", "right", "block_size", "total_q", "reach", "num_buckets", "num_tiles"] + kinds.SCALARS
)
def attention_table_kernel(
    q, k, v, grad, lse, delta, position_partial, time_partial, q_offsets, k_offsets, tile_rows, num_tiles,
    position_table, time_table, edges, q_times, k_times, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn,
    stride_vh, stride_gn, stride_gh, scale, left, right, block_size, reach, num_buckets, buckets_per_octave, total_q,
    num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SIDE: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PRECISION: tl.constexpr, STRUCTURED: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    stride_kn = tl.cast(stride_kn, tl.int64)
    stride_vn = tl.cast(stride_vn, tl.int64)
    tables = head_tables(position_table, time_table, head, reach, num_buckets, HAS_POSITION, HAS_TIME)
    bias = (tables[0], tables[1], edges, reach, num_buckets, buckets_per_octave)
    own_position = position_partial
    if HAS_POSITION:
        own_position += (program * NUM_HEADS + head) * (2 * reach + 1)
    lane = tl.arange(0, SIDE)
    far_left = tl.zeros((SIDE,), tl.float32)
    far_right = tl.zeros((SIDE,), tl.float32)
    own = tl.zeros((SIDE,), tl.float32)
    time_sums = tl.zeros((BLOCK_T,), tl.float32)
    for number in range(program, num_tiles, tl.num_programs(0)):
        q_begin, num_queries, first, k_begin, num_keys = locate(tile_rows, q_offsets, k_offsets, number, SIDE)
        i = (first + lane)[:, None]
        # A program without queries, of a row that has fewer tiles than programs, walks over no keys.
        last = tl.minimum(first + SIDE, num_queries) - 1
        masks = (num_queries, num_keys, left, right, block_size)
        structure = structure_of(
            num_targets, tile_rows, number, num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
        )
        begin, end, gaps = table_span(first, last, masks, structure, STRUCTURED, SIDE)
        row = q_begin + first
        statistics = head * total_q + q_begin + i
        lse2 = tl.load(lse + statistics, mask=i < num_queries, other=float("inf")) * LOG2E
        delta_tile = tl.load(delta + statistics, mask=i < num_queries, other=0.0)
        q_tile = load_rows(
            q + row * stride_qn + head * stride_qh, stride_qn, num_queries - first, SIDE, HEAD_DIM, BLOCK_D, True
        )
        grad_tile = load_rows(
            grad + row * stride_gn + head * stride_gh, stride_gn, num_queries - first, SIDE, VALUE_DIM, BLOCK_V, True
        )
        q_time = load_times(q_times, q_begin + i, q_begin + num_queries, HAS_TIME)
        carried = tl.zeros((SIDE,), tl.float32)
        for step in range(begin, end, SIDE):
            start = partner(step, gaps, STRUCTURED)
            j = (start + lane)[None, :]
            k_tile = load_rows(
                k + (k_begin + start) * stride_kn + head // GROUP * stride_kh,
                stride_kn,
                num_keys - start,
                SIDE,
                HEAD_DIM,
                BLOCK_D,
                True,
            )
            v_tile = load_rows(
                v + (k_begin + start) * stride_vn + head // GROUP * stride_vh,
                stride_vn,
                num_keys - start,
                SIDE,
                VALUE_DIM,
                BLOCK_V,
                True,
            )
            k_time = load_times(k_times, k_begin + j, k_begin + num_keys, HAS_TIME)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            i_place, j_place = places(i, j, structure, STRUCTURED)
            s = scaled_scores(s, i_place, j_place, q_time, k_time, scale * LOG2E, bias, HAS_POSITION, HAS_TIME)
            seen = visible(i, j, masks, structure, STRUCTURED)
            dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = tl.where(seen, tl.exp2(s - lse2) * (dp - delta_tile), 0.0)
            far_left, far_right, own, carried, time_sums = add_pairs(
                far_left, far_right, own, carried, time_sums, ds, seen, i, j, first, start, q_time, k_time,
                own_position, bias, structure, SIDE, BLOCK_T, HAS_POSITION, HAS_TIME, STRUCTURED, HAS_TARGETS,
            )  # fmt: skip
        add_carried(carried, first, begin, end, own_position, reach, SIDE, HAS_POSITION, STRUCTURED)
    own_time = time_partial
    if HAS_TIME:
        own_time += (program * NUM_HEADS + head) * num_buckets
    store_sums(
        far_left, far_right, own, time_sums, own_position, own_time, reach, num_buckets, BLOCK_T, HAS_POSITION,
        HAS_TIME, HAS_TARGETS,
    )  # fmt: skip


def table_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    bias: Bias,
    tables: tuple[Tensor, ...],
    strides: tuple[int, ...],
    scalars: tuple[float, ...],
    constants: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Gradients [H, 2 P + 1] and [H, T] float32, empty where there is no such table."""
    position, time = bias.position, bias.time
    num_heads = q.shape[1]
    programs = cdiv(PROGRAMS, num_heads)
    position_partial, time_partial = (
        lse.new_empty(0) if table is None else lse.new_zeros(programs, *table.shape) for table in (position, time)
    )
    if q.shape[0]:
        tile = launch.fit("table", q, v, bias)
        rows = tile_rows_of(q_offsets, q.shape[0], tile.m)
        attention_table_kernel[(programs, num_heads)](
            q, k, v, grad, lse, delta, position_partial, time_partial, q_offsets, k_offsets, rows, rows.shape[0],
            *tables, *strides, *scalars,
            SIDE=tile.m, BLOCK_T=block_width(1 if time is None else time.shape[1]), **constants, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    return (
        position_partial if position is None else position_partial.sum(0),
        time_partial if time is None else time_partial.sum(0),
    )
