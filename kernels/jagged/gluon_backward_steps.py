"""Device functions of the attention backward in `gluon_attention_backward`: what each of its warpgroups does.

Names: q, k, v and g (the gradient of the output) are tiles in shared memory, s the scores, p the probabilities; all
products are taken on the transposed scores, [64 keys, 64 queries], so that p and ds are left operands in registers for
dv and dk. A tile of queries has 64 of them, a tile of keys 128, of which warpgroup C owns 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Tiles of queries (q, g and their numbers) in flight.
STAGES = gl.constexpr(3)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))


@gluon.jit
def _share(program, programs, items):
    """How many items this program takes: `_item(turn)` for turns below it."""
    full = items // programs
    place = program if full % 2 == 0 else programs - 1 - program
    return full + (place < items - full * programs).to(gl.int32)


@gluon.jit
def _item(turn, program, programs):
    """Items come longest first; going back and forth over the programs evens out their sums."""
    place = program if turn % 2 == 0 else programs - 1 - program
    return turn * programs + place


@gluon.jit
def _row(table_ptr, item, HEADS: gl.constexpr):
    """The fields of `attention_rows.row_table`, and which key head."""
    entry = table_ptr + item // HEADS * 8
    q_start = gl.load(entry)
    q_length = gl.load(entry + 1)
    k_start = gl.load(entry + 2)
    k_length = gl.load(entry + 3)
    first_tile = gl.load(entry + 4)
    return q_start, q_length, k_start, k_length, first_tile, item % HEADS


@gluon.jit
def _query_tiles(j, key_tiles, query_tiles, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Query tiles [low, high) that see a key of tile j. The last key tile also takes the queries that see nothing."""
    low = 0
    high = query_tiles
    if RIGHT:
        low = gl.minimum(gl.maximum(j * 128 - right, 0) // 64, query_tiles)
    if LEFT:
        reach = gl.minimum((j * 128 + 127 + left) // 64 + 1, query_tiles)
        high = query_tiles if j == key_tiles - 1 else reach
    return low, high


@gluon.jit
def _key_tiles_of(i, key_tiles, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """First and last key tile that adds to dq of query tile i."""
    first = 0
    last = key_tiles - 1
    if LEFT:
        first = gl.minimum(gl.maximum(i * 64 - left, 0) // 128, key_tiles - 1)
    if RIGHT:
        last = gl.minimum((i * 64 + 63 + right) // 128, key_tiles - 1)
    return first, last


@gluon.jit
def load_tiles(
    descs, buffers, bars, table_ptr, items, stats_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warpgroup. Q_STEP is how many columns there are from one head to the next in the matrix of q_desc."""
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc = descs
    k_s, v_s, q_s, g_s, _ds_s, lse_s, delta_s = buffers
    q_full, g_full, stage_empty, k_full, v_full, k_empty, v_empty, _ds_full, _ds_empty = bars
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile = 0
    step = 0
    for turn in range(_share(program, programs, items)):
        item = _item(turn, program, programs)
        q_start, q_length, k_start, k_length, first_tile, head = _row(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = _query_tiles(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            phase = (tile & 1) ^ 1
            mbarrier.wait(k_empty, phase)
            mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
            for c in gl.static_range(2):
                key = k_start + j * 128 + c * 64
                tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], k_full, k_s.index(c))
            mbarrier.wait(v_empty, phase)
            mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
            for c in gl.static_range(2):
                key = k_start + j * 128 + c * 64
                tma.async_copy_global_to_shared(v_desc, [key, head * V_STEP], v_full, v_s.index(c))
            for member in range(GROUP):
                q_head = head * GROUP + member
                for i in range(low, high):
                    stage = step % STAGES
                    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
                    query = q_start + i * 64
                    statistic = q_head * stats_stride + (first_tile + i) * 64
                    full = q_full.index(stage)
                    mbarrier.expect(full, q_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                    tma.async_copy_global_to_shared(lse_desc, [statistic], full, lse_s.index(stage))
                    full = g_full.index(stage)
                    mbarrier.expect(full, g_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    tma.async_copy_global_to_shared(delta_desc, [statistic], full, delta_s.index(stage))
                    step += 1
            tile += 1


@gluon.jit
def _masked(s, keys, offset, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores, -inf for keys beyond the first `keys` and outside the window. Most tiles have nothing to mask.

    `offset` is the position of the first key less that of the first query.
    """
    partial = keys < 64
    if RIGHT:
        partial |= offset + 63 > right
    if LEFT:
        partial |= offset - 63 < -left
    if partial:
        row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)), 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES)), 0)
        seen = (row < keys) & (column >= 0)
        if RIGHT:
            seen &= row + (offset - right) <= column
        if LEFT:
            seen &= row + (offset + left) >= column
        s = gl.where(seen, s, -float("inf"))
    return s


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """x.to(dtype), two neighbours to a register at once: every later use then shares that register."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)
    else:
        y = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, True, 2)
    return y


@gluon.jit
def _through_softmax(
    s, dv, buffers, bars, step, exponent, keys, offset, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, LEFT_OPERAND: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """(ds, dv + p g): p = exp(scale s - lse), ds = p (v g^T - delta). ds also goes to shared memory, for dq."""
    _k_s, v_s, _q_s, g_s, ds_s, lse_s, delta_s = buffers
    _q_full, g_full, _stage_empty, _k_full, _v_full, _k_empty, _v_empty, ds_full, ds_empty = bars
    dtype: gl.constexpr = g_s.dtype
    stage = step % STAGES
    slot = step & 1
    g = g_s.index(stage)
    s = _masked(s, keys, offset, left, right, LEFT, RIGHT)
    lse = gl.expand_dims(lse_s.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
    p = _rounded(gl.exp2(s * exponent - lse), dtype)
    mbarrier.wait(g_full.index(stage), step // STAGES & 1)
    zeros = gl.zeros((64, 64), gl.float32, SCORES)
    dp = warpgroup_mma(v_s.index(C), g.permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_left = gl.convert_layout(p, LEFT_OPERAND)
    dv = warpgroup_mma(p_left, g, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    # Read here and not before the wait: sixteen registers that are missing elsewhere.
    delta = gl.expand_dims(delta_s.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
    ds = _rounded(p.to(gl.float32) * (dp - delta), dtype)
    mbarrier.wait(ds_empty.index(slot), (step // 2 & 1) ^ 1)
    ds_s.index(slot * 2 + C).store(ds)
    fence_async_shared()
    dv, p_left, ds = warpgroup_mma_wait(0, deps=(dv, p_left, ds))
    mbarrier.arrive(ds_full.index(slot), count=1)
    return ds, dv


@gluon.jit
def accumulate_dk_dv(
    buffers, bars, table_ptr, items, dk_ptr, dv_ptr, exponent, scale, left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The warpgroup of keys [64 C, 64 C + 64) of each key tile: their dk and dv, and ds for `finish_dq`.

    The product of ds and q shares its wait with the scores of the next query tile. No product may be in flight over
    the end of a loop's body, or the compiler serialises all of them.
    """
    k_s, _v_s, q_s, _g_s, _ds_s, _lse_s, _delta_s = buffers
    q_full, _g_full, stage_empty, k_full, v_full, k_empty, v_empty, _ds_full, _ds_empty = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile = 0
    step = 0
    k_own = k_s.index(C)
    zeros = gl.zeros((64, 64), gl.float32, SCORES)
    for turn in range(_share(program, programs, items)):
        item = _item(turn, program, programs)
        _q_start, q_length, k_start, k_length, _first_tile, head = _row(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = _query_tiles(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            keys = k_length - j * 128 - C * 64
            dk = gl.zeros((64, D), gl.float32, WIDE)
            dv = gl.zeros((64, D), gl.float32, WIDE)
            mbarrier.wait(k_full, tile & 1)
            mbarrier.wait(v_full, tile & 1)
            if high > low:
                i = low
                stage = step % STAGES
                mbarrier.wait(q_full.index(stage), step // STAGES & 1)
                s = warpgroup_mma(k_own, q_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                for _again in range(1, (high - low) * GROUP):
                    offset = j * 128 + C * 64 - i * 64
                    ds, dv = _through_softmax(
                        s, dv, buffers, bars, step, exponent, keys, offset, left, right, LEFT, RIGHT, LEFT_OPERAND, C
                    )
                    stage = step % STAGES
                    step += 1
                    after = step % STAGES
                    ds_left = gl.convert_layout(ds, LEFT_OPERAND)
                    dk = warpgroup_mma(ds_left, q_s.index(stage), dk, is_async=True)
                    mbarrier.wait(q_full.index(after), step // STAGES & 1)
                    s = warpgroup_mma(k_own, q_s.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True)
                    s, dk, ds_left = warpgroup_mma_wait(0, deps=(s, dk, ds_left))
                    mbarrier.arrive(stage_empty.index(stage), count=1)
                    i += 1
                    if i == high:
                        i = low
                offset = j * 128 + C * 64 - i * 64
                ds, dv = _through_softmax(
                    s, dv, buffers, bars, step, exponent, keys, offset, left, right, LEFT, RIGHT, LEFT_OPERAND, C
                )
                stage = step % STAGES
                step += 1
                ds_left = gl.convert_layout(ds, LEFT_OPERAND)
                dk = warpgroup_mma(ds_left, q_s.index(stage), dk, is_async=True)
                dk, ds_left = warpgroup_mma_wait(0, deps=(dk, ds_left))
                mbarrier.arrive(stage_empty.index(stage), count=1)
            mbarrier.arrive(k_empty, count=1)
            mbarrier.arrive(v_empty, count=1)
            row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE)), 1)
            column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, WIDE)), 0)
            position = (k_start + j * 128 + C * 64).to(gl.int64) * (HEADS * D) + head * D
            place = row * (HEADS * D) + column
            kept = (row < keys) & (column >= 0)
            gl.store(dk_ptr + position + place, (dk * scale).to(dtype), mask=kept)
            gl.store(dv_ptr + position + place, dv.to(dtype), mask=kept)
            tile += 1


@gluon.jit
def _get_dq(place, first):
    """dq [64, 64] that earlier key tiles left at `place` (see `_put_dq`); zeros for the first."""
    flat = gl.zeros((64, 64), gl.float32, SCORES)
    flat = flat.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * 64])
    FLAT: gl.constexpr = flat.type.layout
    cell = gl.arange(0, 64 * 64, layout=FLAT)
    flat = gl.load(place + cell, mask=(cell >= 0) & (first == 0), other=0.0, cache_modifier=".cg")
    dq = flat.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64])
    return gl.convert_layout(dq, SCORES)


@gluon.jit
def _put_dq(dq, place, dq_ptr, position, rows, scale, last, STRIDE: gl.constexpr):
    """The sum so far of dq [64, 64]: to the scratch, or after the last key tile to dq_ptr + position."""
    if last:
        row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)), 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES)), 0)
        out = dq_ptr + position + (row * STRIDE + column)
        gl.store(out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(row < rows) & (column >= 0))
    else:
        # The order within the scratch is free: the four registers of a thread that hold two columns of two rows, eight
        # apart, become neighbours there. No data moves for it, and the accesses are 16 bytes wide.
        flat = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * 64])
        FLAT: gl.constexpr = flat.type.layout
        gl.store(place + gl.arange(0, 64 * 64, layout=FLAT), flat, cache_modifier=".cg")


@gluon.jit
def finish_dq(
    buffers, bars, table_ptr, items, scratch_ptr, slot, dq_ptr, scale, left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The warpgroup of dq, 64 columns at a time, from the ds that the two others leave in shared memory.

    Every element of the scratch belongs to one thread, whose own loads and stores stay in order: no fence is needed.
    """
    k_s, _v_s, _q_s, _g_s, ds_s, _lse_s, _delta_s = buffers
    _q_full, _g_full, _stage_empty, k_full, _v_full, k_empty, _v_empty, ds_full, ds_empty = bars
    D: gl.constexpr = k_s.shape[2]
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile = 0
    step = 0
    scratch = scratch_ptr + program.to(gl.int64) * slot
    for turn in range(_share(program, programs, items)):
        item = _item(turn, program, programs)
        q_start, q_length, _k_start, k_length, _first_tile, head = _row(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = _query_tiles(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            mbarrier.wait(k_full, tile & 1)
            for member in range(GROUP):
                for i in range(low, high):
                    first, last = _key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                    position = (q_start + i * 64).to(gl.int64) * (HEADS * GROUP * D) + (head * GROUP + member) * D
                    place = scratch + (member * query_tiles + i).to(gl.int64) * (64 * D)
                    buffer = step & 1
                    for part in gl.static_range(D // 64):
                        # Under way while this warpgroup waits for ds; the product then adds to it.
                        dq = _get_dq(place + part * (64 * 64), j == first)
                        if part == 0:
                            mbarrier.wait(ds_full.index(buffer), step // 2 & 1)
                        for c in gl.static_range(2):
                            ds = ds_s.index(buffer * 2 + c).permute((1, 0))
                            dq = warpgroup_mma(ds, k_s.index(c).slice(part * 64, 64, dim=1), dq, is_async=True)
                        dq = warpgroup_mma_wait(0, deps=(dq,))
                        if part == D // 64 - 1:
                            mbarrier.arrive(ds_empty.index(buffer), count=1)
                        _put_dq(
                            dq, place + part * (64 * 64), dq_ptr, position + part * 64, q_length - i * 64, scale,
                            j == last, HEADS * GROUP * D,
                        )  # fmt: skip
                    step += 1
            mbarrier.arrive(k_empty, count=1)
            tile += 1
