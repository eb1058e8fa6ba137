"""GDPA of rows that fit into one tile, in Triton: a small program per row and head, without a loop over keys.

Kernels that work in tiles of 128 queries and keys spend as much on a row of 20 as on one of 128. Here a program loads a
row once, only the positions that exist, and writes all results directly: nothing is summed over programs, so that runs
give equal bits. Several programs share a multiprocessor and hide each other's latencies. If rows are short enough, a
tile holds two or four heads of one. Programs of rows that are too long return at once: other kernels, whose lists leave
short rows out, take those.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kernels.attention.triton.short import (
    BACKWARD_REGISTERS,
    LONGEST,
    OPTIONS,
    PLACES,
    heads_of,
    likely_short,
    load,
    meets,
    row_of,
    store,
)
from kernels.core.chip import multiplies_registers
from kernels.core.launch import Launcher, aligned, kinds
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.gdpa.triton import launch
from kernels.gdpa.triton.activations import kind_of, value_and_slope


def limit_of(q: Tensor, k: Tensor, v: Tensor, queries: Rows, keys: Rows) -> int:
    """The most queries and keys of rows that these kernels take; 0 if they serve none or few rows are so short."""
    if q.dtype.itemsize > 2 or max(q.shape[2], v.shape[2]) > 128 or multiplies_registers(q.device):
        return 0
    return likely_short(q.shape[0], k.shape[0], keys.offsets.shape[0] - 1, queries.max_length, keys.max_length)


@triton.jit(do_not_specialize=["max_q", "max_k", "left", "right"])
def gdpa_short_forward_kernel(
    q, k, v, out, q_offsets, k_offsets, max_q, max_k, score_scale, out_scale, left, right,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr,
    HEAD_KINDS: tl.constexpr, FAST: tl.constexpr, TOGETHER: tl.constexpr, CHECKED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    first_head = tl.program_id(0) % NUM_HEADS
    q_begin, num_queries, k_begin, num_keys = row_of(
        q_offsets, k_offsets, tl.program_id(0) // NUM_HEADS, max_q, max_k, CHECKED
    )
    longest = tl.maximum(num_queries, num_keys)
    if BESIDE and tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
    heads, shift = heads_of(longest, TOGETHER)
    if (longest > PLACES) | (num_queries == 0) | (first_head % heads > 0):
        return
    place = tl.arange(0, PLACES)
    position = place - ((place >> shift) << shift)
    head = first_head + (place >> shift)
    queries = (position < num_queries) & (head < NUM_HEADS)
    keys = (position < num_keys) & (head < NUM_HEADS)
    q_tile = load(q + q_begin * stride_qn, stride_qn, stride_qh, position, head, queries, HEAD_DIM, BLOCK_D)
    k_tile = load(k + k_begin * stride_kn, stride_kn, stride_kh, position, head // GROUP, keys, HEAD_DIM, BLOCK_D)
    v_tile = load(v + k_begin * stride_vn, stride_vn, stride_vh, position, head // GROUP, keys, VALUE_DIM, BLOCK_V)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * score_scale
    # Keys beyond the row are zeros, and so are their activations.
    p, _ = value_and_slope(s, kind_of(first_head, HEAD_KINDS), KINDS, FAST)
    if WINDOWED or TOGETHER:
        p = tl.where(meets(left, right, position, head, WINDOWED, False), p, 0.0)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION) * out_scale
    store(out + q_begin * (NUM_HEADS * VALUE_DIM), position, head, queries, acc, NUM_HEADS, VALUE_DIM, BLOCK_V)


@triton.jit(do_not_specialize=["max_q", "max_k", "left", "right"])
def gdpa_short_backward_kernel(
    grad, q, k, v, dq, dk, dv, q_offsets, k_offsets, max_q, max_k, score_scale, out_scale, left, right,
    stride_gn, stride_gh, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, KINDS: tl.constexpr,
    HEAD_KINDS: tl.constexpr, FAST: tl.constexpr, TOGETHER: tl.constexpr, CHECKED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Heads are those of keys and values; query heads that share one come one after the other."""
    KEY_HEADS: tl.constexpr = NUM_HEADS // GROUP
    first_head = tl.program_id(0) % KEY_HEADS
    q_begin, num_queries, k_begin, num_keys = row_of(
        q_offsets, k_offsets, tl.program_id(0) // KEY_HEADS, max_q, max_k, CHECKED
    )
    longest = tl.maximum(num_queries, num_keys)
    if BESIDE and tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
    heads, shift = heads_of(longest, TOGETHER)
    if (longest > PLACES) | (longest == 0) | (first_head % heads > 0):
        return
    grad += q_begin * stride_gn
    q += q_begin * stride_qn
    dq += q_begin * (NUM_HEADS * HEAD_DIM)
    place = tl.arange(0, PLACES)
    position = place - ((place >> shift) << shift)
    head = first_head + (place >> shift)
    queries = (position < num_queries) & (head < KEY_HEADS)
    keys = (position < num_keys) & (head < KEY_HEADS)
    k_tile = load(k + k_begin * stride_kn, stride_kn, stride_kh, position, head, keys, HEAD_DIM, BLOCK_D)
    v_tile = load(v + k_begin * stride_vn, stride_vn, stride_vh, position, head, keys, VALUE_DIM, BLOCK_V)
    dk_tile = tl.zeros((PLACES, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((PLACES, BLOCK_V), tl.float32)
    scale = score_scale * out_scale
    for member in range(GROUP):
        q_head = head * GROUP + member
        q_tile = load(q, stride_qn, stride_qh, position, q_head, queries, HEAD_DIM, BLOCK_D)
        grad_tile = load(grad, stride_gn, stride_gh, position, q_head, queries, VALUE_DIM, BLOCK_V)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * score_scale
        kind = kind_of(first_head * GROUP + member, HEAD_KINDS)
        p, slope = value_and_slope(s, kind, KINDS, FAST)
        ds = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION) * slope
        if WINDOWED or TOGETHER:
            met = meets(left, right, position, head, WINDOWED, True)
            p = tl.where(met, p, 0.0)
            ds = tl.where(met, ds, 0.0)
        # dq is first and is stored at once: three sums would not fit into registers.
        ds = ds.to(q_tile.dtype)
        dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION) * scale
        store(dq, position, q_head, queries, dq_tile, NUM_HEADS, HEAD_DIM, BLOCK_D)
        dv_tile = tl.dot(p.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
        dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision=PRECISION)
    dk += k_begin * (KEY_HEADS * HEAD_DIM)
    dv += k_begin * (KEY_HEADS * VALUE_DIM)
    store(dk, position, head, keys, dk_tile * scale, KEY_HEADS, HEAD_DIM, BLOCK_D)
    store(dv, position, head, keys, dv_tile * out_scale, KEY_HEADS, VALUE_DIM, BLOCK_V)


def forward(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    *,
    beside: bool = False,
) -> None:
    """Write `out` [Nq, H, dv], contiguous, of rows of at most LONGEST queries and keys.

    The rest is as in `kernels.gdpa.operator`, with contiguous features. If no longer rows are allowed, a row
    that is longer than its bound is a device assertion. `beside`: the kernel launched before this one on the stream
    serves the other rows and calls `kernels.core.hopper.let_next_start`, so that this one starts where that one leaves
    room, and ends after it.
    """
    _launch(
        _launch_forward, q.shape[1], (q, k, v), (out,), queries, keys, activations, score_scale, out_scale, mask, beside
    )  # fmt: skip


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    *,
    beside: bool = False,
) -> None:
    """Write the gradients, contiguous, of rows of at most LONGEST queries and keys; the rest is as in `forward`."""
    _launch(
        _launch_backward, k.shape[1], (grad, q, k, v), (dq, dk, dv), queries, keys, activations, score_scale, out_scale,
        mask, beside,
    )  # fmt: skip


def _launch(
    launcher: Launcher,
    heads: int,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    beside: bool,
) -> None:
    q, k, v = inputs[-3:]
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    strides = launch.strides(*inputs)
    # All of a tile must take the same branch for its activation.
    together = len(set(activations)) == 1
    checked = max(max_q, max_k) <= LONGEST
    constants = (*launch.constants(q, k, v, activations, mask).values(), together, checked, beside)
    launcher(
        (heads * (q_offsets.shape[0] - 1), 1, 1),
        (q.device, q.dtype, q_offsets.dtype, k_offsets.dtype, aligned(*inputs, q_offsets, k_offsets), kinds(strides),
         constants),
        *inputs, *results, q_offsets, k_offsets, min(max_q, 2**31 - 1), min(max_k, 2**31 - 1), float(score_scale),
        float(out_scale), *launch.limits(mask), *strides, *constants, launch_pdl=beside,
    )  # fmt: skip


_launch_forward = Launcher(gdpa_short_forward_kernel, **OPTIONS)
_launch_backward = Launcher(gdpa_short_backward_kernel, **OPTIONS, maxnreg=BACKWARD_REGISTERS)
