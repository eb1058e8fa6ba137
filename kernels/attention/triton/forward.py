"""Forward of `jagged_attention` in Triton: every feature, every chip from sm_80 on.

One program per tile of queries and head walks over the keys of its row with an online softmax (Milakov and Gimelshein
2018, Dao et al. 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.bias import Bias
from kernels.attention.structure import Structure
from kernels.attention.triton import launch
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.structure import key_span, partner, places, structure_of, visible, walk
from kernels.attention.triton.tile import (
    LN2,
    LOG2E,
    load_rows,
    load_times,
    locate,
    scaled_scores,
    store_rows,
    tile_rows_of,
)
from kernels.core.mask import Mask
from kernels.core.rows import Rows


@triton.jit
def _attend(
    acc, total, highest, q, i, q_time, k, v, k_times, stride_kn, stride_vn, limits, scale2, masks, bias, structure,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, SCALE_LATE: tl.constexpr,
    PRECISION: tl.constexpr, STRUCTURED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys begin..end; `highest` is the running maximum in units of log 2."""
    num_keys = masks[1]
    begin, end, gaps = walk(limits, MASKED, STRUCTURED)
    for step in range(begin, end, BLOCK_N):
        first = partner(step, gaps, STRUCTURED)
        j = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k + first * stride_kn, stride_kn, num_keys - first, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        if not SCALE_LATE:
            k_time = load_times(k_times, j[None, :], num_keys, HAS_TIME)
            i_place, j_place = places(i, j[None, :], structure, STRUCTURED)
            s = scaled_scores(s, i_place, j_place, q_time, k_time, scale2, bias, HAS_POSITION, HAS_TIME)
        if MASKED:
            s = tl.where(visible(i, j[None, :], masks, structure, STRUCTURED), s, float("-inf"))
        if SCALE_LATE:
            new_highest = tl.maximum(highest, tl.max(s, 1) * scale2)
        else:
            new_highest = tl.maximum(highest, tl.max(s, 1))
        shift = new_highest
        if MASKED:
            # A query that has seen no key yet: -inf - -inf would be NaN.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        if SCALE_LATE:
            p = tl.exp2(s * scale2 - shift[:, None])
        else:
            p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(highest - shift)
        total = total * rescale + tl.sum(p, 1)
        v_tile = load_rows(v + first * stride_vn, stride_vn, num_keys - first, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        highest = new_highest
    return acc, total, highest


@triton.jit(do_not_specialize=["left", "right", "block_size", "total_q", "reach", "num_buckets"] + kinds.SCALARS)
def attention_forward_kernel(
    q, k, v, out, lse, q_offsets, k_offsets, tile_rows, position_table, time_table, edges, q_times, k_times, stride_qn,
    stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, scale, left, right, block_size, reach, num_buckets,
    buckets_per_octave, total_q, num_targets, contextual, prefix, near, at_end,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_POSITION: tl.constexpr, HAS_TIME: tl.constexpr, SCALE_LATE: tl.constexpr, PRECISION: tl.constexpr,
    STRUCTURED: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    q_begin, num_queries, first, k_begin, num_keys = locate(tile_rows, q_offsets, k_offsets, tl.program_id(0), BLOCK_M)
    if first >= num_queries:
        return
    stride_kn = tl.cast(stride_kn, tl.int64)
    stride_vn = tl.cast(stride_vn, tl.int64)
    remaining = num_queries - first
    q += (q_begin + first) * stride_qn + head * stride_qh
    k += k_begin * stride_kn + head // GROUP * stride_kh
    v += k_begin * stride_vn + head // GROUP * stride_vh
    out += ((q_begin + first) * NUM_HEADS + head) * VALUE_DIM
    lse += head * total_q + q_begin
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
    q_tile = load_rows(q, stride_qn, remaining, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_time = load_times(q_times, i[:, None], num_queries, HAS_TIME)
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    structure = structure_of(
        num_targets, tile_rows, tl.program_id(0), num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS
    )
    limits = key_span(first, last, masks, structure, STRUCTURED, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for part in tl.static_range(2):
        acc, total, highest = _attend(
            acc, total, highest, q_tile, i[:, None], q_time, k, v, k_times, stride_kn, stride_vn, limits,
            scale * LOG2E, masks, bias, structure, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, HAS_POSITION,
            HAS_TIME, SCALE_LATE, PRECISION, STRUCTURED, part == 1,
        )  # fmt: skip
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    tl.store(lse + i, tl.where(blind, float("inf"), (highest + tl.log2(total)) * LN2), mask=i < num_queries)
    store_rows(out, NUM_HEADS * VALUE_DIM, remaining, acc / total[:, None], BLOCK_M, VALUE_DIM, BLOCK_V)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    bias: Bias | None = None,
    structure: Structure | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [Nq, H, dv] like q, lse [H, Nq] float32); arguments as in `kernels.attention.operator`."""
    q_offsets, k_offsets = queries.offsets, keys.offsets
    q, k, v = launch.rows_of(q), launch.rows_of(k), launch.rows_of(v)
    total_q, num_heads, _ = q.shape
    value_dim = v.shape[2]
    out = torch.empty(total_q, num_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, total_q, dtype=torch.float32, device=q.device)
    if total_q == 0:
        return out, lse
    tile = launch.fit("forward", q, v, bias)
    rows = tile_rows_of(q_offsets, total_q, tile.m)
    attention_forward_kernel[(rows.shape[0], num_heads)](
        q, k, v, out, lse, q_offsets, k_offsets, rows, *launch.bias_tensors(bias, q), *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], scale, *launch.window_of(mask), *launch.bias_sizes(bias), total_q,
        *kinds.arguments(structure, mask, q),
        NUM_HEADS=num_heads, GROUP=num_heads // k.shape[1], BLOCK_M=tile.m, BLOCK_N=tile.n,
        # The maximum may be taken before the scale is applied, which saves a multiplication per score.
        SCALE_LATE=bias is None and scale > 0, **launch.constants(q, v, bias), **kinds.constants(structure),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse
