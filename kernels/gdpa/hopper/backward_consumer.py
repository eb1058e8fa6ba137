"""The computing warpgroups of the Hopper backward of GDPA; `hopper.backward` has the whole.

Names: q, k, v and g (the gradient of the output) are tiles in shared memory, s the scores, p the activations, ds the
gradient of the scores; products are taken on the transposed scores, [64 keys, 64 queries], so that p and ds are left
operands in registers for dv and dk. Warpgroup C owns keys [64 C, 64 C + 64) of each tile of 128, and columns
[C d / 2, (C + 1) d / 2) of dq. As in `kernels.attention.hopper.backward_consumer` dq, which takes the ds of both
warpgroups, is computed one step late, and the scores of a step at the end of the step before, across key tiles and
rows.

Registers decide the speed: 128 of a thread's 232 are sums of dk and dv, and at most three more blocks of 32 are alive
at a time. Nothing may spill, because shared memory leaves too little of the L1 cache: loading a spilled value takes as
long as loading from memory. So there is one loop over steps, whose parameters are read from shared memory where they
are used, see `hopper.backward_loader`. And dp is issued after the activations: in flight before, it would leave them so
few registers that they would be computed one after the other, each waiting for its tanh.

dk and dv are stored from registers: the buffer of the tile's values holds sums of dq by then. Gradients are stored so
that L2 evicts them first: they are not read soon, unlike queries, their gradients and sums of dq.

Nothing is summed over a row, so a step needs only its own tiles. But the slope of an activation at 0 is not 0: pairs
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

from kernels.attention.hopper.backward_consumer import SCORES, cells
from kernels.attention.hopper.backward_loader import STAGES
from kernels.gdpa.hopper.activations import kind_of, rounded
from kernels.gdpa.hopper.backward_activations import rounded_product, unscaled_factors, unscaled_value_and_slope
from kernels.gdpa.hopper.backward_loader import (
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
    sums_in,
)


@gluon.jit
def _existing(x, keys, queries, offset, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """x, 0 beyond the first `keys` rows and `queries` columns and outside the window. Most tiles have nothing to mask.

    `offset` is the position of the first key minus that of the first query.
    """
    partial = (keys < 64) | (queries < 64)
    if RIGHT:
        partial |= offset + 63 > right
    if LEFT:
        partial |= offset - 63 < -left
    if partial:
        # Prevents the compiler from computing what follows before the branch, where all tiles would pay for it.
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


QUADS = 2


def _turn_quads() -> str:
    """PTX that transposes QUADS times four words within a quad of threads: word i of thread j becomes word j of thread
    i.
    """
    groups = range(QUADS)
    lines = [
        ".reg .b32 lane; .reg .pred p, q;",
        *(f".reg .b32 a{n}, b{n}, c{n}, d{n}, x{n}, y{n};" for n in groups),
        "mov.u32 lane, %laneid; and.b32 x0, lane, 1; setp.ne.b32 p, x0, 0; and.b32 x0, lane, 2; setp.ne.b32 q, x0, 0;",
    ]
    for n in groups:
        w = [f"${4 * QUADS + 4 * n + i}" for i in range(4)]
        lines.append(f"selp.b32 x{n}, {w[0]}, {w[1]}, p; selp.b32 y{n}, {w[2]}, {w[3]}, p;")
        lines.append(f"shfl.sync.bfly.b32 x{n}, x{n}, 1, 0x1f, -1; shfl.sync.bfly.b32 y{n}, y{n}, 1, 0x1f, -1;")
    for n in groups:
        w = [f"${4 * QUADS + 4 * n + i}" for i in range(4)]
        lines.append(f"selp.b32 a{n}, x{n}, {w[0]}, p; selp.b32 b{n}, {w[1]}, x{n}, p;")
        lines.append(f"selp.b32 c{n}, y{n}, {w[2]}, p; selp.b32 d{n}, {w[3]}, y{n}, p;")
        lines.append(f"selp.b32 x{n}, a{n}, c{n}, q; selp.b32 y{n}, b{n}, d{n}, q;")
        lines.append(f"shfl.sync.bfly.b32 x{n}, x{n}, 2, 0x1f, -1; shfl.sync.bfly.b32 y{n}, y{n}, 2, 0x1f, -1;")
    for n in groups:
        w = [f"${4 * n + i}" for i in range(4)]
        lines.append(f"selp.b32 {w[0]}, x{n}, a{n}, q; selp.b32 {w[1]}, y{n}, b{n}, q;")
        lines.append(f"selp.b32 {w[2]}, c{n}, x{n}, q; selp.b32 {w[3]}, d{n}, y{n}, q;")
    return "{" + " ".join(lines) + "}"


_TURN_QUADS = gl.constexpr(_turn_quads())
_TURNED = gl.constexpr(",".join(["=r"] * 4 * QUADS + ["r"] * 4 * QUADS))
_TURNED_WORDS = gl.constexpr(4 * QUADS)


@gluon.constexpr_function
def _fours(words):
    """Layout of an accumulator [64, words] of words in which those four apart are neighbours in a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], *([0, 16 << i] for i in range((words // 32).bit_length())), [8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, words],
    )


@gluon.jit
def _store_rows(x, pointer, rows, STRIDE: gl.constexpr):
    """The first `rows` rows of x [64, columns], an accumulator, to rows STRIDE elements apart, 16 bytes a thread."""
    WORDS: gl.constexpr = x.shape[1] // 2
    TYPE: gl.constexpr = "bf16" if pointer.dtype.element_ty == gl.bfloat16 else "f16"
    even, odd = x.reshape([64, WORDS, 2]).split()
    words = gl.inline_asm_elementwise(f"cvt.rn.{TYPE}x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    words = gl.convert_layout(words, _fours(WORDS))
    words = gl.inline_asm_elementwise(_TURN_QUADS, _TURNED, [words], gl.int32, False, _TURNED_WORDS)
    words = words.reshape([64, WORDS // 16, 4, 4]).permute((0, 1, 3, 2)).reshape([64, WORDS])
    LAYOUT: gl.constexpr = words.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    # Unknown to the compiler before: otherwise it, and what depends on it, would be computed once and spilled.
    row += gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [rows], gl.int32, False, 1)
    column = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    pointer = pointer.to(gl.pointer_type(gl.int32), bitcast=True)
    target = gl.expand_dims(pointer + row * (STRIDE // 2), 1) + column
    gl.store(target, words, mask=gl.expand_dims(row < rows, 1), cache_modifier=".cs")


@gluon.jit
def _store_to_stay(place, flat):
    """Store flat to `place`, to be evicted from L2 last."""
    FOURS: gl.constexpr = flat.shape[0] // 4
    even, odd = flat.reshape([FOURS, 2, 2]).split()
    a, c = even.split()
    b, d = odd.split()
    four = gl.arange(0, FOURS, layout=a.type.layout)
    gl.inline_asm_elementwise(
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0; "
        "st.global.L2::cache_hint.v4.f32 [$1], {$2, $3, $4, $5}, p; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f", [place.to(gl.int64) + four.to(gl.int64) * 16, a, b, c, d], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def _put_dq(dq, place, pointer, rows, scale, first, last, STRIDE: gl.constexpr, PAIRS: gl.constexpr):
    """Write dq of one key tile to the scratch, or with the last key tile the sum of all to `pointer`.

    If no row has more than two key tiles (PAIRS), the second one comes so soon that L2 can be asked to keep what is
    stored until then.

    The caller must ensure that the key tiles of a row take turns, in their order.
    """
    if last:
        _store_rows(dq * scale, pointer, rows, STRIDE)
    elif PAIRS:
        _store_to_stay(place, cells(dq))
    else:
        flat = cells(dq)
        cell = gl.arange(0, 64 * dq.shape[1], layout=flat.type.layout)
        if first:
            gl.store(place + cell, flat, cache_modifier=".cg")
        else:
            gl.atomic_add(place + cell, flat, sem="relaxed")


@gluon.jit
def _place_of(control, scratch_ptr, D: gl.constexpr, C: gl.constexpr):
    return scratch_ptr + (field(control, SCRATCH_TILE).to(gl.int64) * (64 * D) + C * (32 * D))


@gluon.jit
def _row_of(pointer, control, C: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Where warpgroup C's rows of dk or dv of a step's key tile are."""
    key = field(control, KEY) + C * 64
    return pointer + (key.to(gl.int64) * (HEADS * D) + field(control, HEAD) // GROUP * D)


@gluon.jit
def _begin_dq(controls, step, dq_turn, v_s, slot, D: gl.constexpr, UNEVEN: gl.constexpr, C: gl.constexpr):
    """The sum of earlier key tiles in columns C of dq of a step, if this tile is the last to add to them, or zeros.

    It is in buffer `slot` of the values.
    """
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16])
    dq = gl.zeros((64, D // 2), gl.float32, HALF)
    if (field(read_control(controls, step), KIND) & (FIRST | LAST) == LAST) & (step >= 0):
        if UNEVEN:
            mbarrier.wait(dq_turn.index(step & 1), step // 2 & 1)
        lines = cells(dq).reshape([D, 32])
        lines = sums_in(v_s, slot, C).load(lines.type.layout)
        sums = lines.reshape([D // 16, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, D // 2])
        dq = gl.convert_layout(sums, HALF)
    return dq


@gluon.jit
def _end_dq(
    dq, controls, step, dq_turn, scratch_ptr, dq_ptr, scale, D: gl.constexpr, HEADS: gl.constexpr, PAIRS: gl.constexpr,
    UNEVEN: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write columns C of dq of a step to where they belong; nothing for the step before the first."""
    control = read_control(controls, step)
    kind = field(control, KIND)
    rows = gl.where(step < 0, 0, field(control, QUERIES_LEFT))
    out = dq_ptr + (field(control, QUERY).to(gl.int64) * (HEADS * D) + (field(control, HEAD) * D + C * (D // 2)))
    first = kind & FIRST != 0
    last = (kind & LAST != 0) | (step < 0)
    if UNEVEN:  # tiles that start from a sum have had their turn
        mbarrier.wait(dq_turn.index(step & 1), step // 2 & 1, pred=(step >= 0) & (kind & (FIRST | LAST) != LAST))
    _put_dq(dq, _place_of(control, scratch_ptr, D, C), out, rows, scale, first, last, HEADS * D, PAIRS)


@gluon.jit
def _multiply_dq(dq, ds_s, k_s, buffer, slot, C: gl.constexpr):
    """Columns C of dq plus the product, in flight, of what both warpgroups left in `buffer` and the keys in `slot`."""
    HALF: gl.constexpr = k_s.shape[2] // 2
    for c in gl.static_range(2):
        k_half = k_s.index(slot * 2 + c).slice(C * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_s.index(buffer * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
    return dq


@gluon.jit
def differentiate(
    buffers, bars, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAIRS: gl.constexpr, UNEVEN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup C of the two: dk and dv of its keys, and its columns of dq.

    If rows are UNEVEN, the second warpgroup computes only dq in a tile of at most 64 keys, and key tiles except the
    last wait for their turn only when they add to dq. Both cost a little where all rows are long.
    """
    k_s, v_s, q_s, g_s, ds_s, controls = buffers
    q_full, g_full, stage_empty, step_done, k_full, k_empty, ds_full, dq_turn = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
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
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(k_s.index(C), q_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    control = read_control(controls, 0)
    more = field(control, KIND) & STOP == 0
    while more:
        stage = step % STAGES
        buffer = step & 1
        old = buffer ^ 1
        kind = field(control, KIND)
        starts = kind & STARTS != 0
        leaves = kind & LEAVES != 0
        g = g_s.index(stage)
        kv = tile & 1
        keys = field(control, KEYS_LEFT) - C * 64
        if UNEVEN and C == 1:
            idle = keys <= 0
        else:
            idle: gl.constexpr = False
        if idle:  # the row has no key here
            old_slot = (tile - starts.to(gl.int32)) & 1
            mbarrier.wait(g_full.index(stage), step // STAGES & 1)
            dq = _begin_dq(controls, step - 1, dq_turn, v_s, kv ^ 1, D, UNEVEN, C)
            mbarrier.wait(step_done.index(old), (step - 1) // 2 & 1, pred=step > 0)
            ds_s.index(buffer * 2 + C).store(gl.zeros((64, 64), dtype, SCORES))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buffer), count=1)
            dq = warpgroup_mma_wait(0, deps=(_multiply_dq(dq, ds_s, k_s, old, old_slot, C),))
            mbarrier.arrive(stage_empty.index(stage), count=1)
            mbarrier.arrive(k_empty.index(old_slot), count=1, pred=starts & (step > 0))
            tile += leaves.to(gl.int32)
            after = (step + 1) % STAGES
            mbarrier.wait(q_full.index(after), (step + 1) // STAGES & 1)
            mbarrier.wait(k_full.index(tile & 1), tile // 2 & 1)
            s = warpgroup_mma(
                k_s.index((tile & 1) * 2 + C), q_s.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            _end_dq(dq, controls, step - 1, dq_turn, scratch_ptr, dq_ptr, scale, D, HEADS * GROUP, PAIRS, UNEVEN, C)
            mbarrier.arrive(step_done.index(buffer), count=1)
            s = warpgroup_mma_wait(0, deps=(s,))
        else:
            queries = field(control, QUERIES_LEFT)
            offset = field(control, OFFSET) + C * 64
            s = _existing(s, keys, queries, offset, left, right, LEFT, RIGHT)
            y, slope = unscaled_value_and_slope(s, score_scale, kind_of(field(control, HEAD), HEAD_KINDS), KINDS, dtype)
            # Rounded, too, which halves its registers: none are left.
            slope = rounded(slope, dtype)
            p_left = gl.convert_layout(rounded(y, dtype), LEFT_OPERAND)
            mbarrier.wait(g_full.index(stage), step // STAGES & 1)
            dp = warpgroup_mma(v_s.index(kv * 2 + C), g.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv = warpgroup_mma(p_left, g, dv, use_acc=kind & STARTS == 0, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            dp = _existing(dp, keys, queries, offset, left, right, LEFT, RIGHT)
            ds = rounded_product(slope, dp, dtype)
            if not UNEVEN:
                mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
            dq = _begin_dq(controls, step - 1, dq_turn, v_s, kv ^ 1, D, UNEVEN, C)
            mbarrier.wait(step_done.index(old), (step - 1) // 2 & 1, pred=step > 0)
            ds_s.index(buffer * 2 + C).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buffer), count=1)
            old_slot = (tile - starts.to(gl.int32)) & 1
            ds_left = gl.convert_layout(ds, LEFT_OPERAND)
            dk = warpgroup_mma(ds_left, q_s.index(stage), dk, use_acc=kind & STARTS == 0, is_async=True)
            dq = _multiply_dq(dq, ds_s, k_s, old, old_slot, C)
            dv, dk, p_left, ds_left = warpgroup_mma_wait(2, deps=(dv, dk, p_left, ds_left))
            # This was the last use of the step's queries and gradients.
            mbarrier.arrive(stage_empty.index(stage), count=1)
            if starts & leaves:  # the next keys, which s waits for, go to the buffer of the keys before this tile's
                warpgroup_mma_wait(0, deps=(dk,))
                mbarrier.arrive(k_empty.index(old_slot), count=1, pred=step > 0)
            tile += leaves.to(gl.int32)
            after = (step + 1) % STAGES
            mbarrier.wait(q_full.index(after), (step + 1) // STAGES & 1)
            mbarrier.wait(k_full.index(tile & 1), tile // 2 & 1)
            s = warpgroup_mma(
                k_s.index((tile & 1) * 2 + C), q_s.index(after).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            dq = warpgroup_mma_wait(1, deps=(dq,))
            if starts & (leaves == 0) & (step > 0):
                mbarrier.arrive(k_empty.index(old_slot), count=1)
            _end_dq(dq, controls, step - 1, dq_turn, scratch_ptr, dq_ptr, scale, D, HEADS * GROUP, PAIRS, UNEVEN, C)
            mbarrier.arrive(step_done.index(buffer), count=1)
            if leaves:
                _store_rows(
                    dv * dv_scale, _row_of(dv_ptr, read_control(controls, step), C, HEADS, GROUP, D), keys, HEADS * D
                )
                _store_rows(
                    dk * scale, _row_of(dk_ptr, read_control(controls, step), C, HEADS, GROUP, D), keys, HEADS * D
                )
            if UNEVEN:  # with a product in flight where the branches join, ptxas would serialise all products
                s = warpgroup_mma_wait(0, deps=(s,))
        step += 1
        control = read_control(controls, step)
        more = field(control, KIND) & STOP == 0
        s = warpgroup_mma_wait(0, deps=(s,))
    # dq of the last step.
    old = (step & 1) ^ 1
    old_slot = (tile - 1) & 1
    if not UNEVEN:
        mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
    dq = _begin_dq(controls, step - 1, dq_turn, v_s, old_slot, D, UNEVEN, C)
    mbarrier.wait(step_done.index(old), (step - 1) // 2 & 1, pred=step > 0)
    dq = warpgroup_mma_wait(0, deps=(_multiply_dq(dq, ds_s, k_s, old, old_slot, C),))
    _end_dq(dq, controls, step - 1, dq_turn, scratch_ptr, dq_ptr, scale, D, HEADS * GROUP, PAIRS, UNEVEN, C)
    mbarrier.arrive(step_done.index(step & 1), count=1)
