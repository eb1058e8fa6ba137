"""Backward of jagged softmax attention for Hopper: warp-specialised, asynchronous, deterministic (Gluon).

Work is divided into tiles of 128 keys of one key head. One warp of a program loads tiles by TMA; two warpgroups own 64
of a tile's keys each, keep their dk and dv in registers, and each compute half of the columns of dq from the ds that
both write to shared memory. dq is summed over key tiles in float32 scratch: the first key tile stores it, others add to
it by reductions that nothing waits for, the last one loads the sum and writes the result.

The key tiles of a row are on several multiprocessors at about the same time, so that its queries, their gradients and
dq stay in L2, which decides the speed on long rows. For equal bits they add to each tile of dq in order, kept by flags
in global memory. A program takes its tiles in ascending order and waits only for tiles before its own, and there are no
more programs than multiprocessors. So none waits for ever as long as all of them run, which other kernels on the chip
must not prevent by waiting for this one to end.

Rows that fit into one tile of 64 queries and keys are left to `triton.short_backward` where enough rows are likely to
be so short.

The loader, and what all warps share, is in `hopper.backward_loader`, the computing warpgroups in
`hopper.backward_consumer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.attention.gradients import contiguous_gradients
from kernels.attention.hopper.backward_consumer import differentiate
from kernels.attention.hopper.backward_loader import STAGES, load_tiles
from kernels.attention.hopper.descriptor import head_descriptor, line_descriptor
from kernels.attention.hopper.tables import LOG2_E, row_statistics, tile_table
from kernels.attention.triton import short_backward
from kernels.attention.triton.launch import rows_of
from kernels.attention.triton.short import likely_short
from kernels.core.caches import cached
from kernels.core.chip import HOPPER_HEADS
from kernels.core.hopper import let_next_start
from kernels.core.launch import Launcher, processors
from kernels.core.mask import Mask
from kernels.core.rows import Rows

QUERIES = 64
KEYS = 128
# Tokens times heads of the rows in progress at a time. Each takes 1 kB of L2 at dimension 128, and these are enough to
# hide that a key tile is a few steps behind the one before it.
TOKENS_IN_FLIGHT = 32768
# The same for rows that several groups of queries see: with the number above, too few rows would be in progress.
JOINT_TOKENS_IN_FLIGHT = 49152
MAX_ROWS_IN_FLIGHT = 128
# If queries do not see keys more than this far before them, a key tile starts with later queries than the one before it
# and has fewer of them: in proportion to its work it waits longer. More rows are then in progress, until their tiles of
# one number occupy half of the chip.
CAUSAL_TOKENS_IN_FLIGHT = 262144
CAUSAL_TILES_IN_FLIGHT = 64
# Three warpgroups of 128 threads, the last of which has one warp, share 512 x 128 registers: 240 for each of the first
# two, and 24. With 232 for the first two the kernel takes a fifth longer.
MAX_REGISTERS = 168


@gluon.jit(do_not_specialize=["tiles_stride"])
def _attention_backward_kernel(
    q_desc, k_desc, v_desc, g_desc, statistics_desc, dk_desc, dv_desc, table_ptr, flags_ptr, tiles_stride,
    scratch_ptr, dq_ptr, dk_ptr, dv_ptr, exponent, scale, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RUNS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    DK_PARTS: gl.constexpr, DV_PARTS: gl.constexpr,
):  # fmt: skip
    """A token of dk is DK_PARTS times as far from the next as its heads take, one of dv DV_PARTS times."""
    let_next_start()
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[1]
    LINE: gl.constexpr = statistics_desc.layout
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    # Two tiles of keys, so that the next one's products can start before the last of this one are done.
    k_s = gl.allocate_shared_memory(dtype, [4, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [4, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 64, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(dtype, [STAGES, 64, D], g_desc.layout)
    # Two tiles of [128 keys, 64 queries]: dq of one is made while the next is written.
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, 64], DS)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    exchanged = gl.allocate_shared_memory(gl.int64, [1], BAR)
    dq_turn = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(dq_turn.index(i), count=1)
    mbarrier.init(exchanged, count=2)
    mbarrier.init(done, count=2)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, g_desc, statistics_desc)
    buffers = (k_s, v_s, q_s, g_s, ds_s, lse_s, delta_s)
    bars = (q_full, g_full, stage_empty, kv_full, kv_empty, exchanged, dq_turn, done)
    gl.warp_specialize(
        [
            (differentiate, (buffers, bars, dk_desc, dv_desc, table_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr,
                             dv_ptr, exponent, scale, left, right, HEADS, GROUP, RUNS, LEFT, RIGHT, DK_PARTS,
                             DV_PARTS, 0)),
            (differentiate, (buffers, bars, dk_desc, dv_desc, table_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr,
                             dv_ptr, exponent, scale, left, right, HEADS, GROUP, RUNS, LEFT, RIGHT, DK_PARTS,
                             DV_PARTS, 1)),
            (load_tiles, (descs, buffers, bars, table_ptr, scratch_ptr, flags_ptr, tiles_stride, left, right,
                          Q_STEP, K_STEP, V_STEP, G_STEP, HEADS, GROUP, RUNS, LEFT, RIGHT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = contiguous_gradients,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in the inputs' dtype and as `gradients` lays them out, of out = softmax(scale q k^T) v within rows.

    q, out and grad_out are [Nq, H, d], k and v [Nk, Hkv, d], bfloat16 or float16, with d 64 or 128, H a multiple of Hkv
    and any strides (out: except that of the last dimension); lse is [H, Nq] float32, contiguous, the natural logarithm
    of the sums, +inf for a query that sees no key. The mask has no blocks. Calls give equal bits. Values must be
    finite: a NaN reaches gradients of neighbouring rows.

    Without a mask, several groups of queries may see the same keys. Offsets of queries are [G * (B + 1)] then, those of
    each group in turn, all counted from the start of q; row b of every group sees row b of the keys, and the bound
    limits a row's queries of all groups together.

    The scratch takes 4 bytes for each element of dq, with rows padded to whole tiles of 64 queries; none if a row's
    keys are within one tile.
    ValueError for a head dimension, dtype or scale that the kernel cannot serve.
    """
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    num_queries, num_heads, head_dim = q.shape
    num_keys, kv_heads = k.shape[:2]
    group = num_heads // kv_heads
    if head_dim not in HOPPER_HEADS or q.dtype not in (torch.bfloat16, torch.float16) or num_heads % kv_heads:
        raise ValueError(
            f"takes bfloat16 and float16, head dimensions {HOPPER_HEADS} and whole groups of heads, "
            f"got {q.dtype}, {head_dim}, {num_heads} over {kv_heads}"
        )
    if scale <= 0:
        # Masked scores are -inf before they are scaled.
        raise ValueError(f"needs a positive scale, got {scale}")
    left, right = mask.window
    # The gradient of a sum (one expanded number), or one with all rows of a head together: see `head_descriptor`.
    if grad_out.stride(2) != 1 or grad_out.stride(1) > grad_out.stride(0):
        grad_out = grad_out.contiguous()
    dq, dk, dv = gradients(q, k, v)
    if num_queries == 0 or num_keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    num_rows = k_offsets.shape[0] - 1
    runs = q_offsets.shape[0] // k_offsets.shape[0]
    short = likely_short(num_queries, num_keys, num_rows, max_q, max_k) if runs == 1 else 0
    short_rows = (grad_out, q, k, v, out, lse, dq, dk, dv, queries, keys, scale, mask)
    if max(max_q, max_k) <= short:
        short_backward.backward(*short_rows, beside=False)
        return dq, dk, dv
    # max_q may be far above most rows, but the longest rows come first.
    length = min(max_q, max(2 * num_queries // num_rows, (max_q + 1) // 2))
    members = rows_in_flight(length * num_heads, num_heads, runs, right >= 0)
    table = cached(
        lambda: tile_table(q_offsets, k_offsets, num_keys, members, runs, short),
        ("tiles of keys", num_keys, members, short),
        q_offsets,
        k_offsets,
    )
    # Scores start from -lse / scale, so that they are scaled once.
    statistics, flags = row_statistics(out, grad_out, lse, q_offsets, max_q, -1.0 / scale, k_offsets, short)
    items = (table.shape[0] - 1) // runs * kv_heads
    programs = min(items, processors(q.device))
    sums = flags.numel() * QUERIES * head_dim if max_k > KEYS else 4
    scratch = torch.empty(sums, dtype=torch.float32, device=q.device)
    (q_desc, q_step), (v_desc, v_step), (g_desc, g_step), (dk_desc, _), (dv_desc, _) = (
        head_descriptor(x, QUERIES) for x in (q, v, grad_out, dk, dv)
    )
    # Each half of the columns of keys is an operand, which must not divide a swizzled line.
    k_desc, k_step = head_descriptor(k, QUERIES, swizzle=head_dim)
    statistics_desc = line_descriptor(statistics, QUERIES)
    parts = [x.stride(0) // (kv_heads * head_dim) for x in (dk, dv)]
    constants = (q_step, k_step, v_step, g_step, kv_heads, group, runs, left >= 0, right >= 0, *parts)
    _launch_backward(
        (programs, 1, 1), (q.device, q.dtype, head_dim, left, right, *constants),
        q_desc, k_desc, v_desc, g_desc, statistics_desc, dk_desc, dv_desc, table, flags, flags.shape[1], scratch,
        dq, dk, dv, scale * LOG2_E, scale, left, right, *constants,
    )  # fmt: skip
    if short:
        short_backward.backward(*short_rows, beside=True)
    return dq, dk, dv


def rows_in_flight(tokens: int, num_heads: int, runs: int, causal: bool) -> int:
    """How many rows are in progress at a time, a power of two; one has this many queries times heads."""
    if causal:
        rows = min(CAUSAL_TOKENS_IN_FLIGHT // tokens, CAUSAL_TILES_IN_FLIGHT // num_heads)
    else:
        rows = min((TOKENS_IN_FLIGHT if runs == 1 else JOINT_TOKENS_IN_FLIGHT) // tokens, MAX_ROWS_IN_FLIGHT)
    return 1 << (max(rows, 1).bit_length() - 1)


_launch_backward = Launcher(_attention_backward_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
