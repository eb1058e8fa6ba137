"""Backward of `jagged_attention` in Triton: dk and dv, one program per tile of keys and key head."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import partner, places, query_span, structure_of, visible, walk
from kernels.attention.triton.tile import LOG2E, load_rows, load_times, locate, scaled_scores, store_rows


@triton.jit
def _sum_over_queries(
    dk, dv, k, v, j, k_time, q, grad, lse, delta, q_times, stride_qn, stride_gn, limits, scale2, masks, bias, structure,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PRECISION: tl.constexpr,
    STRUCTURED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All tiles are transposed: rows are keys, columns queries."""
    num_queries = masks[0]
    begin, end, gaps = walk(limits, MASKED, STRUCTURED)
    for step in range(begin, end, BLOCK_M):
        first = partner(step, gaps, STRUCTURED)
        i = (first + tl.arange(0, BLOCK_M))[None, :]
        q_tile = load_rows(q + first * stride_qn, stride_qn, num_queries - first, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
        grad_tile = load_rows(
            grad + first * stride_gn, stride_gn, num_queries - first, BLOCK_M, VALUE_DIM, BLOCK_V, MASKED
        )
        lse2 = tl.load(lse + i, mask=i < num_queries, other=float("inf")) * LOG2E
        delta_tile = tl.load(delta + i, mask=i < num_queries, other=0.0)
        q_time = load_times(q_times, i, num_queries, HAS_TIME)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        i_place, j_place = places(i, j, structure, STRUCTURED)
        s = scaled_scores(s, i_place, j_place, q_time, k_time, scale2, bias, HAS_POSITION, HAS_TIME)
        p = tl.exp2(s - lse2)
        if MASKED:
            p = tl.where(visible(i, j, masks, structure, STRUCTURED), p, 0.0)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        ds = p * (tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION) - delta_tile)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right", "block_size", "total_q", "reach", "num_buckets"] + kinds.SCALARS)
def attention_key_kernel(
    q, k, v, grad, lse, delta, dk, dv, q_offsets, k_offsets, tile_rows, position_table, time_table, edges, q_times,
    k_times, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_gn, stride_gh, scale, left,
    right, block_size, reach, num_buckets, buckets_per_octave, total_q, num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, PRECISION: tl.constexpr,
    STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    k_begin, num_keys, first, q_begin, num_queries = locate(tile_rows, k_offsets, q_offsets, tl.program_id(0), BLOCK_N)
    if first >= num_keys:
        return
    stride_qn = tl.cast(stride_qn, tl.int64)
    stride_gn = tl.cast(stride_gn, tl.int64)
    remaining = num_keys - first
    row = k_begin + first
    k += row * stride_kn + key_head * stride_kh
    v += row * stride_vn + key_head * stride_vh
    dk += (row * (NUM_HEADS // GROUP) + key_head) * HEAD_DIM
    dv += (row * (NUM_HEADS // GROUP) + key_head) * VALUE_DIM
    if HAS_TIME:
        q_times += q_begin
        k_times += k_begin
    masks = (num_queries, num_keys, left, right, block_size)
    j = first + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k, stride_kn, remaining, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_rows(v, stride_vn, remaining, BLOCK_N, VALUE_DIM, BLOCK_V, True)
    k_time = load_times(k_times, j[:, None], num_keys, HAS_TIME)
    last = tl.minimum(first + BLOCK_N, num_keys) - 1
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = query_span(first, last, masks, structure, STRUCTURED, BLOCK_M)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        head_q = q + q_begin * stride_qn + head * stride_qh
        head_grad = grad + q_begin * stride_gn + head * stride_gh
        head_lse = lse + head * total_q + q_begin
        head_delta = delta + head * total_q + q_begin
        head_position_table = position_table
        head_time_table = time_table
        if HAS_POSITION:
            head_position_table += head * (2 * reach + 1)
        if HAS_TIME:
            head_time_table += head * num_buckets
        bias = (head_position_table, head_time_table, edges, reach, num_buckets, buckets_per_octave)
        for part in tl.static_range(2):
            dk_tile, dv_tile = _sum_over_queries(
                dk_tile, dv_tile, k_tile, v_tile, j[:, None], k_time, head_q, head_grad, head_lse, head_delta, q_times,
                stride_qn, stride_gn, limits, scale * LOG2E, masks, bias, structure, HEAD_DIM, VALUE_DIM, BLOCK_D,
                BLOCK_V, BLOCK_M, HAS_POSITION, HAS_TIME, PRECISION, STRUCTURED, part == 1,
            )  # fmt: skip
    store_rows(dk, NUM_HEADS // GROUP * HEAD_DIM, remaining, dk_tile * scale, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_rows(dv, NUM_HEADS // GROUP * VALUE_DIM, remaining, dv_tile, BLOCK_N, VALUE_DIM, BLOCK_V)
