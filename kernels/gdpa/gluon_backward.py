"""Backward of GDPA for Hopper: warp-specialised, asynchronous, deterministic, five products (Gluon).

Work comes in tiles of 128 keys of one key head. Of a block's three warpgroups one loads tiles by TMA
(`gluon_backward_loader`); two own 64 of a tile's keys each, with their dk and dv, and half of the columns of dq
(`gluon_backward_consumer`). Key tiles add to dq in a float32 scratch, in one order, so that runs give equal bits. Who
takes which tile is one of two schedules:

- Tiles are dealt out one by one as in the attention backward, `kernels.jagged.gluon_attention_backward`, those of a row
  on several multiprocessors at about the same time; flags keep the order. As there, a block takes its tiles in
  ascending order and waits only for tiles before its own, and there are no more blocks than multiprocessors: none waits
  for ever as long as all get to run.
- A block owns rows and takes all their key tiles one after the other, see `owns_rows`. Nobody waits for others, and the
  scratch holds one row for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.gdpa.gluon_activations import head_kinds
from kernels.gdpa.gluon_backward_consumer import differentiate
from kernels.gdpa.gluon_backward_items import CONTROLS
from kernels.gdpa.gluon_backward_loader import load_tiles
from kernels.jagged.attention_rows import row_table, tile_table
from kernels.jagged.gluon_backward_steps import STAGES
from kernels.jagged.gluon_descriptor import head_descriptor
from kernels.launch import Launcher, processors
from kernels.remember import remembered

QUERIES = 64
KEYS = 128
# Tokens times heads of the rows that are worked on at a time; each takes 1 kB of L2 at 128 features.
TOKENS_IN_FLIGHT = 32768
MAX_ROWS_IN_FLIGHT = 128
# A block takes all key tiles of a row that has at most so many keys, if it may have so many queries.
OWNED_KEYS = 256
OWNED_QUERIES = 512
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

    The scratch takes 4 bytes for each element of dq, with rows padded to whole tiles of 64 queries, or of one row of
    max_q queries and one head for each multiprocessor where `owns_rows`; none if max_k is within one tile of keys.
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
    num_rows = q_offsets.shape[0] - 1
    multiprocessors = processors(q.device)
    owned = owns_rows(num_queries, num_keys, num_rows, kv_heads, max_q, max_k, multiprocessors)
    if owned:
        table = remembered(lambda: row_table(q_offsets, k_offsets), "rows by work", q_offsets, k_offsets)
        programs = min(num_rows * kv_heads, multiprocessors)
        tiles = -(-max_q // QUERIES)
        scratch_tiles = programs * group * tiles
        flags = table
    else:
        rows_in_flight = max(1, min(MAX_ROWS_IN_FLIGHT, TOKENS_IN_FLIGHT // (max_q * num_heads)))
        members = 1 << (rows_in_flight.bit_length() - 1)
        table = remembered(
            lambda: tile_table(q_offsets, k_offsets, num_keys, members),
            ("tiles of keys", num_keys, members),
            q_offsets,
            k_offsets,
        )
        programs = min((table.shape[0] - 1) * kv_heads, multiprocessors)
        tiles = num_queries // QUERIES + num_rows
        scratch_tiles = num_heads * tiles
        flags = torch.zeros(num_heads, tiles, dtype=torch.int32, device=q.device)
    scratch = torch.empty(
        scratch_tiles * QUERIES * head_dim if max_k > KEYS else 4, dtype=torch.float32, device=q.device
    )
    (q_desc, q_step), (v_desc, v_step), (g_desc, g_step) = (head_descriptor(x, QUERIES) for x in (q, v, grad_out))
    dk_desc, dv_desc = (head_descriptor(x, QUERIES)[0] for x in (dk, dv))
    # Halves of the columns of keys are operands of their own, which must not cut through a swizzled line.
    k_desc, k_step = head_descriptor(k, QUERIES, swizzle=head_dim)
    inputs = (q_desc, k_desc, v_desc, g_desc)
    kinds, kinds_of_heads = head_kinds(activations)
    strides = tuple(x.strides[0] for x in inputs)
    constants = (
        kinds, kinds_of_heads, q_step, k_step, v_step, g_step, kv_heads, group, left >= 0, right >= 0, owned,
    )  # fmt: skip
    _launch_backward(
        (programs, 1, 1), (q.device, q.dtype, head_dim, left, right, *strides, *constants),
        *inputs, dk_desc, dv_desc, *(x.base for x in inputs), *strides, table, num_rows, flags, tiles, scratch,
        dq, dk, dv, float(score_scale), float(out_scale), left, right, *constants,
    )  # fmt: skip
    return dq, dk, dv


def owns_rows(
    num_queries: int,
    num_keys: int,
    num_rows: int,
    kv_heads: int,
    max_q: int,
    max_k: int,
    multiprocessors: int,
) -> bool:
    """Whether each block is to take all key tiles of a row and key head, rather than single tiles.

    It pays for many queries and few keys, whose gradients then need a tenth of the memory, where rows are so many that
    all blocks have much the same work, whatever their lengths.
    """
    few_keys = max_k <= OWNED_KEYS and max_q >= OWNED_QUERIES
    return few_keys and num_queries * num_keys * kv_heads >= 4 * multiprocessors * max_q * max_k * num_rows


@gluon.jit(do_not_specialize=["num_rows", "tiles_stride"])
def _backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dk_desc, dv_desc, q_ptr, k_ptr, v_ptr, g_ptr, q_row, k_row, v_row, g_row, table_ptr,
    num_rows, flags_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr,
    G_STEP: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    OWNED: gl.constexpr,
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
    controls = gl.allocate_shared_memory(gl.int32, [CONTROLS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dq_turn = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    done = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
        mbarrier.init(dq_turn.index(i), count=1)
    mbarrier.init(done, count=2)
    fence_async_shared()
    buffers = (k_s, v_s, q_s, g_s, ds_s, controls)
    bars = (q_full, g_full, stage_empty, kv_full, kv_empty, ds_full, ds_empty, dq_turn, done)
    gl.warp_specialize(
        [
            (differentiate, (dk_desc, dv_desc, buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale,
                             out_scale, left, right, KINDS, HEAD_KINDS, HEADS, GROUP, LEFT, RIGHT, OWNED, 0)),
            (differentiate, (dk_desc, dv_desc, buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale,
                             out_scale, left, right, KINDS, HEAD_KINDS, HEADS, GROUP, LEFT, RIGHT, OWNED, 1)),
            (load_tiles, ((q_desc, k_desc, v_desc, g_desc), (q_ptr, k_ptr, v_ptr, g_ptr), (q_row, k_row, v_row, g_row),
                          (dk_ptr, dv_ptr), buffers, bars, table_ptr, num_rows, flags_ptr, tiles_stride, left, right,
                          Q_STEP, K_STEP, V_STEP, G_STEP, HEADS, GROUP, LEFT, RIGHT, OWNED)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


_launch_backward = Launcher(_backward_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
