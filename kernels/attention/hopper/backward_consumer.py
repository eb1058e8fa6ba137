"""The computing warpgroups of the attention backward in `hopper.backward`.

Names: q, k, v and g (the gradient of the output) are tiles in shared memory, s the scores, p the probabilities; all
products are taken on the transposed scores, [64 keys, 64 queries], so that p and ds are left operands in registers for
dv and dk. Warpgroup C owns keys [64 C, 64 C + 64) of each tile of 128, and columns [C d / 2, (C + 1) d / 2) of dq.

dq takes the ds of both warpgroups. It is computed one step late, when the other's ds has long been written, so that the
two need not run in step: while one computes exponentials, the other has the tensor cores. The scores of a step are
computed at the end of the step before, across key tiles and rows, and dq is added while they are: a reduction keeps its
registers until the path to L2 has taken it, which is hundreds of instructions. All products are complete at the end of
the loop's body: with one in flight there, the compiler would serialise all of them. It does that, too, where registers
run out, and every number of the loop counts; scores therefore start from -lse / scale in their accumulators. dk and dv
are stored by TMA, through the buffer of the tile's values: ordinary stores would delay the loads of the next item.

Shared with `gdpa` and `ikbo`.
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

from kernels.attention.hopper.backward_loader import (
    STAGES,
    has_steps,
    key_tiles_of,
    keys_of,
    queries_of,
    steps_of,
    turns_of,
)

SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))


def _transposed_quads() -> str:
    """Assembly that transposes, among a quad of lanes, registers 0 2 4 6 and registers 1 3 5 7 of eight."""
    lines = ["{ .reg .pred p<2>; .reg .b32 lane, x, r<8>;", "mov.u32 lane, %laneid;"]
    lines += [f"mov.b32 r{i}, ${8 + i};" for i in range(8)]
    for bit, pairs in ((1, ((0, 2), (4, 6), (1, 3), (5, 7))), (2, ((0, 4), (2, 6), (1, 5), (3, 7)))):
        lines += [f"and.b32 x, lane, {bit};", "setp.ne.b32 p0, x, 0;"]
        for a, b in pairs:
            lines += [f"selp.b32 x, r{a}, r{b}, p0;", f"shfl.sync.bfly.b32 x, x, {bit}, 31, -1;"]
            lines += [f"selp.b32 r{b}, r{b}, x, p0;", f"selp.b32 r{a}, x, r{a}, p0;"]
    return " ".join([*lines, *(f"mov.b32 ${i}, r{i};" for i in range(8)), "}"])


def _lines(columns: int) -> gl.constexpr:
    wider = [[0, 32]] if columns == 64 else []
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *wider]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns]))


_TRANSPOSED_QUADS = gl.constexpr(_transposed_quads())
_EIGHT_REGISTERS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 8))
_LINES_OF_64 = _lines(64)
_LINES_OF_32 = _lines(32)


@gluon.jit
def in_lines(x):
    """16-bit x [64, 32 or 64] of an accumulator's layout in one where a lane has 16 bytes of a row, a quad 64.

    An accumulator leaves 4 bytes of each 16 with a lane of a quad, so that its stores touch a row in 16 bytes each.
    """
    GROUPS: gl.constexpr = x.shape[1] // 32
    y = gl.inline_asm_elementwise(_TRANSPOSED_QUADS, _EIGHT_REGISTERS, [x], x.dtype, False, 16)
    y = y.reshape([64, GROUPS, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, x.shape[1]])
    # The same registers in the order of columns, in which they are stored.
    return gl.convert_layout(y, _LINES_OF_64 if x.shape[1] == 64 else _LINES_OF_32)


@gluon.jit
def _masked(s, keys, offset, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores, -inf for keys beyond the first `keys` and outside the window. Most tiles have nothing to mask.

    `offset` is the position of the first key minus that of the first query.
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


def _product_with(unpack: str, pack: str) -> gl.constexpr:
    """Assembly: $0 = the product of two neighbours in 16 bits, $1, and in float32, $2 and $3, rounded to 16 bits.

    Compilers take pairs of 16 bits apart and put them together again where one of them is used by itself.
    """
    products = "mul.f32 x0, p0, $2; mul.f32 x1, p1, $3;"
    return gl.constexpr(f"{{ .reg .f32 p<2>, x<2>; {unpack} {products} {pack} $0, x1, x0; }}")


_TIMES_BFLOAT16 = _product_with("shl.b32 p0, $1, 16; and.b32 p1, $1, 0xffff0000;", "cvt.rn.bf16x2.f32")
_TIMES_FLOAT16 = _product_with(
    ".reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 p0, h0; cvt.f32.f16 p1, h1;", "cvt.rn.f16x2.f32"
)


@gluon.jit
def _times(p, x):
    """The product of p, of 16 bits, and a float32 tensor, rounded like p."""
    if p.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(_TIMES_BFLOAT16, "=r,r,f,f", [p, x], gl.bfloat16, True, 2)
    else:
        y = gl.inline_asm_elementwise(_TIMES_FLOAT16, "=r,r,f,f", [p, x], gl.float16, True, 2)
    return y


@gluon.jit
def _of_columns(numbers):
    """An accumulator whose rows all are the 64 numbers in shared memory."""
    return gl.expand_dims(numbers.load(gl.SliceLayout(0, SCORES)), 0).broadcast_to((64, 64))


@gluon.jit
def store_rows(x, pointer, rows, STRIDE: gl.constexpr):
    """The first `rows` rows of x [64, columns] to rows STRIDE elements apart."""
    LAYOUT: gl.constexpr = x.type.layout
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    inside = (row < rows) & (column >= 0)
    # L2 may evict them first: gradients are not read soon.
    gl.store(pointer + (row * STRIDE + column), x.to(pointer.dtype.element_ty), mask=inside, cache_modifier=".cs")


@gluon.jit
def through_shared(buffer, x):
    """x [64, d], of an accumulator's layout, rounded and in a layout of 16 bytes of a row to a lane."""
    D: gl.constexpr = x.shape[1]
    LANES: gl.constexpr = D // 8
    buffer.store(x.to(buffer.dtype))
    return buffer.load(gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0]))


@gluon.jit
def cells(dq):
    """dq in the order of the scratch, which is free.

    The elements that a thread holds of two columns and of two rows, eight apart, are neighbours there. No data moves
    between threads, accesses are 16 bytes wide, and those of a warp are contiguous.
    """
    GROUPS: gl.constexpr = dq.shape[1] // 8
    return dq.reshape([4, 2, 8, GROUPS, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * dq.shape[1]])


@gluon.jit
def load_dq(place, wanted, COLUMNS: gl.constexpr):
    """dq [64, COLUMNS] that earlier key tiles left at `place`, zeros unless `wanted`."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    flat = cells(gl.zeros((64, COLUMNS), gl.float32, HALF))
    FLAT: gl.constexpr = flat.type.layout
    cell = gl.arange(0, 64 * COLUMNS, layout=FLAT)
    flat = gl.load(place + cell, mask=(cell >= 0) & wanted, other=0.0, cache_modifier=".cg")
    dq = flat.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, COLUMNS])
    return gl.convert_layout(dq, HALF)


@gluon.jit
def add_dq(dq, place, first):
    """Add dq of one key tile to the scratch; the first of a row stores it.

    The caller must ensure that the key tiles of a row take turns, in their order.
    """
    flat = cells(dq)
    cell = gl.arange(0, 64 * dq.shape[1], layout=flat.type.layout)
    if first:
        gl.store(place + cell, flat, cache_modifier=".cg")
    else:
        gl.atomic_add(place + cell, flat, sem="relaxed")


@gluon.jit
def store_dq(dq, pointer, rows, scale, STRIDE: gl.constexpr):
    """Write the sum of all key tiles to the result."""
    store_rows(in_lines(_rounded(dq * scale, pointer.dtype.element_ty)), pointer, rows, STRIDE)


@gluon.jit
def differentiate(
    buffers, bars, dk_desc, dv_desc, table_ptr, tiles_stride, scratch_ptr, dq_ptr, dk_ptr, dv_ptr, exponent, scale,
    left, right,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RUNS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    DK_PARTS: gl.constexpr, DV_PARTS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Warpgroup C of the two: dk and dv of its keys, and its columns of dq."""
    k_s, v_s, q_s, g_s, ds_s, lse_s, delta_s = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, exchanged, dq_turn, done = bars
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    HALF: gl.constexpr = D // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    num_items = gl.load(table_ptr) * HEADS
    scratch = scratch_ptr + C * (64 * HALF)
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
    s = warpgroup_mma(k_s.index(C), q_s.index(0).permute((1, 0)), _of_columns(lse_s.index(0)), is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    keys = keys_of(table_ptr, 0, num_items, HEADS, RUNS)
    queries = queries_of(table_ptr, 0, num_items, HEADS, RUNS)
    for turn in range(turns_of(num_items)):
        k_start, k_length, j, head = keys
        own_keys = k_length - j * 128 - C * 64
        dk = gl.zeros((64, D), gl.float32, WIDE)
        dv = gl.zeros((64, D), gl.float32, WIDE)
        busy = has_steps(keys, queries, left, right, LEFT, RIGHT)
        kv = tile & 1
        tile += busy.to(gl.int32)
        for run in range(RUNS):
            q_start, q_length, first_tile, later = queries
            key_tiles, low, high = steps_of(keys, queries, left, right, LEFT, RIGHT)
            steps = (high - low) * GROUP
            i = low
            member = 0
            for n in range(steps):
                stage = step % STAGES
                buffer = step & 1
                g = g_s.index(stage)
                mbarrier.wait(g_full.index(stage), step // STAGES & 1)
                dp = warpgroup_mma(v_s.index(kv * 2 + C), g.permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = _masked(s, own_keys, j * 128 + C * 64 - i * 64, left, right, LEFT, RIGHT)
                p = _rounded(gl.exp2(s * exponent), dtype)
                p_left = gl.convert_layout(p, LEFT_OPERAND)
                # Asked for before it is needed, because the answer takes a while.
                delta = gl.expand_dims(delta_s.index(stage).load(gl.SliceLayout(0, SCORES)), 0)
                dv = warpgroup_mma(p_left, g, dv, is_async=True)
                old = buffer ^ 1
                # The last key tile starts from the sum of the others; these need their turn only when they add to it.
                mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=last & (step > 0))
                dq = load_dq(place, last and not first, HALF)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = _times(p, dp - delta)
                ds_left = gl.convert_layout(ds, LEFT_OPERAND)
                # Both have written ds of the step before, and read the one before that from this buffer.
                mbarrier.wait(exchanged, (step - 1) & 1, pred=step > 0)
                ds_s.index(buffer * 2 + C).store(ds)
                fence_async_shared()
                for c in gl.static_range(2):
                    k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
                    dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
                dk = warpgroup_mma(ds_left, q_s.index(stage), dk, is_async=True)
                dq, p_left = warpgroup_mma_wait(1, deps=(dq, p_left))
                mbarrier.arrive(exchanged, count=1)
                if left_tile:
                    # The buffer of that tile's values also held its dv.
                    tma.store_wait(0)
                    mbarrier.arrive(kv_empty.index(old_slot), count=1)

                left_tile = (n == steps - 1) & (later == 0)
                step += 1
                after = step % STAGES
                new_slot = (tile - 1 + left_tile.to(gl.int32)) & 1
                mbarrier.wait(q_full.index(after), step // STAGES & 1)
                mbarrier.wait(kv_full.index(new_slot), (tile - 1 + left_tile.to(gl.int32)) // 2 & 1)
                s = _of_columns(lse_s.index(after))
                s = warpgroup_mma(k_s.index(new_slot * 2 + C), q_s.index(after).permute((1, 0)), s, is_async=True)
                # Here, while the tensor cores compute the next scores: it takes a while.
                if last:
                    store_dq(dq, out, rows, scale, HEADS * GROUP * D)
                else:
                    mbarrier.wait(dq_turn.index(old), (step - 2) // 2 & 1, pred=step > 1)
                    add_dq(dq, place, first)
                first_key_tile, last_key_tile = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                first = j == first_key_tile
                last = j == last_key_tile
                place = scratch + ((head * GROUP + member) * tiles_stride + first_tile + i).to(gl.int64) * (64 * D)
                out = dq_ptr + (
                    (q_start + i * 64).to(gl.int64) * (HEADS * GROUP * D) + (head * GROUP + member) * D + C * HALF
                )
                rows = q_length - i * 64
                old_slot = kv
                i += 1
                if i == high:
                    i = low
                    member += 1
                s, dk, dv, ds_left = warpgroup_mma_wait(0, deps=(s, dk, dv, ds_left))
                mbarrier.arrive(stage_empty.index(stage), count=1)
            # The result takes a while, but before there are no registers for it.
            queries = queries_of(table_ptr, turn * RUNS + run + 1, num_items, HEADS, RUNS)
        following = keys_of(table_ptr, turn + 1, num_items, HEADS, RUNS)
        row = k_start + j * 128 + C * 64
        dk_position = row.to(gl.int64) * (DK_PARTS * HEADS * D) + head * D
        dv_position = row.to(gl.int64) * (DV_PARTS * HEADS * D) + head * D
        # This was the last use of the tile's values.
        buffer = v_s.index(kv * 2 + C)
        if busy & (own_keys >= 64):
            buffer.store((dk * scale).to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(dk_desc, [row, head * D], buffer)
            rounded = dv.to(dtype)
            tma.store_wait(0)
            buffer.store(rounded)
            fence_async_shared()
            tma.async_copy_shared_to_global(dv_desc, [row, head * D], buffer)
        elif busy:
            store_rows(through_shared(buffer, dk * scale), dk_ptr + dk_position, own_keys, DK_PARTS * HEADS * D)
            store_rows(through_shared(buffer, dv), dv_ptr + dv_position, own_keys, DV_PARTS * HEADS * D)
            fence_async_shared()
        else:
            store_rows(dk, dk_ptr + dk_position, own_keys, DK_PARTS * HEADS * D)
            store_rows(dv, dv_ptr + dv_position, own_keys, DV_PARTS * HEADS * D)
        keys = following
    # dq of the last step.
    old = (step & 1) ^ 1
    mbarrier.wait(dq_turn.index(old), (step - 1) // 2 & 1, pred=step > 0)
    dq = load_dq(place, last and not first, HALF)
    mbarrier.wait(exchanged, (step - 1) & 1, pred=step > 0)
    for c in gl.static_range(2):
        k_half = k_s.index(old_slot * 2 + c).slice(C * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_s.index(old * 2 + c).permute((1, 0)), k_half, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if last:
        store_dq(dq, out, rows, scale, HEADS * GROUP * D)
    else:
        add_dq(dq, place, first)
    tma.store_wait(0)
    mbarrier.arrive(done, count=1)
