"""Backward of GDPA for Hopper: warp-specialised, asynchronous, deterministic, five products (Gluon).

One thread block owns a (row, key head) and walks its tiles of 128 keys in order, so it alone adds to dq of these
queries and the order of every sum is fixed. One warpgroup loads tiles by TMA; two own 64 of a tile's keys each, with
their dk and dv, and half of the columns of dq (`gluon_backward_consumer`). Between key tiles dq is in a float32 scratch
of the block. Blocks are as many as multiprocessors and share the rows out, the longest first.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.gdpa.gluon_activations import head_kinds
from kernels.gdpa.gluon_backward_consumer import differentiate
from kernels.gdpa.gluon_rows import row_of
from kernels.jagged.attention_rows import row_table
from kernels.jagged.gluon_backward_steps import STAGES, query_tiles_of
from kernels.jagged.gluon_descriptor import head_descriptor
from kernels.scheduling import dealt_position, num_rounds

QUERIES = 64
KEYS = 128
HEAD_DIMS = (64, 128)
# Three warpgroups of 128 threads share 512 x 128 registers: 240 for each of the first two, and 24.
MAX_REGISTERS = 168


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous and in the inputs' dtype, of out = act_h(score_scale * q k^T) * out_scale @ v.

    q and grad_out are [Nq, H, d], k and v [Nk, Hkv, d], bfloat16 or float16, with d in HEAD_DIMS, H a multiple of Hkv
    and any strides but those of the last dimension. The rest is as in `gluon_forward.forward`; no row is longer than
    max_q and max_k. Runs give equal bits. Values must be finite: a NaN reaches gradients of the rows beside it.

    The scratch takes (multiprocessors) x (max_q) x (H / Hkv) x d x 4 bytes at most, none if max_k is within one tile.
    ValueError for head dimensions that the kernel cannot serve.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, kv_heads = k.shape[:2]
    group = num_heads // kv_heads
    if head_dim not in HEAD_DIMS or v.shape[2] != head_dim:
        raise ValueError(f"head dimensions must be equal and in {HEAD_DIMS}, got {head_dim} and {v.shape[2]}")
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if num_queries == 0 or num_keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    left, right = min(window[0], 2**30), min(window[1], 2**30)
    table = row_table(q_offsets, k_offsets)
    items = table.shape[0] * kv_heads
    programs = min(items, torch.cuda.get_device_properties(q.device).multi_processor_count)
    slot = triton.cdiv(min(max_q, num_queries), QUERIES) * QUERIES * group * head_dim if max_k > KEYS else 0
    scratch = torch.empty(max(programs * slot, 4), dtype=torch.float32, device=q.device)
    (q_desc, q_step), (v_desc, v_step), (g_desc, g_step) = (head_descriptor(x, QUERIES) for x in (q, v, grad_out))
    # Halves of the columns of keys are operands of their own, which must not cut through a swizzled line.
    k_desc, k_step = head_descriptor(k, QUERIES, swizzle=head_dim)
    kinds, kinds_of_heads = head_kinds(activations)
    _backward_kernel[(programs,)](
        q_desc, k_desc, v_desc, g_desc, table, items, scratch, slot, dq, dk, dv,
        float(score_scale), float(out_scale), left, right,
        KINDS=kinds, HEAD_KINDS=kinds_of_heads, Q_STEP=q_step, K_STEP=k_step, V_STEP=v_step, G_STEP=g_step,
        HEADS=kv_heads, GROUP=group, LEFT=left >= 0, RIGHT=right >= 0, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return dq, dk, dv


@gluon.jit
def _load_tiles(
    descs, buffers, bars, table_ptr, items, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warpgroup. Q_STEP is how many columns there are from one head to the next in the matrix of q_desc.

    After the last step it announces one more that carries no data: the consumers always look one step ahead.
    """
    q_desc, k_desc, v_desc, g_desc = descs
    k_s, v_s, q_s, g_s, _ds_s = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, _ds_full, _ds_empty = bars
    tile = 0
    step = 0
    for turn in range(num_rounds(items)):
        item = dealt_position(turn)
        q_start, q_length, k_start, k_length, _first_tile, head = row_of(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            if high > low:
                slot = tile & 1
                full = kv_full.index(slot)
                mbarrier.wait(kv_empty.index(slot), (tile // 2 & 1) ^ 1)
                mbarrier.expect(full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
                for c in gl.static_range(2):
                    key = k_start + j * 128 + c * 64
                    tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], full, k_s.index(slot * 2 + c))
                    tma.async_copy_global_to_shared(v_desc, [key, head * V_STEP], full, v_s.index(slot * 2 + c))
                tile += 1
            for member in range(GROUP):
                q_head = head * GROUP + member
                for i in range(low, high):
                    stage = step % STAGES
                    query = q_start + i * 64
                    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
                    full = q_full.index(stage)
                    mbarrier.expect(full, q_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                    full = g_full.index(stage)
                    mbarrier.expect(full, g_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    step += 1
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(q_full.index(stage), count=1)
    mbarrier.wait(kv_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(kv_full.index(tile & 1), count=1)


@gluon.jit(do_not_specialize=["items"])
def _backward_kernel(
    q_desc, k_desc, v_desc, g_desc, table_ptr, items, scratch_ptr, slot, dq_ptr, dk_ptr, dv_ptr,
    score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr,
    G_STEP: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
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
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    fence_async_shared()
    buffers = (k_s, v_s, q_s, g_s, ds_s)
    bars = (q_full, g_full, stage_empty, kv_full, kv_empty, ds_full, ds_empty)
    gl.warp_specialize(
        [
            (differentiate, (buffers, bars, table_ptr, items, scratch_ptr, slot, dq_ptr, dk_ptr, dv_ptr, score_scale,
                             out_scale, left, right, KINDS, HEAD_KINDS, HEADS, GROUP, LEFT, RIGHT, 0)),
            (differentiate, (buffers, bars, table_ptr, items, scratch_ptr, slot, dq_ptr, dk_ptr, dv_ptr, score_scale,
                             out_scale, left, right, KINDS, HEAD_KINDS, HEADS, GROUP, LEFT, RIGHT, 1)),
            (_load_tiles, ((q_desc, k_desc, v_desc, g_desc), buffers, bars, table_ptr, items, left, right,
                           Q_STEP, K_STEP, V_STEP, G_STEP, HEADS, GROUP, LEFT, RIGHT)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
