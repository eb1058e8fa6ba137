"""The computing warpgroups of the Hopper backward of GDPA; `gluon_backward` has the whole.

Names: q, k, v and g (the gradient of the output) are tiles in shared memory, s the scores, p the activations, ds the
gradient of the scores; products are taken on the transposed scores, [64 keys, 64 queries], so that p and ds are left
operands in registers for dv and dk. Warpgroup C owns keys [64 C, 64 C + 64) of each tile of 128, and columns
[C d / 2, (C + 1) d / 2) of dq. The order of products is that of `kernels.jagged.gluon_backward_consumer`: dq, which
takes the ds of both warpgroups, one step late; the scores of a step at the end of the one before, over the borders of
key tiles and rows.

Nothing of a row is summed, so a step needs its own tiles alone. But the slope of an activation at 0 is not 0: pairs
that do not exist are masked in the scores, for p, and again in dp, for ds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gdpa.gluon_activations import kind_of, rounded, value_and_slope
from kernels.gdpa.gluon_rows import row_of
from kernels.jagged.gluon_backward_consumer import SCORES, load_dq, put_dq, store_rows, through_shared
from kernels.jagged.gluon_backward_steps import STAGES, key_tiles_of, query_tiles_of
from kernels.scheduling import dealt_position, num_rounds


@gluon.jit
def _existing(x, keys, queries, offset, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """x, 0 beyond the first `keys` rows and `queries` columns and outside the window. Most tiles have nothing to mask.

    `offset` is the position of the first key less that of the first query.
    """
    partial = (keys < 64) | (queries < 64)
    if RIGHT:
        partial |= offset + 63 > right
    if LEFT:
        partial |= offset - 63 < -left
    if partial:
        row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)), 1)
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES)), 0)
        seen = (row < keys) & (column < queries)
        if RIGHT:
            seen &= row + (offset - right) <= column
        if LEFT:
            seen &= row + (offset + left) >= column
        x = gl.where(seen, x, 0.0)
    return x


@gluon.jit
def differentiate(
    buffers, bars, table_ptr, items, scratch_ptr, slot, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup C of the two: dk and dv of its keys, and its columns of dq."""
    k_s, v_s, q_s, g_s, ds_s = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, ds_full, ds_empty = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    HALF: gl.constexpr = D // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    scratch = scratch_ptr + gl.program_id(0).to(gl.int64) * slot + C * (64 * HALF)
    scale = score_scale * out_scale
    zeros = gl.zeros((64, 64), gl.float32, SCORES)
    tile = 0
    step = 0
    # What dq of the step before needs; before the first step it has no rows to write.
    place = scratch
    out = dq_ptr
    rows = 0
    first = True
    last = True
    left_tile = False
    old_slot = 0
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(kv_full.index(0), 0)
    s = warpgroup_mma(k_s.index(C), q_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    for turn in range(num_rounds(items)):
        item = dealt_position(turn)
        q_start, q_length, k_start, k_length, _first_tile, head = row_of(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            keys = k_length - j * 128 - C * 64
            dk = gl.zeros((64, D), gl.float32, WIDE)
            dv = gl.zeros((64, D), gl.float32, WIDE)
            steps = (high - low) * GROUP
            kv = tile & 1
            tile += (steps > 0).to(gl.int32)
            i = low
            member = 0
            for n in range(steps):
                stage = step % STAGES
                buffer = step & 1
                g = g_s.index(stage)
                queries = q_length - i * 64
                offset = j * 128 + C * 64 - i * 64
                mbarrier.wait(g_full.index(stage), step // STAGES & 1)
                dp = warpgroup_mma(v_s.index(kv * 2 + C), g.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = _existing(s, keys, queries, offset, left, right, LEFT, RIGHT)
                y, slope = value_and_slope(s, score_scale, kind_of(head * GROUP + member, HEAD_KINDS), KINDS)
                # Rounded too, because that halves its registers: there is not one to spare.
                slope = rounded(slope, dtype)
                p_left = gl.convert_layout(rounded(y, dtype), LEFT_OPERAND)
                dv = warpgroup_mma(p_left, g, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                dp = _existing(dp, keys, queries, offset, left, right, LEFT, RIGHT)
                ds = rounded(slope.to(gl.float32) * dp, dtype)
                mbarrier.wait(ds_empty.index(buffer), (step // 2 & 1) ^ 1)
                ds_s.index(buffer * 2 + C).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(buffer), count=1)

                old = buffer ^ 1
                dq = load_dq(place, last and not first, HALF)
                mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
                for c in gl.static_range(2):
                    k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
                    dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
                ds_left = gl.convert_layout(ds, LEFT_OPERAND)
                dk = warpgroup_mma(ds_left, q_s.index(stage), dk, is_async=True)
                dq, p_left = warpgroup_mma_wait(1, deps=(dq, p_left))
                mbarrier.arrive(ds_empty.index(old), count=1, pred=step > 0)
                mbarrier.arrive(kv_empty.index(old_slot), count=1, pred=left_tile)
                put_dq(dq, place, out, rows, scale, first, last, HEADS * GROUP * D)

                left_tile = n == steps - 1
                step += 1
                after = step % STAGES
                new_tile = tile - 1 + left_tile.to(gl.int32)
                mbarrier.wait(q_full.index(after), step // STAGES & 1)
                mbarrier.wait(kv_full.index(new_tile & 1), new_tile // 2 & 1)
                s = warpgroup_mma(
                    k_s.index((new_tile & 1) * 2 + C), q_s.index(after).permute((1, 0)), zeros, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                first_tile, last_tile = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                first = j == first_tile
                last = j == last_tile
                place = scratch + (member * query_tiles + i).to(gl.int64) * (64 * D)
                out = dq_ptr + (
                    (q_start + i * 64).to(gl.int64) * (HEADS * GROUP * D) + (head * GROUP + member) * D + C * HALF
                )
                rows = queries
                old_slot = kv
                i += 1
                if i == high:
                    i = low
                    member += 1
                s, dk, dv, ds_left = warpgroup_mma_wait(0, deps=(s, dk, dv, ds_left))
                mbarrier.arrive(stage_empty.index(stage), count=1)
            position = (k_start + j * 128 + C * 64).to(gl.int64) * (HEADS * D) + head * D
            if steps > 0:
                # The values of this tile have had their last use.
                buffer = v_s.index(kv * 2 + C)
                store_rows(through_shared(buffer, dk * scale), dk_ptr + position, keys, HEADS * D)
                store_rows(through_shared(buffer, dv * out_scale), dv_ptr + position, keys, HEADS * D)
                fence_async_shared()
            else:
                store_rows(dk, dk_ptr + position, keys, HEADS * D)
                store_rows(dv, dv_ptr + position, keys, HEADS * D)
    # dq of the last step.
    old = (step & 1) ^ 1
    dq = load_dq(place, last and not first, HALF)
    mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
    for c in gl.static_range(2):
        k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    put_dq(dq, place, out, rows, scale, first, last, HEADS * GROUP * D)
