"""The loading warpgroup of the Hopper backward of GDPA; `gluon_backward` has the whole."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gdpa.gluon_backward_items import (
    FIRST,
    LAST,
    LEAVES,
    STARTS,
    STOP,
    dealt_turns,
    item_at,
    items_of,
    key_tiles_in_item,
    scratch_tile,
    write_control,
)
from kernels.jagged.gluon_backward_steps import STAGES, await_flag, key_tiles_of, query_tiles_of, raise_flag

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
def _clear(pointer, rows, STRIDE: gl.constexpr, D: gl.constexpr):
    """Write zeros to the first `rows` rows of a tile of 128 keys that no query sees."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 1024 // D, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    nothing = gl.zeros((1024 // D, D), pointer.dtype.element_ty, LAYOUT)
    for start in range(0, gl.minimum(rows, 128), 1024 // D):
        gl.store(pointer + (start + row) * STRIDE + column, nothing, mask=(start + row < rows) & (column >= 0))


@gluon.jit
def load_tiles(
    descs, pointers, strides, gradients, buffers, bars, table_ptr, num_rows, flags_ptr, tiles_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, OWNED: gl.constexpr,
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
    k_s, v_s, q_s, g_s, _ds_s, controls = buffers
    dk_ptr, dv_ptr = gradients
    q_full, g_full, stage_empty, kv_full, kv_empty, _ds_full, ds_empty, dq_turn, done = bars
    D: gl.constexpr = q_desc.block_type.shape[1]
    num_items = items_of(table_ptr, num_rows, HEADS, OWNED)
    tile = 0
    step = 0
    a = -1
    b = -1
    c = -1
    index = 0
    height = 0
    q_start, q_length, k_start, k_length, first_tile, first_j, head = item_at(table_ptr, 0, num_items, HEADS, OWNED)
    for turn in range(dealt_turns(num_items, OWNED)):
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        first_j, end_j = key_tiles_in_item(first_j, key_tiles, OWNED)
        after_q_start, after_q_length, after_k_start, after_k_length, after_tile, after_j, after_head = item_at(
            table_ptr, turn + 1, num_items, HEADS, OWNED
        )
        for j in range(first_j, end_j):
            low, high = query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            leaving = j == end_j - 1
            next_start = gl.where(leaving, after_q_start, q_start)
            next_length = gl.where(leaving, after_q_length, q_length)
            next_k_start = gl.where(leaving, after_k_start, k_start)
            next_k_length = gl.where(leaving, after_k_length, k_length)
            next_j = gl.where(leaving, gl.where(OWNED, 0, after_j), j + 1)
            next_head = gl.where(leaving, after_head, head)
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
            else:
                start = (k_start + j * 128).to(gl.int64) * (HEADS * D) + head * D
                _clear(dk_ptr + start, k_length - j * 128, HEADS * D, D)
                _clear(dv_ptr + start, k_length - j * 128, HEADS * D, D)
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
                    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
                    full = q_full.index(stage)
                    mbarrier.expect(full, q_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                    full = g_full.index(stage)
                    mbarrier.expect(full, g_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    first, last = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                    kind = (j == first).to(gl.int32) * FIRST + (j == last).to(gl.int32) * LAST
                    kind += ((member == 0) & (i == low)).to(gl.int32) * STARTS
                    kind += ((member == GROUP - 1) & (i == high - 1)).to(gl.int32) * LEAVES
                    write_control(
                        controls, step, kind, q_length - i * 64, k_length - j * 128, j * 128 - i * 64,
                        scratch_tile(q_head, member, first_tile, i, tiles_stride, GROUP, OWNED), query, q_head,
                        k_start + j * 128,
                    )  # fmt: skip
                    mbarrier.arrive(q_full.index(stage), count=1)
                    if not OWNED:
                        raise_flag(flags_ptr, c)
                        b = await_flag(flags_ptr, index, height, ds_empty, step, b)
                        mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
                        index = q_head * tiles_stride + first_tile + i
                        height = j - first
                        c = b
                        b = a
                        a = index if j < last else -1
                    step += 1
        q_start, q_length, k_start, k_length, first_tile, first_j, head = (
            after_q_start, after_q_length, after_k_start, after_k_length, after_tile, after_j, after_head,
        )  # fmt: skip
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
    write_control(controls, step, step * 0 + STOP, 0, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_full.index(stage), count=2)
    mbarrier.wait(kv_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(kv_full.index(tile & 1), count=1)
    if not OWNED:
        raise_flag(flags_ptr, c)
        b = await_flag(flags_ptr, index, height, ds_empty, step, b)
        mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
    mbarrier.wait(done, 0)
    if not OWNED:
        raise_flag(flags_ptr, b)
        raise_flag(flags_ptr, a)
