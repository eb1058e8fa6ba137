"""Backward of GDPA for Hopper: warp-specialised, asynchronous, deterministic, five products (Gluon).

Work is divided into tiles of 128 keys of one key head. One warp of a program loads tiles by TMA and another one keeps
the order of additions to dq (`hopper.backward_loader`), so that no load waits for another program. Two warpgroups own
64 of a tile's keys each, with their dk and dv, and half of the columns of dq (`hopper.backward_consumer`). As in the
attention backward, `kernels.attention.hopper.backward`, tiles are taken one by one, those of a row by several
multiprocessors at about the same time. They add to dq in float32 scratch, in an order kept by flags, so that runs give
equal bits; the last one loads the sum of the others and writes dq. A program takes its tiles in ascending order and
waits only for tiles before its own, and there are no more programs than multiprocessors: none waits for ever as long as
all of them run.

Rows that fit into one tile of 64 queries and keys are left to `triton.short` where enough rows are likely to be so
short.

Loading the sum of dq that the last key tile needs takes too long to wait for it in registers. The second warp copies it
to shared memory a step ahead, into the buffer of the next tile's values, which are loaded only when the tile ends.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.attention.hopper.backward_loader import STAGES
from kernels.attention.hopper.descriptor import head_descriptor, lines_descriptor
from kernels.attention.hopper.tables import wave_table
from kernels.attention.triton.launch import rows_of
from kernels.core.caches import cached
from kernels.core.chip import HOPPER_HEADS
from kernels.core.hopper import let_next_start
from kernels.core.launch import Launcher, processors
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.gdpa.hopper.activations import head_kinds
from kernels.gdpa.hopper.backward_consumer import differentiate
from kernels.gdpa.hopper.backward_loader import CONTROLS, keep_order, load_tiles
from kernels.gdpa.triton import short as triton_short

QUERIES = 64
KEYS = 128
# Tokens times heads of the rows in progress at a time; each takes 1 kB of L2 at 128 features. Twice as many do not fit
# into L2, and with half as many the key tiles of a row wait for each other.
TOKENS_IN_FLIGHT = 32768
# Mean number of queries up to which rows of unequal length are served by a kernel of their own.
UNEVEN_MEAN = 320
# Three warpgroups of 128 threads, the last of which has two warps, share 512 x 128 registers: 232 for each of the first
# two, and 40.
MAX_REGISTERS = 168


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous and in the inputs' dtype, of out = act_h(score_scale * q k^T) * out_scale @ v.

    q and grad_out are [Nq, H, d], k and v [Nk, Hkv, d], bfloat16 or float16, d in HOPPER_HEADS, H a multiple of Hkv
    and any strides except that of the last dimension, which is 1. The rest is as in `hopper.forward.forward`. Runs
    give equal bits. Values must be finite: a NaN reaches the gradients of neighbouring rows.

    The scratch takes 4 bytes for each element of dq, with rows padded to whole tiles of 64 queries; none if a row's
    keys are within one tile.
    ValueError for head dimensions that the kernel cannot serve.
    """
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    num_queries, num_heads, head_dim = q.shape
    num_keys, kv_heads = k.shape[:2]
    group = num_heads // kv_heads
    if head_dim not in HOPPER_HEADS or v.shape[2] != head_dim:
        raise ValueError(f"head dimensions must be equal and in {HOPPER_HEADS}, got {head_dim} and {v.shape[2]}")
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if num_queries == 0 or num_keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    grad_out, q, k, v = rows_of(grad_out), rows_of(q), rows_of(k), rows_of(v)
    tensors = (grad_out, q, k, v, dq, dk, dv)
    rest = (queries, keys, activations, score_scale, out_scale, mask)
    short = triton_short.limit_of(q, k, v, queries, keys)
    if max(max_q, max_k) <= short:
        triton_short.backward(*tensors, *rest)
        return dq, dk, dv
    left, right = mask.window
    together = 1 << (max(1, TOKENS_IN_FLIGHT // (QUERIES * num_heads)).bit_length() - 1)
    table = cached(
        lambda: wave_table(q_offsets, k_offsets, num_keys, together, short),
        ("waves of keys", num_keys, together, short),
        q_offsets,
        k_offsets,
    )
    programs = min((table.shape[0] - 1) * kv_heads, processors(q.device))
    tiles = num_queries // QUERIES + q_offsets.shape[0] - 1
    flags = torch.zeros(num_heads, tiles, dtype=torch.int32, device=q.device)
    scratch = torch.empty(
        (num_heads * tiles if max_k > KEYS else 1) * QUERIES * head_dim, dtype=torch.float32, device=q.device
    )
    (q_desc, q_step), (v_desc, v_step), (g_desc, g_step) = (head_descriptor(x, QUERIES) for x in (q, v, grad_out))
    # Each half of the columns of keys is an operand, which must not divide a swizzled line.
    k_desc, k_step = head_descriptor(k, QUERIES, swizzle=head_dim)
    inputs = (q_desc, k_desc, v_desc, g_desc)
    sums_desc = lines_descriptor(scratch, head_dim)
    kinds, kinds_of_heads = head_kinds(activations)
    # Eviction hints to L2 pay for rows of at most two key tiles with four steps each, and cost a little with eight.
    pairs = max_k <= 2 * KEYS and max_q <= 2 * KEYS
    uneven = short_and_uneven(num_queries, q_offsets.shape[0] - 1, max_q)
    constants = (
        kinds, kinds_of_heads, q_step, k_step, v_step, g_step, kv_heads, group, pairs, uneven, left >= 0,
        right >= 0,
    )  # fmt: skip
    _launch_backward(
        (programs, 1, 1), (q.device, q.dtype, head_dim, left, right, *constants),
        *inputs, sums_desc, table, flags, tiles, scratch,
        dq, dk, dv, float(score_scale), float(out_scale), left, right, *constants,
    )  # fmt: skip
    if short:
        triton_short.backward(*tensors, *rest, beside=True)
    return dq, dk, dv


def short_and_uneven(num_queries: int, num_rows: int, max_q: int) -> bool:
    """Whether key tiles have few steps, and many of them few keys, assuming that rows have as many keys as queries."""
    mean = num_queries / max(num_rows, 1)
    return mean <= UNEVEN_MEAN and mean <= 0.75 * max_q


@gluon.jit(do_not_specialize=["tiles_stride"])
def _gdpa_backward_kernel(
    q_desc, k_desc, v_desc, g_desc, sums_desc, table_ptr, flags_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr, dv_ptr,
    score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr,
    G_STEP: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr, UNEVEN: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    let_next_start()
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[1]
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    # Two tiles of keys, so that the next one's products can start before the last of this one are done.
    k_s = gl.allocate_shared_memory(dtype, [4, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [4, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 64, D], q_desc.layout)
    g_s = gl.allocate_shared_memory(dtype, [STAGES, 64, D], g_desc.layout)
    # Two tiles of [128 keys, 64 queries]: dq of one is made while the next is written.
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, 64], DS)
    controls = gl.allocate_shared_memory(gl.int32, [CONTROLS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    step_done = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dq_turn = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(step_done.index(i), count=2)
        mbarrier.init(dq_turn.index(i), count=1)
    fence_async_shared()
    buffers = (k_s, v_s, q_s, g_s, ds_s, controls)
    bars = (q_full, g_full, stage_empty, step_done, k_full, k_empty, ds_full, dq_turn)
    gl.warp_specialize(
        [
            (differentiate, (buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
                             KINDS, HEAD_KINDS, HEADS, GROUP, PAIRS, UNEVEN, LEFT, RIGHT, 0)),
            (differentiate, (buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
                             KINDS, HEAD_KINDS, HEADS, GROUP, PAIRS, UNEVEN, LEFT, RIGHT, 1)),
            (load_tiles, ((q_desc, k_desc, v_desc, g_desc), (dk_ptr, dv_ptr), buffers, bars, table_ptr, tiles_stride,
                          left, right, Q_STEP, K_STEP, V_STEP, G_STEP, HEADS, GROUP, LEFT, RIGHT)),
            (keep_order, (sums_desc, scratch_ptr, buffers, bars, table_ptr, flags_ptr, tiles_stride, left, right, HEADS,
                          GROUP, LEFT, RIGHT)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip


_launch_backward = Launcher(_gdpa_backward_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
