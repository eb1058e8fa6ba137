"""Backward of `gdpa` in Triton: the gradients of queries, keys and values.

    p = act(s)    dp = do v    ds = dp act'(s)        s = score_scale q k
    dq = score_scale out_scale ds k    dk = score_scale out_scale ds q    dv = out_scale p do

One kernel owns tiles of queries and sums dq over their keys, one owns tiles of keys and sums dk and dv over their
queries and the query heads that share them: 7 matrix products instead of 5, but no sum has two writers, so that results
are the same every time. Rows that do not exist are read as zeros and so add nothing, on either side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Bias, Structure
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import key_span, partner, query_span, structure_of, walk
from kernels.attention.triton.tables import head_tables
from kernels.attention.triton.tile import load_rows, load_times, locate, store_rows, tile_rows_of
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.gdpa.triton import launch
from kernels.gdpa.triton import short as triton_short
from kernels.gdpa.triton.activations import kind_of, value_and_slope
from kernels.gdpa.triton.biases import arguments_of, table_gradients, within


@triton.jit
def _sum_over_keys(
    dq, q, grad, first_query, k, v, stride_kn, stride_vn, num_keys, limits, score_scale, masks, structure, kind,
    q_time, k_times, bias,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KINDS: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, STRUCTURED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    begin, end, gaps = walk(limits, MASKED, STRUCTURED)
    for step in range(begin, end, BLOCK_N):
        first = partner(step, gaps, STRUCTURED)
        k_tile = load_rows(k + first * stride_kn, stride_kn, num_keys - first, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        v_tile = load_rows(v + first * stride_vn, stride_vn, num_keys - first, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
        i = (first_query + tl.arange(0, BLOCK_M))[:, None]
        j = (first + tl.arange(0, BLOCK_N))[None, :]
        k_time = load_times(k_times, j, num_keys, HAS_TIME)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        s = arguments_of(s, i, j, q_time, k_time, score_scale, bias, structure, HAS_POSITION, HAS_TIME, STRUCTURED)
        _, slope = value_and_slope(s, kind, KINDS, FAST)
        ds = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION) * slope
        if MASKED and (WINDOWED or STRUCTURED):
            ds = tl.where(within(i, j, masks, structure, STRUCTURED), ds, 0.0)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["left", "right", "reach", "num_buckets"] + kinds.SCALARS)
def gdpa_query_kernel(
    grad, q, k, v, dq, q_offsets, k_offsets, tile_rows, stride_gn, stride_gh, stride_qn, stride_qh, stride_kn,
    stride_kh, stride_vn, stride_vh, score_scale, out_scale, left, right,
    position_table, time_table, edges, q_times, k_times, reach, num_buckets, buckets_per_octave,
    num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KINDS: tl.constexpr,
    HEAD_KINDS: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    q_begin, num_queries, first, k_begin, num_keys = locate(tile_rows, q_offsets, k_offsets, tl.program_id(0), BLOCK_M)
    if (first >= num_queries) | (tl.maximum(num_queries, num_keys) <= SHORT):
        return
    stride_kn = tl.cast(stride_kn, tl.int64)
    stride_vn = tl.cast(stride_vn, tl.int64)
    remaining = num_queries - first
    row = q_begin + first
    q += row * stride_qn + head * stride_qh
    grad += row * stride_gn + head * stride_gh
    k += k_begin * stride_kn + head // GROUP * stride_kh
    v += k_begin * stride_vn + head // GROUP * stride_vh
    dq += (row * NUM_HEADS + head) * HEAD_DIM
    kind = kind_of(head, HEAD_KINDS)
    tables = head_tables(position_table, time_table, head, reach, num_buckets, HAS_POSITION, HAS_TIME)
    bias = (tables[0], tables[1], edges, reach, num_buckets, buckets_per_octave)
    q_position = q_begin + (first + tl.arange(0, BLOCK_M))[:, None]
    q_time = load_times(q_times, q_position, q_begin + num_queries, HAS_TIME)
    q_tile = load_rows(q, stride_qn, remaining, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    grad_tile = load_rows(grad, stride_gn, remaining, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    masks = (num_queries, num_keys, left, right, launch.NO_BLOCKS)
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = key_span(first, last, masks, structure, STRUCTURED, BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in tl.static_range(2):
        dq_tile = _sum_over_keys(
            dq_tile, q_tile, grad_tile, first, k, v, stride_kn, stride_vn, num_keys, limits, score_scale, masks,
            structure, kind, q_time, k_times + k_begin, bias, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N,
            KINDS, FAST, WINDOWED, PRECISION, HAS_POSITION, HAS_TIME, STRUCTURED, part == 1,
        )  # fmt: skip
    dq_tile *= score_scale * out_scale
    store_rows(dq, NUM_HEADS * HEAD_DIM, remaining, dq_tile, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def _sum_over_queries(
    dk, dv, k, v, first_key, q, grad, stride_qn, stride_gn, num_queries, limits, score_scale, masks, structure, kind,
    q_times, k_time, bias,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KINDS: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, STRUCTURED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """All tiles are transposed: rows are keys, columns queries."""
    begin, end, gaps = walk(limits, MASKED, STRUCTURED)
    for step in range(begin, end, BLOCK_M):
        first = partner(step, gaps, STRUCTURED)
        q_tile = load_rows(q + first * stride_qn, stride_qn, num_queries - first, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
        grad_tile = load_rows(
            grad + first * stride_gn, stride_gn, num_queries - first, BLOCK_M, VALUE_DIM, BLOCK_V, MASKED
        )
        j = (first_key + tl.arange(0, BLOCK_N))[:, None]
        i = (first + tl.arange(0, BLOCK_M))[None, :]
        q_time = load_times(q_times, i, num_queries, HAS_TIME)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        s = arguments_of(s, i, j, q_time, k_time, score_scale, bias, structure, HAS_POSITION, HAS_TIME, STRUCTURED)
        p, slope = value_and_slope(s, kind, KINDS, FAST)
        if MASKED and (WINDOWED or STRUCTURED):
            seen = within(i, j, masks, structure, STRUCTURED)
            p = tl.where(seen, p, 0.0)
            slope = tl.where(seen, slope, 0.0)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        ds = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION) * slope
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right", "reach", "num_buckets"] + kinds.SCALARS)
def gdpa_key_kernel(
    grad, q, k, v, dk, dv, q_offsets, k_offsets, tile_rows, stride_gn, stride_gh, stride_qn, stride_qh, stride_kn,
    stride_kh, stride_vn, stride_vh, score_scale, out_scale, left, right,
    position_table, time_table, edges, q_times, k_times, reach, num_buckets, buckets_per_octave,
    num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KINDS: tl.constexpr,
    HEAD_KINDS: tl.constexpr, FAST: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    k_begin, num_keys, first, q_begin, num_queries = locate(tile_rows, k_offsets, q_offsets, tl.program_id(0), BLOCK_N)
    if (first >= num_keys) | (tl.maximum(num_queries, num_keys) <= SHORT):
        return
    stride_qn = tl.cast(stride_qn, tl.int64)
    stride_gn = tl.cast(stride_gn, tl.int64)
    remaining = num_keys - first
    row = k_begin + first
    k += row * stride_kn + key_head * stride_kh
    v += row * stride_vn + key_head * stride_vh
    dk += (row * (NUM_HEADS // GROUP) + key_head) * HEAD_DIM
    dv += (row * (NUM_HEADS // GROUP) + key_head) * VALUE_DIM
    k_tile = load_rows(k, stride_kn, remaining, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_rows(v, stride_vn, remaining, BLOCK_N, VALUE_DIM, BLOCK_V, True)
    last = tl.minimum(first + BLOCK_N, num_keys) - 1
    masks = (num_queries, num_keys, left, right, launch.NO_BLOCKS)
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = query_span(first, last, masks, structure, STRUCTURED, BLOCK_M)
    k_time = load_times(k_times, row + tl.arange(0, BLOCK_N)[:, None], k_begin + num_keys, HAS_TIME)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        kind = kind_of(head, HEAD_KINDS)
        tables = head_tables(position_table, time_table, head, reach, num_buckets, HAS_POSITION, HAS_TIME)
        bias = (tables[0], tables[1], edges, reach, num_buckets, buckets_per_octave)
        for part in tl.static_range(2):
            dk_tile, dv_tile = _sum_over_queries(
                dk_tile, dv_tile, k_tile, v_tile, first, q + q_begin * stride_qn + head * stride_qh,
                grad + q_begin * stride_gn + head * stride_gh, stride_qn, stride_gn, num_queries, limits, score_scale,
                masks, structure, kind, q_times + q_begin, k_time, bias, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M,
                BLOCK_N, KINDS, FAST, WINDOWED, PRECISION, HAS_POSITION, HAS_TIME, STRUCTURED, part == 1,
            )  # fmt: skip
    dk_tile *= score_scale * out_scale
    store_rows(dk, NUM_HEADS // GROUP * HEAD_DIM, remaining, dk_tile, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_rows(dv, NUM_HEADS // GROUP * VALUE_DIM, remaining, dv_tile * out_scale, BLOCK_N, VALUE_DIM, BLOCK_V)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    bias: Bias | None = None,
    structure: Structure | None = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), contiguous, and with a bias the gradients of its tables; arguments as in `gdpa.operator`."""
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    grad, q, k, v = launch.rows_of(grad), launch.rows_of(q), launch.rows_of(k), launch.rows_of(v)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    scalars = (
        *launch.strides(grad, q, k, v),
        score_scale,
        out_scale,
        *launch.limits(mask),
        *launch.bias_arguments(bias, q),
        *kinds.arguments(structure, mask, q),
    )
    short = 0 if bias is not None or structure is not None else triton_short.limit_of(q, k, v, queries, keys)
    long = max(max_q, max_k) > short
    constants = launch.constants(q, k, v, activations, mask) | launch.bias_constants(bias)
    constants |= kinds.constants(structure) | {"SHORT": short}
    if q.shape[0] and long:
        tile = launch.fit("query", q, v, bias)
        rows = tile_rows_of(q_offsets, q.shape[0], tile.m)
        gdpa_query_kernel[(rows.shape[0], q.shape[1])](
            grad, q, k, v, dq, q_offsets, k_offsets, rows, *scalars, **constants, **launch.tiling(tile)
        )
    if k.shape[0] and long:
        tile = launch.fit("key", q, v, bias)
        rows = tile_rows_of(k_offsets, k.shape[0], tile.n)
        gdpa_key_kernel[(rows.shape[0], k.shape[1])](
            grad, q, k, v, dk, dv, q_offsets, k_offsets, rows, *scalars, **constants, **launch.tiling(tile)
        )
    if short:
        triton_short.backward(grad, q, k, v, dq, dk, dv, queries, keys, activations, score_scale, out_scale, mask)
    if bias is None:
        return dq, dk, dv
    return dq, dk, dv, *table_gradients(grad, q, k, v, q_offsets, k_offsets, bias, scalars, constants)
