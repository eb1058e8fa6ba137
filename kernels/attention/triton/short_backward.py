"""Backward of jagged softmax attention for rows that fit into one tile, in Triton: a small program per row and head.

As `kernels.gdpa.triton.short`, for the same reasons: a program loads a row once and writes its gradients directly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kernels.attention.triton.launch import window_of
from kernels.attention.triton.short import BACKWARD_REGISTERS, OPTIONS, PLACES, heads_of, load, meets, row_of, store
from kernels.attention.triton.tile import LOG2E
from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.mask import Mask
from kernels.core.rows import Rows


@triton.jit(do_not_specialize=["total", "left", "right"])
def attention_short_backward_kernel(
    grad, q, k, v, out, lse, dq, dk, dv, q_offsets, k_offsets, total, scale, left, right,
    stride_gn, stride_gh, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOWED: tl.constexpr, BESIDE: tl.constexpr,
    DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """Query heads that share a key head come one after the other. A token of dk is DK_PARTS times as far from the next
    as its heads take, one of dv DV_PARTS times."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    first_head = tl.program_id(0) % KEY_HEADS
    q_begin, num_queries, k_begin, num_keys = row_of(q_offsets, k_offsets, tl.program_id(0) // KEY_HEADS, 0, 0, False)
    longest = tl.maximum(num_queries, num_keys)
    if BESIDE and tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
    heads, shift = heads_of(longest, True)
    if (longest > PLACES) | (longest == 0) | (first_head % heads > 0):
        return
    grad += q_begin * stride_gn
    q += q_begin * stride_qn
    out += q_begin * stride_on
    dq += q_begin * (HEADS * D)
    place = tl.arange(0, PLACES)
    position = place - ((place >> shift) << shift)
    head = first_head + (place >> shift)
    queries = (position < num_queries) & (head < KEY_HEADS)
    keys = (position < num_keys) & (head < KEY_HEADS)
    k_tile = load(k + k_begin * stride_kn, stride_kn, stride_kh, position, head, keys, D, D)
    v_tile = load(v + k_begin * stride_vn, stride_vn, stride_vh, position, head, keys, D, D)
    # A missing key has score 0, which may be far above all others.
    seen = meets(left, right, position, head, WINDOWED, True) & keys[:, None]
    dk_tile = tl.zeros((PLACES, D), tl.float32)
    dv_tile = tl.zeros((PLACES, D), tl.float32)
    for member in range(GROUP):
        q_head = head * GROUP + member
        q_tile = load(q, stride_qn, stride_qh, position, q_head, queries, D, D)
        grad_tile = load(grad, stride_gn, stride_gh, position, q_head, queries, D, D)
        out_tile = load(out, stride_on, stride_oh, position, q_head, queries, D, D)
        delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
        row_lse = tl.load(lse + q_head.to(tl.int64) * total + q_begin + position, queries, float("inf")) * LOG2E
        s = tl.dot(k_tile, tl.trans(q_tile)) * (scale * LOG2E)
        p = tl.where(seen, tl.exp2(s - row_lse[None, :]), 0.0)
        ds = (p * (tl.dot(v_tile, tl.trans(grad_tile)) - delta[None, :])).to(q_tile.dtype)
        # dq is first and is stored at once: three sums would not fit into registers.
        store(dq, position, q_head, queries, tl.dot(tl.trans(ds), k_tile) * scale, HEADS, D, D)
        dv_tile = tl.dot(p.to(grad_tile.dtype), grad_tile, dv_tile)
        dk_tile = tl.dot(ds, q_tile, dk_tile)
    store(dk + k_begin * (DK_PARTS * KEY_HEADS * D), position, head, keys, dk_tile * scale, DK_PARTS * KEY_HEADS, D, D)
    store(dv + k_begin * (DV_PARTS * KEY_HEADS * D), position, head, keys, dv_tile, DV_PARTS * KEY_HEADS, D, D)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    *,
    beside: bool,
) -> None:
    """Write the gradients, contiguous but for the distance of tokens of dk and dv, of rows of at most LONGEST each.

    Half precision, heads of 64 or 128 contiguous features, lse [H, Nq] float32. `beside` is as in
    `kernels.gdpa.triton.short.forward`.
    """
    q_offsets, k_offsets = queries.offsets, keys.offsets
    total, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    inputs = (grad, q, k, v, out)
    strides = tuple([stride for x in inputs for stride in x.stride()[:2]])
    left, right, _ = window_of(mask)
    parts = [x.stride(0) // (kv_heads * dim) for x in (dk, dv)]
    constants = (kv_heads, num_heads // kv_heads, dim, mask.windowed, beside, *parts)
    places = aligned(*inputs, lse, q_offsets, k_offsets)
    _launch(
        (kv_heads * (k_offsets.shape[0] - 1), 1, 1),
        (q.device, q.dtype, q_offsets.dtype, k_offsets.dtype, places, kinds(strides), constants),
        *inputs, lse, dq, dk, dv, q_offsets, k_offsets, total, float(scale), left, right, *strides, *constants,
        launch_pdl=beside,
    )  # fmt: skip


_launch = Launcher(attention_short_backward_kernel, **OPTIONS, maxnreg=BACKWARD_REGISTERS)
