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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gdpa.gluon_activations import kind_of, rounded
from kernels.gdpa.gluon_backward_activations import rounded_product, unscaled_factors, unscaled_value_and_slope
from kernels.jagged.gluon_backward_consumer import SCORES, cells, load_dq, store_rows
from kernels.jagged.gluon_backward_steps import STAGES, key_tiles_of, query_tiles_of, turns_of

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ENTRY = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def _ask_for_item(table_ptr, turn, num_items, buffer, HEADS: gl.constexpr):
    """Start to copy the table's entry of the item of a turn, of the last item after that, to shared memory.

    A load into registers would be waited for at once, because the compiler keeps such values as uniform ones.
    """
    item = gl.minimum(turn * gl.num_programs(0) + gl.program_id(0), num_items - 1)
    entry = table_ptr + (1 + item // HEADS).to(gl.int64) * 8
    async_copy.async_copy_global_to_shared(buffer, entry + gl.arange(0, 8, LINE))
    async_copy.commit_group()


@gluon.jit
def _field(entry, index: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, ENTRY) == index, entry, 0), 0)


@gluon.jit
def _asked_item(turn, num_items, buffer, HEADS: gl.constexpr):
    """What `tile_of` of `kernels.jagged.gluon_backward_steps` returns, from the entry that was asked for."""
    async_copy.wait_group(0)
    entry = buffer.load(ENTRY)
    item = gl.minimum(turn * gl.num_programs(0) + gl.program_id(0), num_items - 1)
    return (
        _field(entry, 0), _field(entry, 1), _field(entry, 2), _field(entry, 3), _field(entry, 4), _field(entry, 5),
        item % HEADS,
    )  # fmt: skip


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
        # Nothing of what follows can be computed before the branch, where all tiles would pay for it.
        keys = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [keys], gl.int32, False, 1)
        queries = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [queries], gl.int32, False, 1)
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
def _put_dq(dq, earlier, place, pointer, rows, scale, first, last, STRIDE: gl.constexpr):
    """dq of one key tile to the scratch, or with the last key tile, and what `earlier` ones left, to `pointer`.

    The caller sees to it that the key tiles of a row take turns, in their order.
    """
    if last:
        LAYOUT: gl.constexpr = dq.type.layout
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.expand_dims(gl.arange(0, dq.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
        x = ((dq + earlier) * scale).to(pointer.dtype.element_ty)
        gl.store(gl.expand_dims(pointer + row * STRIDE, 1) + column, x, mask=gl.expand_dims(row < rows, 1))
    else:
        flat = cells(dq)
        cell = gl.arange(0, 64 * dq.shape[1], layout=flat.type.layout)
        if first:
            gl.store(place + cell, flat, cache_modifier=".cg")
        else:
            gl.atomic_add(place + cell, flat, sem="relaxed")


@gluon.jit
def _store_tile(x, buffer, desc, row, column, pointer, rows, STRIDE: gl.constexpr):
    """The first `rows` rows of x [64, d] to the tensor of `desc` and `pointer`, through `buffer`.

    A whole block goes by TMA, which nothing waits for before `buffer` is used again; a longer one than `rows` would
    write over the next row.
    """
    buffer.store(x.to(buffer.dtype))
    if rows >= 64:
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row, column], buffer)
    else:
        LANES: gl.constexpr = buffer.shape[1] // 8
        y = buffer.load(gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0]))
        store_rows(y, pointer + row.to(gl.int64) * STRIDE + column, rows, STRIDE)
        fence_async_shared()


@gluon.jit
def differentiate(
    dk_desc, dv_desc, buffers, bars, table_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale,
    out_scale, left, right, KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup C of the two: dk and dv of its keys, and its columns of dq."""
    k_s, v_s, q_s, g_s, ds_s, item_s = buffers
    q_full, g_full, q_empty, g_empty, kv_full, kv_empty, ds_full, ds_empty, dq_turn, done = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    HALF: gl.constexpr = D // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    num_items = gl.load(table_ptr) * HEADS
    scratch = scratch_ptr + C * (64 * HALF)
    value_factor, slope_factor = unscaled_factors(score_scale, KINDS, dtype)
    dv_scale = value_factor * out_scale
    scale = slope_factor * score_scale * out_scale
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
    _ask_for_item(table_ptr, 0, num_items, item_s.index(2 * C), HEADS)
    for turn in range(turns_of(num_items)):
        q_start, q_length, k_start, k_length, first_tile, j, head = _asked_item(
            turn, num_items, item_s.index(2 * C + turn % 2), HEADS
        )
        _ask_for_item(table_ptr, turn + 1, num_items, item_s.index(2 * C + (turn + 1) % 2), HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
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
            kind = kind_of(head * GROUP + member, HEAD_KINDS)
            y, slope = unscaled_value_and_slope(s, score_scale, kind, KINDS, dtype)
            # Rounded too, because that halves its registers: there is not one to spare.
            slope = rounded(slope, dtype)
            p_left = gl.convert_layout(rounded(y, dtype), LEFT_OPERAND)
            dv = warpgroup_mma(p_left, g, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            dp = _existing(dp, keys, queries, offset, left, right, LEFT, RIGHT)
            ds = rounded_product(slope, dp, dtype)
            mbarrier.wait(ds_empty.index(buffer), (step // 2 & 1) ^ 1)
            ds_s.index(buffer * 2 + C).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buffer), count=1)

            old = buffer ^ 1
            mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
            # Not what the products start from: it may take as long as they do.
            earlier = load_dq(place, last and not first, HALF)
            dq = gl.zeros((64, HALF), gl.float32, NARROW)
            mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
            # The products with p are done by now, and its registers are needed.
            dv, p_left = warpgroup_mma_wait(0, deps=(dv, p_left))
            mbarrier.arrive(g_empty.index(stage), count=1)
            for c in gl.static_range(2):
                k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
                dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
            ds_left = gl.convert_layout(ds, LEFT_OPERAND)
            dk = warpgroup_mma(ds_left, q_s.index(stage), dk, is_async=True)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            _put_dq(dq, earlier, place, out, rows, scale, first, last, HEADS * GROUP * D)
            mbarrier.arrive(ds_empty.index(old), count=1, pred=step > 0)
            if left_tile:  # dk of the tile before has left from the place of its values
                tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(old_slot), count=1, pred=left_tile)

            left_tile = n == steps - 1
            if left_tile:  # the values of this tile have had their last use
                _store_tile(dv * dv_scale, v_s.index(kv * 2 + C), dv_desc, k_start + j * 128 + C * 64, head * D,
                           dv_ptr, keys, HEADS * D)  # fmt: skip
            step += 1
            after = step % STAGES
            new_tile = tile - 1 + left_tile.to(gl.int32)
            mbarrier.wait(q_full.index(after), step // STAGES & 1)
            mbarrier.wait(kv_full.index(new_tile & 1), new_tile // 2 & 1)
            s = warpgroup_mma(
                k_s.index((new_tile & 1) * 2 + C), q_s.index(after).permute((1, 0)), zeros, use_acc=False,
                is_async=True,
            )  # fmt: skip
            first_key_tile, last_key_tile = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
            first = j == first_key_tile
            last = j == last_key_tile
            place = scratch + ((head * GROUP + member) * tiles_stride + first_tile + i).to(gl.int64) * (64 * D)
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
            mbarrier.arrive(q_empty.index(stage), count=1)
        position = (k_start + j * 128 + C * 64).to(gl.int64) * (HEADS * D) + head * D
        if steps > 0:
            tma.store_wait(0)
            _store_tile(dk * scale, v_s.index(kv * 2 + C), dk_desc, k_start + j * 128 + C * 64, head * D, dk_ptr, keys,
                       HEADS * D)  # fmt: skip
        else:
            nothing = gl.zeros((64, D), gl.float32, gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
            store_rows(nothing, dk_ptr + position, keys, HEADS * D)
            store_rows(nothing, dv_ptr + position, keys, HEADS * D)
    async_copy.wait_group(0)
    # dq of the last step.
    old = (step & 1) ^ 1
    mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
    earlier = load_dq(place, last and not first, HALF)
    dq = gl.zeros((64, HALF), gl.float32, NARROW)
    mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
    for c in gl.static_range(2):
        k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _put_dq(dq, earlier, place, out, rows, scale, first, last, HEADS * GROUP * D)
    mbarrier.arrive(done, count=1)
    tma.store_wait(0)
