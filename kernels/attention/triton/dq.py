"""Backward of `jagged_attention` in Triton: dq, one program per tile of queries and head; also writes delta."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import key_span, partner, places, structure_of, visible, walk
from kernels.attention.triton.tile import LOG2E, load_rows, load_times, locate, scaled_scores, store_rows


@triton.jit
def _sum_over_keys(
    dq, q, grad, lse2, delta, i, q_time, k, v, k_times, stride_kn, stride_vn, limits, scale2, masks, bias, structure,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PRECISION: tl.constexpr,
    STRUCTURED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    num_keys = masks[1]
    begin, end, gaps = walk(limits, MASKED, STRUCTURED)
    for step in range(begin, end, BLOCK_N):
        first = partner(step, gaps, STRUCTURED)
        j = (first + tl.arange(0, BLOCK_N))[None, :]
        k_tile = load_rows(k + first * stride_kn, stride_kn, num_keys - first, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        v_tile = load_rows(v + first * stride_vn, stride_vn, num_keys - first, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
        k_time = load_times(k_times, j, num_keys, HAS_TIME)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        i_place, j_place = places(i, j, structure, STRUCTURED)
        s = scaled_scores(s, i_place, j_place, q_time, k_time, scale2, bias, HAS_POSITION, HAS_TIME)
        p = tl.exp2(s - lse2)
        if MASKED:
            p = tl.where(visible(i, j, masks, structure, STRUCTURED), p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION) - delta)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["left", "right", "block_size", "total_q", "reach", "num_buckets"] + kinds.SCALARS)
def attention_query_kernel(
    q, k, v, grad, out, lse, delta, dq, q_offsets, k_offsets, tile_rows, position_table, time_table, edges, q_times,
    k_times, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_gn, stride_gh, scale, left,
    right, block_size, reach, num_buckets, buckets_per_octave, total_q, num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PRECISION: tl.constexpr,
    STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    q_begin, num_queries, first, k_begin, num_keys = locate(tile_rows, q_offsets, k_offsets, tl.program_id(0), BLOCK_M)
    if first >= num_queries:
        return
    stride_kn = tl.cast(stride_kn, tl.int64)
    stride_vn = tl.cast(stride_vn, tl.int64)
    remaining = num_queries - first
    row = q_begin + first
    q += row * stride_qn + head * stride_qh
    grad += row * stride_gn + head * stride_gh
    out += (row * NUM_HEADS + head) * VALUE_DIM
    dq += (row * NUM_HEADS + head) * HEAD_DIM
    k += k_begin * stride_kn + head // GROUP * stride_kh
    v += k_begin * stride_vn + head // GROUP * stride_vh
    lse += head * total_q + q_begin
    delta += head * total_q + q_begin
    if HAS_TIME:
        q_times += q_begin
        k_times += k_begin
    if HAS_POSITION:
        position_table += head * (2 * reach + 1)
    if HAS_TIME:
        time_table += head * num_buckets
    bias = (position_table, time_table, edges, reach, num_buckets, buckets_per_octave)
    masks = (num_queries, num_keys, left, right, block_size)
    i = first + tl.arange(0, BLOCK_M)
    grad_tile = load_rows(grad, stride_gn, remaining, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    out_tile = load_rows(out, NUM_HEADS * VALUE_DIM, remaining, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    delta_tile = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + i, delta_tile, mask=i < num_queries)
    q_tile = load_rows(q, stride_qn, remaining, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_time = load_times(q_times, i[:, None], num_queries, HAS_TIME)
    lse2 = tl.load(lse + i, mask=i < num_queries, other=float("inf"))[:, None] * LOG2E
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = key_span(first, last, masks, structure, STRUCTURED, BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in tl.static_range(2):
        dq_tile = _sum_over_keys(
            dq_tile, q_tile, grad_tile, lse2, delta_tile[:, None], i[:, None], q_time, k, v, k_times, stride_kn,
            stride_vn, limits, scale * LOG2E, masks, bias, structure, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            BLOCK_N, HAS_POSITION, HAS_TIME, PRECISION, STRUCTURED, part == 1,
        )  # fmt: skip
    store_rows(dq, NUM_HEADS * HEAD_DIM, remaining, dq_tile * scale, BLOCK_M, HEAD_DIM, BLOCK_D)
