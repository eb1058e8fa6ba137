"""Biases of scores in the Triton kernels of `gdpa`, and the gradients of their tables.

    s = score_scale q k^T + position + time    d table[entry] = out_scale sum over its pairs of act'(s) (do v)

As in `kernels.attention.triton.tables`, whose sums these are, a fixed number of programs take the tiles in a fixed
order, each with a table of its own, and the tables are added at the end: no atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Bias
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import partner, places, structure_of, visible
from kernels.attention.triton.tables import PROGRAMS, add_carried, add_pairs, head_tables, store_sums, table_span
from kernels.attention.triton.tile import (
    LN2,
    LOG2E,
    load_rows,
    load_times,
    locate,
    scaled_scores,
    tile_rows_of,
)
from kernels.core.triton import block_width, cdiv
from kernels.gdpa.triton import launch
from kernels.gdpa.triton.activations import kind_of, value_and_slope


@triton.jit
def within(i, j, masks, structure, STRUCTURED: tl.constexpr):
    """Whether query i sees key j if both exist: what does not is read as zeros, and so are its activations."""
    if STRUCTURED:
        seen = visible(i, j, masks, structure, STRUCTURED)
    else:
        seen = (j - i >= -masks[2]) & (j - i <= masks[3])
    return seen


@triton.jit
def arguments_of(
    s, i, j, q_time, k_time, score_scale, bias, structure, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr,
    STRUCTURED: tl.constexpr,
):  # fmt: skip
    """What the activation is taken of: products s, scaled, and the biases, as in `scaled_scores`."""
    if HAS_POSITION or HAS_TIME:
        i, j = places(i, j, structure, STRUCTURED)
        s = scaled_scores(s, i, j, q_time, k_time, score_scale * LOG2E, bias, HAS_POSITION, HAS_TIME) * LN2
    else:
        s = s * score_scale
    return s


@triton.jit(do_not_specialize=["left", "right", "reach", "num_buckets", "num_tiles"] + kinds.SCALARS)
def gdpa_table_kernel(
    grad, q, k, v, position_partial, time_partial, q_offsets, k_offsets, tile_rows, num_tiles, stride_gn, stride_gh,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, score_scale, out_scale, left, right,
    position_table, time_table, edges, q_times, k_times, reach, num_buckets, buckets_per_octave,
    num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SIDE: tl.constexpr, BLOCK_T: tl.constexpr, KINDS: tl.constexpr,
    HEAD_KINDS: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    stride_kn = tl.cast(stride_kn, tl.int64)
    stride_vn = tl.cast(stride_vn, tl.int64)
    kind = kind_of(head, HEAD_KINDS)
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
        masks = (num_queries, num_keys, left, right, launch.NO_BLOCKS)
        structure = structure_of(
            num_targets, tile_rows, number, num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
        )
        begin, end, gaps = table_span(first, last, masks, structure, STRUCTURED, SIDE)
        row = q_begin + first
        remaining = num_queries - first
        q_tile = load_rows(q + row * stride_qn + head * stride_qh, stride_qn, remaining, SIDE, HEAD_DIM, BLOCK_D, True)
        grad_tile = load_rows(
            grad + row * stride_gn + head * stride_gh, stride_gn, remaining, SIDE, VALUE_DIM, BLOCK_V, True
        )
        q_time = load_times(q_times, q_begin + i, q_begin + num_queries, HAS_TIME)
        carried = tl.zeros((SIDE,), tl.float32)
        for step in range(begin, end, SIDE):
            start = partner(step, gaps, STRUCTURED)
            j = (start + lane)[None, :]
            k_row = k + (k_begin + start) * stride_kn + head // GROUP * stride_kh
            v_row = v + (k_begin + start) * stride_vn + head // GROUP * stride_vh
            k_tile = load_rows(k_row, stride_kn, num_keys - start, SIDE, HEAD_DIM, BLOCK_D, True)
            v_tile = load_rows(v_row, stride_vn, num_keys - start, SIDE, VALUE_DIM, BLOCK_V, True)
            k_time = load_times(k_times, k_begin + j, k_begin + num_keys, HAS_TIME)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            s = arguments_of(s, i, j, q_time, k_time, score_scale, bias, structure, HAS_POSITION, HAS_TIME, STRUCTURED)
            _, slope = value_and_slope(s, kind, KINDS, FAST)
            ds = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION) * slope
            seen = visible(i, j, masks, structure, STRUCTURED)
            ds = tl.where(seen, ds, 0.0)
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
    q_offsets: Tensor,
    k_offsets: Tensor,
    bias: Bias,
    scalars: tuple[Any, ...],
    constants: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Gradients [H, 2 P + 1] and [H, T] float32, empty where there is no such table.

    `scalars` and `constants` are those of the other kernels of the backward.
    """
    tables = bias.position, bias.time
    num_heads = q.shape[1]
    programs = cdiv(PROGRAMS, num_heads)
    partial = [
        q.new_empty(0) if table is None else table.new_zeros(programs, *table.shape, dtype=torch.float32)
        for table in tables
    ]
    if q.shape[0]:
        tile = launch.fit("table", q, v, bias)
        rows = tile_rows_of(q_offsets, q.shape[0], tile.m)
        gdpa_table_kernel[(programs, num_heads)](
            grad, q, k, v, *partial, q_offsets, k_offsets, rows, rows.shape[0], *scalars, SIDE=tile.m,
            BLOCK_T=block_width(1 if bias.time is None else bias.time.shape[1]), **constants, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
    out_scale = scalars[9]
    return tuple(
        each if table is None else each.sum(0) * out_scale for table, each in zip(tables, partial, strict=True)
    )
