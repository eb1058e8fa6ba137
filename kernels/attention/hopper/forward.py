"""Forward of jagged softmax attention for Hopper, in Gluon: persistent, warp-specialised, TMA in and out, async wgmma.

A program works through tiles of 128 queries of one row and head (`kernels.core.scheduling` says which): two warps load
with TMA, one the keys and one the values, and two warpgroups compute 64 queries each (`hopper.forward_consumer`).
Queries are double-buffered, so that the next tile's are loaded during this one; keys and values go through rings of
blocks that do not stop between tiles.

The last tile of a row may have only one half, and one warpgroup alone takes nearly as long as two. Therefore the halves
of two heads are computed together, a warpgroup each, and the blocks of the ring alternate between the two. The schedule
then lists halves: each half of a whole tile stands for half of the heads, so that the two make the items of their tile.

The list has the longest items first. Where rows are short, long and short ones alternate (`mixed_turn`).

A block of keys may extend beyond the end of its row, into the next row or into zeros after the last one; those scores
are masked. A block of outputs must not, so the last tile of a row is written with masked stores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.attention.hopper.descriptor import head_descriptor
from kernels.attention.hopper.forward_consumer import attend
from kernels.attention.hopper.items import ROWS, mixed_turn, paired_item
from kernels.core import scheduling
from kernels.core.chip import HOPPER_HEADS
from kernels.core.launch import Launcher, processors
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.core.scheduling import FIRST_BLOCK, MAIN_BEGIN, MAIN_COUNT, NUM_BLOCKS, OTHER_BEGIN, dealt_item, num_rounds

BLOCK_Q = 2 * ROWS.value
_KEYS_IN_FLIGHT = 256  # in shared memory; with the queries and outputs of a tile they fill it at dimension 128
_PAIRED_MEAN = 1024  # queries of a row: if longer, few tiles are halves, and looking for pairs costs 1 % of every tile
_LOG2_E = 1.4426950408889634

# Three warpgroups at this limit fill the register file; that of the loaders gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [Nq, H, dv] of q's dtype, lse [H, Nq] float32) of each row's queries over the same row's keys.

    q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv], bfloat16 or float16, d and dv in HOPPER_HEADS, H a multiple of Hkv.
    Views whose last dimension is contiguous are read in place. A row that is longer than its bound is a device
    assertion. The mask has no blocks. lse is log sum exp(scale * q.k); a query that sees no key has out 0 and lse +inf.
    `scale` must be positive. `schedule` is `tile_list` of the same arguments, when a caller has it already.
    """
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    if head_dim not in HOPPER_HEADS or value_dim not in HOPPER_HEADS:
        raise ValueError(f"head dimensions must be in {HOPPER_HEADS}, got {head_dim} and {value_dim}")
    out = q.new_empty(num_queries, num_heads, value_dim)
    lse = q.new_empty(num_heads, num_queries, dtype=torch.float32)
    if out.numel() == 0 or k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    left, right = mask.window
    block_k = block_of_keys(k.shape[0], k_offsets, max_k)
    paired = is_paired(num_heads, (left, right), num_queries, q_offsets, max_q)
    if schedule is None:
        schedule = tile_list(q_offsets, k_offsets, num_queries, max_k, block_k, (left, right), paired, max_q)
    q_descriptor, q_head_stride = head_descriptor(q, ROWS.value)
    k_descriptor, k_head_stride = head_descriptor(k, block_k)
    v_descriptor, v_head_stride = head_descriptor(v, block_k)
    out_descriptor, _ = head_descriptor(out, ROWS.value)
    programs = min(processors(q.device), (schedule.shape[0] - 1) * (num_heads // 2 if paired else num_heads))
    strides = (q_head_stride, k_head_stride, v_head_stride)
    heads = (num_heads, num_heads // num_kv_heads)
    constants = (*heads, paired, left >= 0, right >= 0, block_k, head_dim, value_dim, _KEYS_IN_FLIGHT // block_k)
    _launch_forward(
        (programs, 1, 1), (q.device, q.dtype, *strides, left, right, *constants),
        q_descriptor, k_descriptor, v_descriptor, out_descriptor, out, lse, schedule, num_queries, *strides,
        scale * _LOG2_E, left, right, *constants,
    )  # fmt: skip
    return out, lse


def tile_list(
    q_offsets: Tensor,
    k_offsets: Tensor,
    num_queries: int,
    max_k: int,
    block_k: int,
    mask: tuple[int, int],
    paired: bool,
    max_q: int | None = None,
) -> Tensor:
    """The `schedule` of `attention_forward`. It depends only on offsets and masks, and layers share it.

    With `max_q` a row that is longer, or has more than `max_k` keys, is a device assertion.
    """
    block_q = ROWS.value if paired else BLOCK_Q
    return scheduling.tile_schedule(q_offsets, k_offsets, num_queries, max_k, block_q, block_k, mask, max_q, BLOCK_Q)


def is_paired(num_heads: int, mask: tuple[int, int], num_queries: int, q_offsets: Tensor, max_q: int) -> bool:
    """Whether half tiles of two heads are computed together, and the schedule lists halves.

    Not if no row can have a single half, not if rows are so long that few tiles are halves, and not under a mask, where
    blocks differ within a tile.
    """
    num_rows = q_offsets.shape[0] - 1
    all_whole = num_queries == num_rows * max_q and not 0 < max_q % BLOCK_Q <= ROWS.value
    return num_heads % 2 == 0 and mask == (-1, -1) and not all_whole and num_queries <= num_rows * _PAIRED_MEAN


def block_of_keys(num_keys: int, k_offsets: Tensor, max_k: int) -> int:
    """Keys per block: 128 is faster in general; short rows of unequal length waste less with blocks of 64."""
    mean = num_keys / max(k_offsets.shape[0] - 1, 1)
    return 64 if mean <= 64 or (mean <= 256 and mean <= 0.75 * max_k) else 128


@gluon.jit
def _item(
    schedule,
    turn,
    common,
    HEADS: gl.constexpr,
    PAIRED: gl.constexpr,
    LEFT: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """The parameters of this program's item of turn `turn` for the loader.

    (first query in q, how many of them exist, first key of the row in k, first block, number of blocks, head, 1 if
    there is a second one)
    """
    first = 0
    two = 0
    if PAIRED:
        entry, head = dealt_item(schedule, mixed_turn(turn, common, BLOCK_K), HEADS // 2)
        begin, count, head, two = paired_item(entry, head, HEADS)
    else:
        entry, head = dealt_item(schedule, turn, HEADS)
        begin = gl.load(entry + MAIN_BEGIN)
        count = gl.load(entry + MAIN_COUNT)
    if LEFT:
        first = gl.load(entry + FIRST_BLOCK)
    blocks = gl.maximum(gl.load(entry + NUM_BLOCKS), 1)
    return begin, count, gl.load(entry + OTHER_BEGIN), first, blocks, head, two


@gluon.jit
def _load_queries(q_desc, q_smem, q_full, q_empty, turn, begin, count, head, two, q_head_stride):
    """Fetch the halves of a tile's queries that exist, or the half that exists of two heads."""
    for c in gl.static_range(2):
        place = 2 * (turn % 2) + c
        full = q_full.index(place)
        row = c * (1 - two) * ROWS
        column = (head + c * two) * q_head_stride
        exist = count > row
        mbarrier.wait(q_empty.index(place), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(full, q_desc.block_type.nbytes, pred=exist)
        mbarrier.arrive(full, count=1, pred=count <= row)
        tma.async_copy_global_to_shared(q_desc, [begin + row, column], full, q_smem.index(place), pred=exist)


@gluon.jit
def _load(
    q_desc,
    desc,
    q_smem,
    smem,
    q_full,
    q_empty,
    full,
    empty,
    schedule,
    q_head_stride,
    head_stride,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
    LEFT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """A loading warp: each tile's blocks of keys, or of values, from the last to the first; if QUERIES its queries too.

    Keys and values have a warp each: the buffer of a block's keys is free well before that of the previous block's
    values.
    """
    loaded = 0
    items = gl.load(schedule) * (HEADS // 2 if PAIRED else HEADS)
    rounds = num_rounds(items)
    common = items // gl.num_programs(0)
    q_begin, q_count, begin, first, num_blocks, head, two = _item(schedule, 0, common, HEADS, PAIRED, LEFT, BLOCK_K)
    for turn in range(rounds):
        next_q, next_count, next_begin, next_first, next_blocks, next_head, next_two = _item(
            schedule, gl.minimum(turn + 1, rounds - 1), common, HEADS, PAIRED, LEFT, BLOCK_K
        )
        if QUERIES:
            _load_queries(q_desc, q_smem, q_full, q_empty, turn, q_begin, q_count, head, two, q_head_stride)
        for b in range(num_blocks << two):
            row = begin + (first + num_blocks - 1 - (b >> two)) * BLOCK_K
            column = (head + (b & two)) // GROUP * head_stride
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            # For the consumer that skips a block of the other one's head.
            mbarrier.arrive(empty.index(stage), count=1, pred=two != 0)
            mbarrier.expect(full.index(stage), desc.block_type.nbytes)
            tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), smem.index(stage))
            loaded += 1
        q_begin, q_count, begin, first = next_q, next_count, next_begin, next_first
        num_blocks, head, two = next_blocks, next_head, next_two


@gluon.jit(do_not_specialize=["num_queries"])
def _attention_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    lse,
    schedule,
    num_queries,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    scale,
    left,
    right,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    # Products of smaller blocks are short against a softmax.
    EARLY: gl.constexpr = BLOCK_K * (D + DV) < 128 * 256
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, DV], v_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, ROWS, DV], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (attend, (out_desc, q_smem, k_smem, v_smem, o_smem, barriers, out, lse, schedule, num_queries, scale, left,
                       right, HEADS, PAIRED, LEFT, RIGHT, BLOCK_K, DV, STAGES, EARLY, 0)),
            (attend, (out_desc, q_smem, k_smem, v_smem, o_smem, barriers, out, lse, schedule, num_queries, scale, left,
                       right, HEADS, PAIRED, LEFT, RIGHT, BLOCK_K, DV, STAGES, EARLY, 1)),
            (_load, (q_desc, k_desc, q_smem, k_smem, q_full, q_empty, k_full, k_empty, schedule, q_head_stride,
                     k_head_stride, HEADS, GROUP, PAIRED, LEFT, BLOCK_K, STAGES, True)),
            (_load, (q_desc, v_desc, q_smem, v_smem, q_full, q_empty, v_full, v_empty, schedule, q_head_stride,
                     v_head_stride, HEADS, GROUP, PAIRED, LEFT, BLOCK_K, STAGES, False)),
        ],
        [4, 1, 1],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch_forward = Launcher(_attention_forward_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
