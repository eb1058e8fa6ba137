"""Forward of `gdpa` in Triton: every activation, window and head width, every chip from sm_80 on.

One program per tile of queries and head sums act(q k) v over the keys of its row. Nothing depends on other keys, so
that there is no running maximum, no sum to divide by, and nothing to save for the backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Bias, Structure
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import key_span, partner, structure_of, walk
from kernels.attention.triton.tables import head_tables
from kernels.attention.triton.tile import load_rows, load_times, locate, store_rows, tile_rows_of
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.gdpa.triton import launch
from kernels.gdpa.triton import short as triton_short
from kernels.gdpa.triton.activations import kind_of, value_and_slope
from kernels.gdpa.triton.biases import arguments_of, within


@triton.jit
def _attend(
    acc, q, first_query, k, v, stride_kn, stride_vn, num_keys, limits, score_scale, masks, structure, kind,
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
        i = (first_query + tl.arange(0, BLOCK_M))[:, None]
        j = (first + tl.arange(0, BLOCK_N))[None, :]
        k_time = load_times(k_times, j, num_keys, HAS_TIME)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        s = arguments_of(s, i, j, q_time, k_time, score_scale, bias, structure, HAS_POSITION, HAS_TIME, STRUCTURED)
        p, _ = value_and_slope(s, kind, KINDS, FAST)
        if MASKED and (WINDOWED or STRUCTURED):
            p = tl.where(within(i, j, masks, structure, STRUCTURED), p, 0.0)
        v_tile = load_rows(v + first * stride_vn, stride_vn, num_keys - first, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["left", "right", "reach", "num_buckets"] + kinds.SCALARS)
def gdpa_forward_kernel(
    q, k, v, out, q_offsets, k_offsets, tile_rows, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    score_scale, out_scale, left, right,
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
    q += (q_begin + first) * stride_qn + head * stride_qh
    k += k_begin * stride_kn + head // GROUP * stride_kh
    v += k_begin * stride_vn + head // GROUP * stride_vh
    out += ((q_begin + first) * NUM_HEADS + head) * VALUE_DIM
    kind = kind_of(head, HEAD_KINDS)
    tables = head_tables(position_table, time_table, head, reach, num_buckets, HAS_POSITION, HAS_TIME)
    bias = (tables[0], tables[1], edges, reach, num_buckets, buckets_per_octave)
    q_position = q_begin + (first + tl.arange(0, BLOCK_M))[:, None]
    q_time = load_times(q_times, q_position, q_begin + num_queries, HAS_TIME)
    q_tile = load_rows(q, stride_qn, remaining, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    masks = (num_queries, num_keys, left, right, launch.NO_BLOCKS)
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = key_span(first, last, masks, structure, STRUCTURED, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for part in tl.static_range(2):
        acc = _attend(
            acc, q_tile, first, k, v, stride_kn, stride_vn, num_keys, limits, score_scale, masks, structure, kind,
            q_time, k_times + k_begin, bias, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, KINDS, FAST,
            WINDOWED, PRECISION, HAS_POSITION, HAS_TIME, STRUCTURED, part == 1,
        )  # fmt: skip
    store_rows(out, NUM_HEADS * VALUE_DIM, remaining, acc * out_scale, BLOCK_M, VALUE_DIM, BLOCK_V)


def forward(
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
) -> Tensor:
    """out [Nq, H, dv] like q; arguments as in `kernels.gdpa.operator`."""
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    q, k, v = launch.rows_of(q), launch.rows_of(k), launch.rows_of(v)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    short = 0 if bias is not None or structure is not None else triton_short.limit_of(q, k, v, queries, keys)
    if q.shape[0] and max(max_q, max_k) > short:
        tile = launch.fit("forward", q, v, bias)
        rows = tile_rows_of(q_offsets, q.shape[0], tile.m)
        gdpa_forward_kernel[(rows.shape[0], q.shape[1])](
            q, k, v, out, q_offsets, k_offsets, rows, *launch.strides(q, k, v), score_scale, out_scale,
            *launch.limits(mask), *launch.bias_arguments(bias, q), *kinds.arguments(structure, mask, q),
            **launch.constants(q, k, v, activations, mask), **launch.bias_constants(bias),
            **kinds.constants(structure), **launch.tiling(tile),
            SHORT=short,
        )  # fmt: skip
    if short:
        triton_short.forward(out, q, k, v, queries, keys, activations, score_scale, out_scale, mask)
    return out
