"""The computing warpgroups of the Hopper backward of GDPA; `gluon_backward` has the whole.

Names: q, k, v and g (the gradient of the output) are tiles in shared memory, s the scores, p the activations, ds the
gradient of the scores; products are taken on the transposed scores, [64 keys, 64 queries], so that p and ds are left
operands in registers for dv and dk. Warpgroup C owns keys [64 C, 64 C + 64) of each tile of 128, and columns
[C d / 2, (C + 1) d / 2) of dq. As in `kernels.jagged.gluon_backward_consumer` dq, which takes the ds of both
warpgroups, is made one step late, and the scores of a step at the end of the one before, over the borders of key tiles
and rows.

Registers decide the speed: 128 of a thread's 240 are sums of dk and dv, and at most three more blocks of 32 are alive
at a time. Local memory is no place for the rest, because shared memory leaves too little of the first cache: a value
that is spilled takes as long to come back as one from memory. So there is one loop over steps, whose numbers are read
from shared memory where they are used, see `gluon_backward_items`.

Nothing of a row is summed, so a step needs its own tiles alone. But the slope of an activation at 0 is not 0: pairs
that do not exist are masked in the scores, for p, and again in dp, for ds.
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

from kernels.gdpa.gluon_activations import kind_of, rounded
from kernels.gdpa.gluon_backward_activations import rounded_product, unscaled_factors, unscaled_value_and_slope
from kernels.gdpa.gluon_backward_items import (
    FIRST,
    HEAD,
    KEY,
    KEYS_LEFT,
    KIND,
    LAST,
    LEAVES,
    OFFSET,
    QUERIES_LEFT,
    QUERY,
    SCRATCH_TILE,
    STARTS,
    STOP,
    field,
    read_control,
)
from kernels.jagged.gluon_backward_consumer import SCORES, cells, load_dq, store_rows
from kernels.jagged.gluon_backward_steps import STAGES


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
def _put_dq(dq, place, pointer, rows, scale, first, last, STRIDE: gl.constexpr):
    """dq of one key tile to the scratch, or with the last key tile the sum of all to `pointer`.

    The caller sees to it that the key tiles of a row take turns, in their order.
    """
    if last:
        LAYOUT: gl.constexpr = dq.type.layout
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        # Not known before, or it and what follows from it would be computed once and spilled.
        row += gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [rows], gl.int32, False, 1)
        column = gl.expand_dims(gl.arange(0, dq.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
        x = (dq * scale).to(pointer.dtype.element_ty)
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
def _place_of(control, scratch_ptr, D: gl.constexpr, C: gl.constexpr):
    return scratch_ptr + (field(control, SCRATCH_TILE).to(gl.int64) * (64 * D) + C * (32 * D))


@gluon.jit
def _begin_dq(controls, step, scratch_ptr, D: gl.constexpr, C: gl.constexpr):
    """What earlier key tiles left of columns C of dq of a step, if it is the last to add to them, or zeros."""
    control = read_control(controls, step)
    wanted = (field(control, KIND) & (FIRST | LAST) == LAST) & (step >= 0)
    return load_dq(_place_of(control, scratch_ptr, D, C), wanted, D // 2)


@gluon.jit
def _end_dq(
    dq, controls, step, scratch_ptr, dq_ptr, scale, D: gl.constexpr, HEADS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Columns C of dq of a step to where they belong; there is nothing before the first step."""
    control = read_control(controls, step)
    kind = field(control, KIND)
    rows = gl.where(step < 0, 0, field(control, QUERIES_LEFT))
    out = dq_ptr + (field(control, QUERY).to(gl.int64) * (HEADS * D) + (field(control, HEAD) * D + C * (D // 2)))
    first = kind & FIRST != 0
    last = (kind & LAST != 0) | (step < 0)
    _put_dq(dq, _place_of(control, scratch_ptr, D, C), out, rows, scale, first, last, HEADS * D)


@gluon.jit
def differentiate(
    dk_desc, dv_desc, buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, OWNED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup C of the two: dk and dv of its keys, and its columns of dq."""
    k_s, v_s, q_s, g_s, ds_s, controls = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, ds_full, ds_empty, dq_turn, done = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    HALF: gl.constexpr = D // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    value_factor, slope_factor = unscaled_factors(score_scale, KINDS, dtype)
    dv_scale = value_factor * out_scale
    scale = slope_factor * score_scale * out_scale
    zeros = gl.zeros((64, 64), gl.float32, SCORES)
    dk = gl.zeros((64, D), gl.float32, WIDE)
    dv = gl.zeros((64, D), gl.float32, WIDE)
    tile = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(kv_full.index(0), 0)
    s = warpgroup_mma(k_s.index(C), q_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    more = field(read_control(controls, 0), KIND) & STOP == 0
    while more:
        stage = step % STAGES
        buffer = step & 1
        old = buffer ^ 1
        control = read_control(controls, step)
        kind = field(control, KIND)
        starts = kind & STARTS != 0
        leaves = kind & LEAVES != 0
        g = g_s.index(stage)
        kv = tile & 1
        keys = field(control, KEYS_LEFT) - C * 64
        queries = field(control, QUERIES_LEFT)
        offset = field(control, OFFSET) + C * 64
        mbarrier.wait(g_full.index(stage), step // STAGES & 1)
        dp = warpgroup_mma(v_s.index(kv * 2 + C), g.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = _existing(s, keys, queries, offset, left, right, LEFT, RIGHT)
        y, slope = unscaled_value_and_slope(s, score_scale, kind_of(field(control, HEAD), HEAD_KINDS), KINDS, dtype)
        # Rounded too, because that halves its registers: there is not one to spare.
        slope = rounded(slope, dtype)
        p_left = gl.convert_layout(rounded(y, dtype), LEFT_OPERAND)
        dv = warpgroup_mma(p_left, g, dv, use_acc=kind & STARTS == 0, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        dp = _existing(dp, keys, queries, offset, left, right, LEFT, RIGHT)
        ds = rounded_product(slope, dp, dtype)
        if not OWNED:
            mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
        dq = _begin_dq(controls, step - 1, scratch_ptr, D, C)
        mbarrier.wait(ds_empty.index(buffer), (step // 2 & 1) ^ 1)
        ds_s.index(buffer * 2 + C).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buffer), count=1)

        old_slot = (tile - starts.to(gl.int32)) & 1
        ds_left = gl.convert_layout(ds, LEFT_OPERAND)
        dk = warpgroup_mma(ds_left, q_s.index(stage), dk, use_acc=kind & STARTS == 0, is_async=True)
        mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
        for c in gl.static_range(2):
            k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
            dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
        dv, dk, p_left, ds_left = warpgroup_mma_wait(2, deps=(dv, dk, p_left, ds_left))
        if OWNED:
            mbarrier.arrive(stage_empty.index(stage), count=1)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if OWNED:
            mbarrier.arrive(ds_empty.index(old), count=1, pred=step > 0)
        if starts and step > 0:  # dk of the tile before has left from the place of its values
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(old_slot), count=1)
        tile += leaves.to(gl.int32)
        after = (step + 1) % STAGES
        mbarrier.wait(q_full.index(after), (step + 1) // STAGES & 1)
        mbarrier.wait(kv_full.index(tile & 1), tile // 2 & 1)
        s = warpgroup_mma(
            k_s.index((tile & 1) * 2 + C), q_s.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        _end_dq(dq, controls, step - 1, scratch_ptr, dq_ptr, scale, D, HEADS * GROUP, C)
        if not OWNED:  # the loader takes it for a sign that dq has been added to
            mbarrier.arrive(ds_empty.index(old), count=1, pred=step > 0)
            mbarrier.arrive(stage_empty.index(stage), count=1)
        if leaves:  # the values of this tile have had their last use
            key = field(read_control(controls, step), KEY) + C * 64
            column = field(read_control(controls, step), HEAD) // GROUP * D
            _store_tile(dv * dv_scale, v_s.index(kv * 2 + C), dv_desc, key, column, dv_ptr, keys, HEADS * D)
            tma.store_wait(0)
            _store_tile(dk * scale, v_s.index(kv * 2 + C), dk_desc, key, column, dk_ptr, keys, HEADS * D)
        s = warpgroup_mma_wait(0, deps=(s,))
        step += 1
        more = field(read_control(controls, step), KIND) & STOP == 0
    # dq of the last step.
    old = (step & 1) ^ 1
    old_slot = (tile - 1) & 1
    if not OWNED:
        mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
    dq = _begin_dq(controls, step - 1, scratch_ptr, D, C)
    mbarrier.wait(ds_full.index(old), (step - 1) // 2 & 1, pred=step > 0)
    for c in gl.static_range(2):
        k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _end_dq(dq, controls, step - 1, scratch_ptr, dq_ptr, scale, D, HEADS * GROUP, C)
    mbarrier.arrive(done, count=1)
    tma.store_wait(0)
