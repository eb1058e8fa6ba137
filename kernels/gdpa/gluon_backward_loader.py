"""The loading warpgroup of the Hopper backward of GDPA; `gluon_backward` has the whole."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.jagged.gluon_backward_steps import (
    STAGES,
    await_flag,
    key_tiles_of,
    query_tiles_of,
    raise_flag,
    tile_of,
    turns_of,
)

AHEAD = gl.constexpr(4)  # how many steps before its own a tile of queries is asked for


@gluon.jit
def _ask_for(
    x_ptr, y_ptr, x_row, y_row, start, length, i, head,
    X_STEP: gl.constexpr, Y_STEP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Have L2 fetch places 64 i to 64 i + 63 of a row and head of x and y, q and g or k and v."""
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    row = (start + gl.minimum(i * 64 + (lane & 63), length - 1)).to(gl.int64)
    of_x = (x_ptr + head * X_STEP).to(gl.int64) + row * (2 * x_row)
    of_y = (y_ptr + head * Y_STEP).to(gl.int64) + row * (2 * y_row)
    address = gl.where(lane < 64, of_x, of_y)
    for line in gl.static_range(D // 64):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address + line * 128], gl.int32, False, 1
        )


@gluon.jit
def load_tiles(
    descs, pointers, strides, buffers, bars, table_ptr, flags_ptr, tiles_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warpgroup. Q_STEP is how many columns there are from one head to the next in the matrix of q_desc.

    What a step will need from memory it has L2 fetch some steps before, because that takes longer than the two steps
    that shared memory holds: the queries of a row for its first key tile, and the next tile of keys.

    It also keeps the order in which key tiles add to dq, as that of `kernels.jagged.gluon_backward_steps` does. After
    the last step comes one more that carries no data: consumers look one step ahead.
    """
    q_desc, k_desc, v_desc, g_desc = descs
    q_ptr, k_ptr, v_ptr, g_ptr = pointers
    q_row, k_row, v_row, g_row = strides
    k_s, v_s, q_s, g_s, _ds_s, _item_s = buffers
    q_full, g_full, q_empty, g_empty, kv_full, kv_empty, _ds_full, ds_empty, dq_turn, done = bars
    D: gl.constexpr = q_desc.block_type.shape[1]
    num_items = gl.load(table_ptr) * HEADS
    tile = 0
    step = 0
    a = -1
    b = -1
    c = -1
    index = 0
    height = 0
    q_start, q_length, k_start, k_length, first_tile, j, head = tile_of(table_ptr, 0, num_items, HEADS)
    for turn in range(turns_of(num_items)):
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        low, high = query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
        next_start, next_length, next_k_start, next_k_length, next_tile, next_j, next_head = tile_of(
            table_ptr, turn + 1, num_items, HEADS
        )
        if high > low:
            slot = tile & 1
            full = kv_full.index(slot)
            mbarrier.wait(kv_empty.index(slot), (tile // 2 & 1) ^ 1)
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
            for half in gl.static_range(2):
                key = k_start + j * 128 + half * 64
                tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], full, k_s.index(slot * 2 + half))
                tma.async_copy_global_to_shared(v_desc, [key, head * V_STEP], full, v_s.index(slot * 2 + half))
            tile += 1
        for half in gl.static_range(2):
            if next_k_length > next_j * 128 + half * 64:
                _ask_for(
                    k_ptr, v_ptr, k_row, v_row, next_k_start, next_k_length, next_j * 2 + half, next_head,
                    K_STEP, V_STEP, D,
                )  # fmt: skip
        for member in range(GROUP):
            q_head = head * GROUP + member
            for i in range(low, high):
                stage = step % STAGES
                query = q_start + i * 64
                ahead = i + AHEAD
                inside = ahead < high
                ahead = gl.where(inside, ahead, ahead - high)
                length = gl.where(inside, q_length, next_length)
                if gl.where(inside, j, next_j) == 0 and (inside or member == GROUP - 1) and ahead * 64 < length:
                    start = gl.where(inside, q_start, next_start)
                    asked = gl.where(inside, q_head, next_head * GROUP)
                    _ask_for(q_ptr, g_ptr, q_row, g_row, start, length, ahead, asked, Q_STEP, G_STEP, D)
                mbarrier.wait(g_empty.index(stage), (step // STAGES & 1) ^ 1)
                full = g_full.index(stage)
                mbarrier.expect(full, g_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
                full = q_full.index(stage)
                mbarrier.expect(full, q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                raise_flag(flags_ptr, c)
                b = await_flag(flags_ptr, index, height, ds_empty, step, b)
                mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
                first, last = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                index = q_head * tiles_stride + first_tile + i
                height = j - first
                c = b
                b = a
                a = index if j < last else -1
                step += 1
        q_start, q_length, k_start, k_length, first_tile, j, head = (
            next_start, next_length, next_k_start, next_k_length, next_tile, next_j, next_head,
        )  # fmt: skip
    stage = step % STAGES
    mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(q_full.index(stage), count=1)
    mbarrier.wait(kv_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(kv_full.index(tile & 1), count=1)
    raise_flag(flags_ptr, c)
    b = await_flag(flags_ptr, index, height, ds_empty, step, b)
    mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
    mbarrier.wait(done, 0)
    raise_flag(flags_ptr, b)
    raise_flag(flags_ptr, a)
