"""The loading warpgroup of the Hopper backward of GDPA; `gluon_backward` has the whole."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gdpa.gluon_backward_items import (
    FIRST,
    KIND,
    LAST,
    LEAVES,
    SCRATCH_TILE,
    STARTS,
    STOP,
    field,
    read_control,
    sums_in,
    write_control,
)
from kernels.jagged.gluon_backward_steps import (
    STAGES,
    await_flag,
    key_tiles_of,
    raise_flag,
    steps_of,
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
def _clear(pointer, rows, STRIDE: gl.constexpr, D: gl.constexpr):
    """Write zeros to the first `rows` rows of a tile of 128 keys that no query sees."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 1024 // D, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    nothing = gl.zeros((1024 // D, D), pointer.dtype.element_ty, LAYOUT)
    for start in range(0, gl.minimum(rows, 128), 1024 // D):
        gl.store(pointer + (start + row) * STRIDE + column, nothing, mask=(start + row < rows) & (column >= 0))


@gluon.jit
def _bring_sums(sums_desc, v_s, controls, ds_full, dq_turn, step, slot):
    """Let dq of the step before `step` be made. If its key tile is the last to add to it, bring what the others left.

    That goes to the place `slot` of values, which is free once both consumers have written their ds of the step before:
    they have read what lay there, be it values or sums.
    """
    old = (step & 1) ^ 1
    control = read_control(controls, step - 1)
    kind = field(control, KIND)
    if (kind & (FIRST | LAST) == LAST) & (step > 0):
        mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1)
        gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [step], gl.int32, False, 1)
        mbarrier.expect(dq_turn.index(old), 2 * sums_desc.block_type.nbytes)
        line = field(control, SCRATCH_TILE) * (2 * sums_desc.block_type.shape[0])
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                sums_desc, [line + half * sums_desc.block_type.shape[0], 0], dq_turn.index(old),
                sums_in(v_s, slot, half),
            )  # fmt: skip
    else:
        mbarrier.arrive(dq_turn.index(old), count=1, pred=step > 0)


@gluon.jit
def _forget(controls, scratch_ptr, step, D: gl.constexpr):
    """Sums of dq of a step that have been read, if they were: L2 need not write them to memory any more."""
    control = read_control(controls, step)
    if (field(control, KIND) & (FIRST | LAST) == LAST) & (step >= 0):
        lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        address = scratch_ptr.to(gl.int64) + field(control, SCRATCH_TILE).to(gl.int64) * (256 * D) + lane * 128
        for part in gl.static_range(D // 64):
            gl.inline_asm_elementwise(
                "discard.global.L2 [$1], 128; mov.b32 $0, 0;", "=r,l", [address + part * 16384], gl.int32, False, 1
            )


@gluon.jit
def load_tiles(
    descs, pointers, strides, gradients, scratch_ptr, buffers, bars, table_ptr, flags_ptr, tiles_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warpgroup. Q_STEP is how many columns there are from one head to the next in the matrix of q_desc.

    What a step will need from memory it has L2 fetch some steps before, because that takes longer than the two steps
    that shared memory holds: the queries of a row for its first key tile, and the next tile of keys. Keys come as soon
    as there is place, values when the tile before is at its last step: until then sums of dq use their place.

    It also keeps the order in which key tiles add to dq, as that of `kernels.jagged.gluon_backward_steps` does. After
    the last step comes one more that carries no data: consumers look one step ahead.
    """
    q_desc, k_desc, v_desc, g_desc, sums_desc = descs
    q_ptr, k_ptr, v_ptr, g_ptr = pointers
    q_row, k_row, v_row, g_row = strides
    k_s, v_s, q_s, g_s, _ds_s, controls = buffers
    dk_ptr, dv_ptr = gradients
    q_full, g_full, step_done, k_full, k_empty, ds_full, dq_turn = bars
    D: gl.constexpr = q_desc.block_type.shape[1]
    num_items = gl.load(table_ptr) * HEADS
    tile = 0
    step = 0
    a = -1
    b = -1
    c = -1
    index = 0
    height = 0
    item = tile_of(table_ptr, 0, num_items, HEADS)
    for turn in range(turns_of(num_items)):
        q_start, q_length, k_start, k_length, first_tile, j, head = item
        key_tiles, low, high = steps_of(item, left, right, LEFT, RIGHT)
        following = tile_of(table_ptr, turn + 1, num_items, HEADS)
        next_start, next_length, next_k_start, next_k_length, _next_tile, next_j, next_head = following
        if high > low:
            slot = tile & 1
            full = k_full.index(slot)
            mbarrier.wait(k_empty.index(slot), (tile // 2 & 1) ^ 1)
            mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
            for half in gl.static_range(2):
                key = k_start + j * 128 + half * 64
                tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], full, k_s.index(slot * 2 + half))
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
                index_of_step = q_head * tiles_stride + first_tile + i
                ahead = i + AHEAD
                inside = ahead < high
                ahead = gl.where(inside, ahead, ahead - high)
                length = gl.where(inside, q_length, next_length)
                if gl.where(inside, j, next_j) == 0 and (inside or member == GROUP - 1) and ahead * 64 < length:
                    start = gl.where(inside, q_start, next_start)
                    asked = gl.where(inside, q_head, next_head * GROUP)
                    _ask_for(q_ptr, g_ptr, q_row, g_row, start, length, ahead, asked, Q_STEP, G_STEP, D)
                mbarrier.wait(step_done.index(step & 1), (step - 2) // 2 & 1, pred=step > 1)
                full = q_full.index(stage)
                mbarrier.expect(full, q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                first, last = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                kind = (j == first).to(gl.int32) * FIRST + (j == last).to(gl.int32) * LAST
                starts = (member == 0) & (i == low)
                kind += starts.to(gl.int32) * STARTS
                kind += ((member == GROUP - 1) & (i == high - 1)).to(gl.int32) * LEAVES
                write_control(
                    controls, step, kind, q_length - i * 64, k_length - j * 128, j * 128 - i * 64,
                    index_of_step, query, q_head, k_start + j * 128,
                )  # fmt: skip
                mbarrier.arrive(q_full.index(stage), count=1)
                raise_flag(flags_ptr, c)
                full = g_full.index(stage)
                if starts:
                    mbarrier.expect(full, g_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    mbarrier.wait(ds_full.index((step & 1) ^ 1), (step - 1) // 2 & 1, pred=step > 0)
                    for half in gl.static_range(2):
                        tma.async_copy_global_to_shared(
                            v_desc, [k_start + j * 128 + half * 64, head * V_STEP], full,
                            v_s.index(((tile & 1) ^ 1) * 2 + half),
                        )  # fmt: skip
                else:
                    mbarrier.expect(full, g_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                b = await_flag(flags_ptr, index, height, step_done, step + 1, b)
                _bring_sums(sums_desc, v_s, controls, ds_full, dq_turn, step, tile & 1)
                _forget(controls, scratch_ptr, step - 3, D)
                index = index_of_step
                height = j - first
                c = b
                b = a
                a = index if j < last else -1
                step += 1
        item = following
    stage = step % STAGES
    mbarrier.wait(step_done.index(step & 1), (step - 2) // 2 & 1, pred=step > 1)
    write_control(controls, step, step * 0 + STOP, 0, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_full.index(stage), count=2)
    mbarrier.wait(k_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(k_full.index(tile & 1), count=1)
    raise_flag(flags_ptr, c)
    b = await_flag(flags_ptr, index, height, step_done, step + 1, b)
    _bring_sums(sums_desc, v_s, controls, ds_full, dq_turn, step, (tile & 1) ^ 1)
    mbarrier.wait(step_done.index(step & 1), step // 2 & 1)
    raise_flag(flags_ptr, b)
    raise_flag(flags_ptr, a)
