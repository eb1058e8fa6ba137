"""Forward and backward of `jagged_attention` for a few queries a row over many keys, in Triton: pooling, decoding.

All queries of a row that read a key head, GROUP heads of each, are one tile, so that a program per row and key head
reads keys and values once. The gradients of a key are complete when it has been read; those of the queries stay in
registers while all keys pass by. Nothing is summed between programs, so runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.gradients import gradients_beside
from kernels.attention.triton.launch import rows_of
from kernels.attention.triton.tile import LN2, LOG2E, load_rows, store_rows
from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.core.triton import block_width


@triton.jit
def _rows(q_offsets, k_offsets, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(key head, query and head of each tile row, which exist, first key, number of keys); int64 but for the last."""
    row, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    q_begin = tl.load(q_offsets + row).to(tl.int64)
    num_queries = tl.load(q_offsets + row + 1).to(tl.int64) - q_begin
    k_begin = tl.load(k_offsets + row).to(tl.int64)
    num_keys = (tl.load(k_offsets + row + 1).to(tl.int64) - k_begin).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    return kv_head, q_begin + m // GROUP, kv_head * GROUP + m % GROUP, m // GROUP < num_queries, k_begin, num_keys


@triton.jit
def _load(base, places, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(base + places[:, None] + column, mask=real[:, None] & (column < WIDTH), other=0.0)


@triton.jit
def _store(base, places, real, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(base + places[:, None] + column, values.to(base.dtype.element_ty), mask=real[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["total_q"])
def attention_decode_forward_kernel(
    q, k, v, out, lse, q_offsets, k_offsets, scale, total_q, q_token, q_head, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head, query, head, real, k_begin, num_keys = _rows(q_offsets, k_offsets, KV_HEADS, GROUP, BLOCK_M)
    if tl.max(real.to(tl.int32), 0) == 0:
        return
    q_tile = _load(q, query * q_token + head * q_head, real, HEAD_DIM, BLOCK_D)
    k += k_begin * k_token + kv_head * k_head
    v += k_begin * v_token + kv_head * v_head
    k_token, v_token = tl.cast(k_token, tl.int64), tl.cast(v_token, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for first in range(0, num_keys, BLOCK_N):
        k_tile = load_rows(k + first * k_token, k_token, num_keys - first, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v_tile = load_rows(v + first * v_token, v_token, num_keys - first, BLOCK_N, VALUE_DIM, BLOCK_V, True)
        s = tl.dot(q_tile, tl.trans(k_tile)) * (scale * LOG2E)
        s = tl.where((first + tl.arange(0, BLOCK_N) < num_keys)[None, :], s, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(s, 1))  # every step has a key
        p = tl.exp2(s - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None])
        highest = new_highest
    blind = num_keys == 0
    total = tl.where(blind, 1.0, total)
    tl.store(lse + head * total_q + query, tl.where(blind, float("inf"), (highest + tl.log2(total)) * LN2), mask=real)
    places = (query * (KV_HEADS * GROUP) + head) * VALUE_DIM
    _store(out, places, real, acc / total[:, None], VALUE_DIM, BLOCK_V)


@triton.jit(do_not_specialize=["total_q"])
def attention_decode_backward_kernel(
    grad, q, k, v, out, lse, dq, dk, dv, q_offsets, k_offsets, scale, total_q,
    grad_token, grad_head, q_token, q_head, k_token, k_head, v_token, v_head, dk_token, dv_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of scores are [keys, queries], as the products for keys want them."""
    kv_head, query, head, real, k_begin, num_keys = _rows(q_offsets, k_offsets, KV_HEADS, GROUP, BLOCK_M)
    q_tile = _load(q, query * q_token + head * q_head, real, HEAD_DIM, BLOCK_D)
    grad_tile = _load(grad, query * grad_token + head * grad_head, real, VALUE_DIM, BLOCK_V)
    places = query * (KV_HEADS * GROUP) + head
    out_tile = _load(out, places * VALUE_DIM, real, VALUE_DIM, BLOCK_V)
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    # A row of the tile that is no query has no weights.
    lse2 = tl.load(lse + head * total_q + query, mask=real, other=float("inf")) * LOG2E
    k += k_begin * k_token + kv_head * k_head
    v += k_begin * v_token + kv_head * v_head
    dk += k_begin * dk_token + kv_head * HEAD_DIM
    dv += k_begin * dv_token + kv_head * VALUE_DIM
    k_token, v_token = tl.cast(k_token, tl.int64), tl.cast(v_token, tl.int64)
    dq_tile = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, num_keys, BLOCK_N):
        count = num_keys - first
        k_tile = load_rows(k + first * k_token, k_token, count, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v_tile = load_rows(v + first * v_token, v_token, count, BLOCK_N, VALUE_DIM, BLOCK_V, True)
        s = tl.dot(k_tile, tl.trans(q_tile)) * (scale * LOG2E)
        p = tl.exp2(s - lse2[None, :])
        # The zeros of a missing key may give an overflow.
        p = tl.where((tl.arange(0, BLOCK_N) < count)[:, None], p, 0.0)
        ds = (p * (tl.dot(v_tile, tl.trans(grad_tile)) - delta[None, :])).to(q_tile.dtype)
        dv_tile = tl.dot(p.to(q_tile.dtype), grad_tile)
        dk_tile = tl.dot(ds, q_tile) * scale
        dq_tile = tl.dot(tl.trans(ds), k_tile, dq_tile)
        at = tl.cast(first, tl.int64)
        store_rows(dk + at * dk_token, dk_token, count, dk_tile, BLOCK_N, HEAD_DIM, BLOCK_D)
        store_rows(dv + at * dv_token, dv_token, count, dv_tile, BLOCK_N, VALUE_DIM, BLOCK_V)
    _store(dq, places * HEAD_DIM, real, dq_tile * scale, HEAD_DIM, BLOCK_D)


_launch_forward = Launcher(attention_decode_forward_kernel)
_launch_backward = Launcher(attention_decode_backward_kernel)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """(out [Nq, H, dv] like q, lse [H, Nq] float32); arguments as in `kernels.attention.operator`, without masks.

    max_q times the number of heads that share a key head is at most `attention.MAX_DECODE_ROWS`.
    """
    num_queries, num_heads = q.shape[:2]
    out = torch.empty(num_queries, num_heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
    tensors = (rows_of(q), rows_of(k), rows_of(v), out, lse)
    _launch(_launch_forward, tensors, tensors[:3], queries, keys, scale)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the inputs' dtype, as `gradients_beside` lays them out."""
    dq, dk, dv = gradients_beside(q, k, v)
    read = (rows_of(grad), rows_of(q), rows_of(k), rows_of(v))
    tensors = (*read, out, lse, dq, dk, dv)
    _launch(_launch_backward, tensors, read, queries, keys, scale, dk.stride(0), dv.stride(0))
    return dq, dk, dv


def tiling(head_dim: int, value_dim: int, rows: int) -> dict[str, int]:
    """Block sizes of both kernels for `rows` query rows of a key head."""
    widths = {"BLOCK_D": block_width(head_dim), "BLOCK_V": block_width(value_dim)}
    return {**widths, "BLOCK_M": block_width(rows), "BLOCK_N": max(16, 4096 // max(64, *widths.values()))}


def _launch(
    launch: Launcher,
    tensors: tuple[Tensor, ...],
    strided: tuple[Tensor, ...],
    queries: Rows,
    keys: Rows,
    scale: float,
    *results: int,
) -> None:
    """A program for each row and key head. `strided` are the tensors whose strides the kernel walks, k and v last, and
    `results` those of tokens of what it writes, where they are not the widths."""
    *_, q, k, v = strided
    (q_offsets, max_q), (k_offsets, _) = queries, keys
    num_rows, (num_queries, num_heads, head_dim), kv_heads = q_offsets.shape[0] - 1, q.shape, k.shape[1]
    group = num_heads // kv_heads
    blocks = tiling(head_dim, v.shape[2], max_q * group).values()
    constants = (kv_heads, group, head_dim, v.shape[2], *blocks)
    strides = tuple([stride for tensor in strided for stride in tensor.stride()[:2]]) + results
    if num_rows:
        launch(
            (num_rows * kv_heads, 1, 1),
            (q.device, q.dtype, q_offsets.dtype, k_offsets.dtype, *aligned(*tensors, q_offsets, k_offsets),
             num_queries >> 31, kinds(strides), *constants),
            *tensors, q_offsets, k_offsets, float(scale), num_queries, *strides, *constants, num_warps=4, num_stages=3,
        )  # fmt: skip
