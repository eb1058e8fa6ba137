"""Forward of GDPA for Hopper, in Gluon: persistent, warp-specialised, TMA in and out, asynchronous wgmma.

A program works through tiles of 128 queries of one row and head: one warp loads with TMA, two warpgroups compute 64
queries each (`hopper.forward_consumer`). Keys and values go through rings of blocks that do not stop between tiles.
Short rows of keys stay in shared memory while the row's query tiles pass by (`hopper.tiles`).

Rows that fit into one tile of 64 queries and keys are left to `triton.short` where enough rows are likely to be so
short.

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
from kernels.attention.triton.launch import rows_of
from kernels.core import scheduling
from kernels.core.chip import HOPPER_HEADS
from kernels.core.hopper import let_next_start
from kernels.core.launch import Launcher, processors
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.core.scheduling import FIRST_BLOCK, MAIN_BEGIN, NUM_BLOCKS, OTHER_BEGIN, ROW
from kernels.gdpa.hopper.activations import head_kinds
from kernels.gdpa.hopper.forward_consumer import ROWS, attend
from kernels.gdpa.hopper.tiles import dealt_tile, num_turns
from kernels.gdpa.triton import short as triton_short

BLOCK_Q = 2 * ROWS.value
RUN = 2  # tiles of a row that a program is dealt at a time, if there are enough
_IN_FLIGHT = 128 * 512  # features of keys and values of all stages: with queries and outputs they fill shared memory

# Three warpgroups at this limit fill the register file; the loader's gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)


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
) -> Tensor:
    """out [Nq, H, dv] of q's dtype: act_h(score_scale * q k^T) * out_scale @ v within rows.

    q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv], bfloat16 or float16, d and dv in HOPPER_HEADS, H a multiple of Hkv.
    Views whose last dimension is contiguous are read in place. `activations` names one of
    `kernels.core.activations.ACTIVATIONS` per head. The mask is a window alone. A query that sees no key gets 0. Values
    must be finite: those after a row are multiplied by zeros. A row that is longer than its bound is a device
    assertion. ValueError for other head dimensions.
    """
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    num_queries, num_heads, head_dim = q.shape
    value_dim = v.shape[2]
    if head_dim not in HOPPER_HEADS or value_dim not in HOPPER_HEADS:
        raise ValueError(f"head dimensions must be in {HOPPER_HEADS}, got {head_dim} and {value_dim}")
    out = torch.empty(num_queries, num_heads, value_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or k.shape[0] == 0:
        return out.zero_()
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    rest = (queries, keys, activations, score_scale, out_scale, mask)
    short = triton_short.limit_of(q, k, v, queries, keys)
    if max(max_q, max_k) <= short:
        triton_short.forward(out, q, k, v, *rest)
        return out
    left, right = mask.window
    most = processors(q.device)
    # Only rows whose keys fit into shared memory gain from neighbouring tiles. Under a window these see different
    # blocks, and few tiles are better spread over all multiprocessors.
    block_k = block_of_keys(k.shape[0], k_offsets.shape[0] - 1, max_k)
    kept = max_k * (head_dim + value_dim) <= _IN_FLIGHT
    run = RUN if kept and left < 0 and right < 0 and num_queries * num_heads >= 4 * RUN * most * BLOCK_Q else 1
    schedule = scheduling.tile_schedule(
        q_offsets, k_offsets, num_queries, max_k, BLOCK_Q, block_k, (left, right), max_q, short=short
    )
    programs = min(most, (schedule.shape[0] - 1) * num_heads)
    launch(out, q, k, v, schedule, block_k, programs, run, activations, score_scale, out_scale, (left, right))
    if short:
        triton_short.forward(out, q, k, v, *rest, beside=True)
    return out


def block_of_keys(num_keys: int, num_rows: int, max_k: int) -> int:
    """Keys per block: 128 is faster in general, 64 where it wastes fewer products beyond the ends of rows.

    That is where rows are short, or where they are not long and, by their mean, unequal.
    """
    mean = num_keys / max(num_rows, 1)
    return 64 if mean <= 64 or (max_k <= 512 and mean <= 0.75 * max_k) else 128


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Tensor,
    block_k: int,
    programs: int,
    run: int,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    window: tuple[int, int],
) -> None:
    """Write `out` with `programs` programs that are dealt the tiles of `schedule`, `run` side by side at a time.

    `schedule` counts blocks of `block_k` keys, 64 or 128.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, value_dim = v.shape[1:]
    q_descriptor, q_head_stride = head_descriptor(q, ROWS.value)
    k_descriptor, k_head_stride = head_descriptor(k, block_k)
    v_descriptor, v_head_stride = head_descriptor(v, block_k)
    out_descriptor, _ = head_descriptor(out, ROWS.value)
    kinds, kinds_of_heads = head_kinds(activations)
    strides = (q_head_stride, k_head_stride, v_head_stride)
    left, right = window
    constants = (
        num_heads, num_heads // num_kv_heads, kinds, kinds_of_heads, left >= 0, right >= 0, run, block_k,
        head_dim, value_dim, _IN_FLIGHT // (block_k * (head_dim + value_dim)),
    )  # fmt: skip
    _launch_forward(
        (programs, 1, 1), (q.device, q.dtype, *strides, left, right, *constants),
        q_descriptor, k_descriptor, v_descriptor, out_descriptor, out, schedule, *strides,
        float(score_scale), float(out_scale), left, right, *constants,
    )  # fmt: skip


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers, schedule, q_head_stride, k_head_stride, v_head_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RUN: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: blocks of keys and values of each tile, from the last to the first.

    The values of a block are loaded after the keys of the next one, because their buffer becomes free later. The next
    tile's queries are loaded long before its first blocks: unlike most keys and values, which other tiles have
    brought to L2, they come from memory.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    loaded = 0
    pending = loaded > 0  # whether the values of the block loaded last have still to be loaded
    v_row = 0
    v_column = 0
    previous_row = -1
    previous_head = -1
    num_tiles = gl.load(schedule)
    turns = num_turns(num_tiles, HEADS, RUN)
    q_begin, k_begin, first, num_blocks, row, head = _item(schedule, num_tiles, 0, HEADS, RUN)
    if turns > 0:
        _load_queries(q_desc, q_smem, q_full, q_empty, 0, q_begin, head * q_head_stride)
    for turn in range(turns):
        next_q, next_k, next_first, next_blocks, next_row, next_head = _item(
            schedule, num_tiles, gl.minimum(turn + 1, turns - 1), HEADS, RUN
        )
        shared = False  # whether keys and values are there
        if RUN > 1:
            shared = (row == previous_row) & (head == previous_head) & (num_blocks <= STAGES)
            previous_row = row
            previous_head = head
            if shared:
                if pending:  # no keys will be loaded before the values are needed
                    _load_values(v_desc, v_smem, v_full, v_empty, loaded - 1, v_row, v_column, STAGES)
                    pending = False
                if turn + 1 < turns:
                    _load_queries(q_desc, q_smem, q_full, q_empty, turn + 1, next_q, next_head * q_head_stride)
        kv_head = head // GROUP
        for b in range(gl.where(shared, 0, num_blocks)):
            k_row = k_begin + (first + num_blocks - 1 - b) * BLOCK_K
            stage = loaded % STAGES
            mbarrier.wait(k_empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [k_row, kv_head * k_head_stride], k_full.index(stage), k_smem.index(stage)
            )
            if pending:
                _load_values(v_desc, v_smem, v_full, v_empty, loaded - 1, v_row, v_column, STAGES)
            v_row = k_row
            v_column = kv_head * v_head_stride
            pending = True
            loaded += 1
            # With these blocks in flight the consumers have to be done with the queries of the tile before, soon.
            if (b == gl.minimum(STAGES, num_blocks) - 1) & (turn + 1 < turns):
                _load_queries(q_desc, q_smem, q_full, q_empty, turn + 1, next_q, next_head * q_head_stride)
        q_begin, k_begin, first, num_blocks, row, head = next_q, next_k, next_first, next_blocks, next_row, next_head
    if pending:
        _load_values(v_desc, v_smem, v_full, v_empty, loaded - 1, v_row, v_column, STAGES)


@gluon.jit
def _item(schedule, num_tiles, turn, HEADS: gl.constexpr, RUN: gl.constexpr):
    """(first query in q, first key of the row in k, first block, number of blocks, row, head) of this program's tile
    number `turn`; 0 for a row that is not needed."""
    entry, head = dealt_tile(schedule, num_tiles, turn, HEADS, RUN)
    row = 0
    if RUN > 1:
        row = gl.load(entry + ROW)
    blocks = gl.maximum(gl.load(entry + NUM_BLOCKS), 1)
    return gl.load(entry + MAIN_BEGIN), gl.load(entry + OTHER_BEGIN), gl.load(entry + FIRST_BLOCK), blocks, row, head


@gluon.jit
def _load_queries(q_desc, q_smem, q_full, q_empty, turn, begin, column):
    for c in gl.static_range(2):
        place = 2 * (turn % 2) + c
        mbarrier.wait(q_empty.index(place), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_full.index(place), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [begin + c * ROWS, column], q_full.index(place), q_smem.index(place))


@gluon.jit
def _load_values(v_desc, v_smem, v_full, v_empty, load, row, column, STAGES: gl.constexpr):
    stage = load % STAGES
    mbarrier.wait(v_empty.index(stage), ((load // STAGES) & 1) ^ 1)
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [row, column], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _gdpa_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out, schedule, q_head_stride, k_head_stride, v_head_stride,
    score_scale, out_scale, left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, RUN: gl.constexpr,
    BLOCK_K: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    let_next_start()
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, DV], v_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, ROWS, DV], out_desc.layout)
    columns = gl.allocate_shared_memory(gl.int32, [BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns.store(gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [4], [0])))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
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
            (attend, (out_desc, q_smem, k_smem, v_smem, o_smem, columns, barriers, out, schedule, HEADS,
                      score_scale, out_scale, left, right, KINDS, HEAD_KINDS, LEFT, RIGHT, RUN, BLOCK_K, DV, STAGES,
                      0)),
            (attend, (out_desc, q_smem, k_smem, v_smem, o_smem, columns, barriers, out, schedule, HEADS,
                      score_scale, out_scale, left, right, KINDS, HEAD_KINDS, LEFT, RIGHT, RUN, BLOCK_K, DV, STAGES,
                      1)),
            (_load, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers, schedule,
                     q_head_stride, k_head_stride, v_head_stride, HEADS, GROUP, RUN, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch_forward = Launcher(_gdpa_forward_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
