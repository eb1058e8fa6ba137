"""The loading warpgroup of the Hopper backward of GDPA, and what it tells the others; see `hopper.backward`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.attention.hopper.backward_loader import (
    STAGES,
    await_flag,
    forget,
    key_tiles_of,
    raise_flag,
    steps_of,
    tile_of,
    turns_of,
)

# The parameters of each step that the loader writes for the other warpgroups, so that they need no registers for them:
# they have none left, and a number that is spilled is spilled by 256 threads.
KIND = gl.constexpr(0)  # sums of the next six
QUERIES_LEFT = gl.constexpr(1)  # from the first query of the tile on
KEYS_LEFT = gl.constexpr(2)  # from the first key of the tile on
OFFSET = gl.constexpr(3)  # position of the first key minus that of the first query
SCRATCH_TILE = gl.constexpr(4)
QUERY = gl.constexpr(5)  # the first one's row in q
HEAD = gl.constexpr(6)  # of q
KEY = gl.constexpr(7)  # the first one's row in k
FIRST = gl.constexpr(1)  # no earlier key tile adds to dq of these queries
LAST = gl.constexpr(2)  # no later one does
STARTS = gl.constexpr(4)  # the first step of a key tile
LEAVES = gl.constexpr(8)  # the last step of a key tile
STOP = gl.constexpr(16)  # no step, but the end of them
# How many steps are known at a time: from one that is over, whose dq has still to be added, to two that are loaded
# ahead.
CONTROLS = gl.constexpr(4)
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_WHOLE = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def write_control(controls, step, kind, queries, keys, offset, scratch_tile, query, head, key):
    index = gl.arange(0, 8, _LINE)
    x = gl.where(index == KIND, kind, gl.where(index == QUERIES_LEFT, queries, keys))
    x = gl.where(index == OFFSET, offset, gl.where(index == SCRATCH_TILE, scratch_tile, x))
    x = gl.where(index == QUERY, query, gl.where(index == HEAD, head, gl.where(index == KEY, key, x)))
    controls.index(step % CONTROLS).store(x)


@gluon.jit
def read_control(controls, step):
    """All fields of a step, for `field`; of some other one before the first step."""
    return controls.index((step + CONTROLS) % CONTROLS).load(_WHOLE)


@gluon.jit
def field(control, index: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, _WHOLE) == index, control, 0), 0)


@gluon.jit
def sums_in(v_s, slot, C: gl.constexpr):
    """Buffer `slot` of the values, while it holds none, as a buffer of columns C of dq in lines of 32 sums."""
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    return v_s.index(slot * 2 + C)._reinterpret(gl.float32, [v_s.shape[2], 32], LINES)


@gluon.jit
def _clear(pointer, rows, STRIDE: gl.constexpr, D: gl.constexpr):
    """Write zeros to the first `rows` rows of a tile of 128 keys that no query sees."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 1024 // D, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    nothing = gl.zeros((1024 // D, D), pointer.dtype.element_ty, LAYOUT)
    for start in range(0, gl.minimum(rows, 128), 1024 // D):
        gl.store(pointer + (start + row) * STRIDE + column, nothing, mask=(start + row < rows) & (column >= 0))


@gluon.jit
def _bring_sums(sums_desc, v_s, ds_full, dq_turn, step, slot, index, wanted):
    """Allow dq of the step before `step` to be computed. If `wanted`, load the sum of the other key tiles first.

    It goes to buffer `slot` of the values, which is free once both consumers have written their ds of the step before:
    they have then read what was there, be it values or sums.
    """
    old = (step & 1) ^ 1
    if wanted & (step > 0):
        mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1)
        gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [step], gl.int32, False, 1)
        mbarrier.expect(dq_turn.index(old), 2 * sums_desc.block_type.nbytes)
        line = index * (2 * sums_desc.block_type.shape[0])
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                sums_desc, [line + half * sums_desc.block_type.shape[0], 0], dq_turn.index(old),
                sums_in(v_s, slot, half),
            )  # fmt: skip
    else:
        mbarrier.arrive(dq_turn.index(old), count=1, pred=step > 0)


@gluon.jit
def keep_order(
    sums_desc, scratch_ptr, buffers, bars, table_ptr, flags_ptr, tiles_stride, left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the order in which key tiles add to dq, as in `attention.hopper.backward_loader`."""
    _k_s, v_s, _q_s, _g_s, _ds_s, _controls = buffers
    _q_full, _g_full, _stage_empty, step_done, _k_full, _k_empty, ds_full, dq_turn = bars
    D: gl.constexpr = v_s.shape[2]
    num_items = gl.load(table_ptr) * HEADS
    tile = 0
    step = 0
    a = -1
    b = -1
    c = -1
    index = 0
    height = 0
    wanted = False
    read = -1
    older = -1
    oldest = -1
    item = tile_of(table_ptr, 0, num_items, HEADS)
    for turn in range(turns_of(num_items)):
        keys, queries = item
        _k_start, _k_length, j, head = keys
        _q_start, _q_length, first_tile, _later = queries
        key_tiles, low, high = steps_of(keys, queries, left, right, LEFT, RIGHT)
        following = tile_of(table_ptr, turn + 1, num_items, HEADS)
        tile += (high > low).to(gl.int32)
        for member in range(GROUP):
            for i in range(low, high):
                mbarrier.wait(step_done.index(step & 1), (step - 2) // 2 & 1, pred=step > 1)
                raise_flag(flags_ptr, c)
                b = await_flag(flags_ptr, index, height, step_done, step, b)
                _bring_sums(sums_desc, v_s, ds_full, dq_turn, step, tile & 1, index, wanted)
                forget(scratch_ptr, oldest, D)
                first, last = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                index = (head * GROUP + member) * tiles_stride + first_tile + i
                height = j - first
                wanted = (j == last) & (j > first)
                oldest = older
                older = read
                read = gl.where(wanted, index, -1)
                c = b
                b = a
                a = gl.where(j < last, index, -1)
                step += 1
        item = following
    mbarrier.wait(step_done.index(step & 1), (step - 2) // 2 & 1, pred=step > 1)
    raise_flag(flags_ptr, c)
    b = await_flag(flags_ptr, index, height, step_done, step, b)
    _bring_sums(sums_desc, v_s, ds_full, dq_turn, step, (tile & 1) ^ 1, index, wanted)
    mbarrier.wait(step_done.index(step & 1), step // 2 & 1)
    raise_flag(flags_ptr, b)
    raise_flag(flags_ptr, a)


@gluon.jit
def load_tiles(
    descs, gradients, buffers, bars, table_ptr, tiles_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warp. Q_STEP is the number of columns from one head to the next in the matrix of q_desc.

    Keys are loaded as soon as a buffer is free, values when the tile before is at its last step: until then sums of dq
    use their buffer. After the last step comes one more without data, because consumers look one step ahead.
    """
    q_desc, k_desc, v_desc, g_desc = descs
    k_s, v_s, q_s, g_s, _ds_s, controls = buffers
    dk_ptr, dv_ptr = gradients
    q_full, g_full, stage_empty, _step_done, k_full, k_empty, ds_full, _dq_turn = bars
    D: gl.constexpr = q_desc.block_type.shape[1]
    num_items = gl.load(table_ptr) * HEADS
    tile = 0
    step = 0
    item = tile_of(table_ptr, 0, num_items, HEADS)
    for turn in range(turns_of(num_items)):
        keys, queries = item
        k_start, k_length, j, head = keys
        q_start, q_length, first_tile, _later = queries
        key_tiles, low, high = steps_of(keys, queries, left, right, LEFT, RIGHT)
        following = tile_of(table_ptr, turn + 1, num_items, HEADS)
        slot = tile & 1
        if high > low:
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
        for member in range(GROUP):
            q_head = head * GROUP + member
            for i in range(low, high):
                stage = step % STAGES
                query = q_start + i * 64
                mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
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
                    q_head * tiles_stride + first_tile + i, query, q_head, k_start + j * 128,
                )  # fmt: skip
                mbarrier.arrive(full, count=1)
                full = g_full.index(stage)
                if starts:
                    mbarrier.expect(full, g_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
                else:
                    mbarrier.expect(full, g_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                if starts:
                    mbarrier.wait(ds_full.index((step & 1) ^ 1), (step - 1) // 2 & 1, pred=step > 0)
                    for half in gl.static_range(2):
                        tma.async_copy_global_to_shared(
                            v_desc, [k_start + j * 128 + half * 64, head * V_STEP], full, v_s.index(slot * 2 + half)
                        )
                step += 1
        item = following
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
    write_control(controls, step, step * 0 + STOP, 0, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_full.index(stage), count=2)
    mbarrier.wait(k_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(k_full.index(tile & 1), count=1)
