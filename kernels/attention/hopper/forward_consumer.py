"""The computing warpgroups of jagged softmax attention on Hopper; `hopper.forward` has the whole.

A consumer takes a tile's blocks of keys from the last to the first. The end of the row, and the diagonal of a causal
mask, lie in the first blocks taken; only those, and the ones at the left edge of a window, pay for masking.

Two products are issued together: the scores of the next block, and the pending probabilities times the values of the
block before. After a tile's last block the "next block" is the first one of the next tile, so that nothing drains
between tiles, which is what decides the speed on short rows.

The two consumers take turns on the tensor cores: while one multiplies, the other computes its softmax. Without turns
they would come into step, and the tensor cores would wait for both softmaxes. A consumer passes the turn on a little
before both products are complete, or, if they are short against a softmax (EARLY), when its scores are.

The time of a block is mostly that from its scores to its probabilities, not that of the products. Therefore as much of
it as possible is done before the product with the values is complete, and the rest, where it can wait, at the end of a
tile.
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

from kernels.attention.hopper.items import ROWS, mixed_turn, paired_item
from kernels.attention.hopper.softmax import (
    corrected,
    exponents,
    masked_at_edges,
    normalization,
    powers_and_turn,
    rounded,
    sums,
    times,
)
from kernels.core.hopper import barrier, pass_turn, take_turn
from kernels.core.scheduling import (
    FIRST_BLOCK,
    MAIN_BEGIN,
    MAIN_COUNT,
    MAIN_POSITION,
    NUM_BLOCKS,
    OTHER_LENGTH,
    dealt_item,
    num_rounds,
)


@gluon.jit
def _tile(
    schedule,
    turn,
    common,
    HEADS: gl.constexpr,
    PAIRED: gl.constexpr,
    LEFT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    C: gl.constexpr,
):
    """The parameters of this program's item of turn `turn` for consumer C.

    (first row of its queries in q, how many of them exist, position of the first within its row, the row's number of
    keys, first block, how many more there are, head, from one of its blocks to its next one in the ring)
    """
    first_block = 0
    position = 0
    stride = 1
    if PAIRED:
        entry, head = dealt_item(schedule, mixed_turn(turn, common, BLOCK_K), HEADS // 2)
        begin, count, head, alone = paired_item(entry, head, HEADS)
        begin += gl.where(alone != 0, 0, C * ROWS)
        count -= gl.where(alone != 0, 0, C * ROWS)
        head += alone * C
        stride += alone
    else:
        entry, head = dealt_item(schedule, turn, HEADS)
        begin = gl.load(entry + MAIN_BEGIN) + C * ROWS
        count = gl.load(entry + MAIN_COUNT) - C * ROWS
        position = gl.load(entry + MAIN_POSITION) + C * ROWS
    if LEFT:
        first_block = gl.load(entry + FIRST_BLOCK)
    length = gl.load(entry + OTHER_LENGTH)
    return begin, count, position, length, first_block, gl.maximum(gl.load(entry + NUM_BLOCKS), 1) - 1, head, stride


@gluon.jit
def _place(slot, STAGES: gl.constexpr):
    """(stage, phase of its barriers) of block number `slot` in a ring of 2, 4 .. stages.

    Computed by masks: a signed quotient would need corrections, on the critical path to a product.
    """
    return slot & (STAGES - 1), (slot & STAGES) // STAGES


@gluon.jit
def _powers(x, EARLY: gl.constexpr, C: gl.constexpr):
    """2^x; passes the turn on unless that is done EARLY."""
    if EARLY:
        y = gl.exp2(x)
    else:
        y = powers_and_turn(x, C)
    return y


@gluon.jit
def _advance(
    q,
    k_smem,
    v_smem,
    barriers,
    slot,
    stride,
    block,
    acc,
    begun,
    p,
    m,
    total,
    scale,
    position,
    k_length,
    left,
    right,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    C: gl.constexpr,
):
    """Add the pending probabilities' product with their values to `acc`, and make those of the next `block` pending.

    What `acc` holds counts if it was `begun`: it is not zeroed between tiles.
    The pending block is number `slot` of the ring, the next one `slot` + `stride`.
    """
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LO: gl.constexpr = acc.type.layout
    k_stage, k_phase = _place(slot + stride, STAGES)
    v_stage, v_phase = _place(slot, STAGES)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    take_turn(C)
    s_token = warpgroup_mma(
        q,
        k_smem.index(k_stage).permute((1, 0)),
        gl.zeros((ROWS, BLOCK_K), gl.float32, LS),
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc_token = warpgroup_mma(p, v_smem.index(v_stage), acc, use_acc=begun, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    if EARLY:
        pass_turn(C)
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    s = masked_at_edges(s, block * BLOCK_K, position, k_length, left, right, LEFT, RIGHT, False)
    x, m, correction = exponents(s, m, scale, LEFT or RIGHT)
    p_next = _powers(x, EARLY, C)
    total = times(total, correction) + sums(p_next)
    # The probabilities are a register operand of the product in flight: they must live until it is complete.
    acc, p = warpgroup_mma_wait(0, deps=(acc_token, p))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    # Rounded before the correction, across whose branch no arithmetic moves: among the powers it takes no time.
    p = rounded(p_next, v_smem.dtype, LO)
    return corrected(acc, correction), p, m, total


@gluon.jit
def _skip(barriers, slot, STAGES: gl.constexpr, C: gl.constexpr):
    """Skip a block for which this consumer has no queries."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    k_stage, k_phase = _place(slot + 1, STAGES)
    v_stage, v_phase = _place(slot, STAGES)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    take_turn(C)
    pass_turn(C)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return slot + 1


@gluon.jit
def _store_rows(out, buffer, q_begin, q_count, head, HEADS: gl.constexpr, DV: gl.constexpr):
    """Write the first `q_count` rows of a block of outputs in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    start = ((q_begin + rows).to(gl.int64) * HEADS + head) * DV
    pointers = out + gl.expand_dims(start, 1) + gl.expand_dims(columns, 0)
    gl.store(pointers, buffer.load(LAYOUT), gl.expand_dims(rows < q_count, 1))


@gluon.jit
def _send(out_desc, out, buffer, q_begin, q_count, head, HEADS: gl.constexpr, DV: gl.constexpr):
    """Write the outputs in `buffer` of `q_count` queries: of all of them if that is larger, of none if it is not
    positive.
    """
    if q_count >= ROWS:
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(out_desc, [q_begin, head * DV], buffer)
    else:  # a whole block would overwrite outputs of the next row
        _store_rows(out, buffer, q_begin, q_count, head, HEADS, DV)


@gluon.jit
def attend(
    out_desc,
    q_smem,
    k_smem,
    v_smem,
    o_smem,
    barriers,
    out,
    lse,
    schedule,
    num_queries,
    scale,
    left,
    right,
    HEADS: gl.constexpr,
    PAIRED: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: queries 64 * C to 64 * C + 63 of every tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    nothing_seen = gl.full((ROWS,), -float("inf"), gl.float32, RS)
    zero_scores = gl.zeros((ROWS, BLOCK_K), gl.float32, LS)
    rows = gl.arange(0, ROWS, RS)
    buffer = o_smem.index(C)
    # Outputs are sent at the end of the next tile. Under a mask, and of short blocks, that is slower.
    LATE: gl.constexpr = not (LEFT or RIGHT or EARLY)
    kept_begin = 0
    kept_count = 0
    kept_head = 0
    items = gl.load(schedule) * (HEADS // 2 if PAIRED else HEADS)
    rounds = num_rounds(items)
    common = items // gl.num_programs(0)
    # A program without items computes one meaningless block, without waiting for loads that never come.
    some = rounds > 0
    q_begin, q_count, position, k_length, first_block, steps, head, stride = _tile(
        schedule, 0, common, HEADS, PAIRED, LEFT, BLOCK_K, C
    )
    next_begin, next_count, next_position, next_length, next_first, next_steps, next_head, next_stride = _tile(
        schedule, gl.minimum(1, gl.maximum(rounds - 1, 0)), common, HEADS, PAIRED, LEFT, BLOCK_K, C
    )
    slot = C * (stride - 1)
    mbarrier.wait(q_full.index(C), 0, pred=some)
    mbarrier.wait(k_full.index(slot), 0, pred=some)
    token = warpgroup_mma(
        q_smem.index(C), k_smem.index(slot).permute((1, 0)), zero_scores, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(k_empty.index(slot), count=1, pred=some)
    s = masked_at_edges(s, (first_block + steps) * BLOCK_K, position, k_length, left, right, LEFT, RIGHT, True)
    x, m, _ = exponents(s, nothing_seen, scale, True)
    p_next = gl.exp2(x)
    total = sums(p_next)
    p = rounded(p_next, v_smem.dtype, LO)
    acc = gl.zeros((ROWS, DV), gl.float32, LO)
    if C == 1:
        pass_turn(C)
    for turn in range(rounds):
        more = turn + 1 < rounds
        q = q_smem.index(2 * (turn % 2) + C)
        if C == 1 and not PAIRED:
            # The last tile of a row may have no queries for this consumer: its last block is wasted.
            skipped = gl.where(q_count > 0, 0, steps)
            for _number in range(skipped):
                slot = _skip(barriers, slot, STAGES, C)
            steps -= skipped
        # `next_steps` must be read by the mask below: MLIR treats a value that is carried around a loop only to bound
        # an inner loop as dead, and every tile would do as many steps as the first.
        for b in range(steps):
            acc, p, m, total = _advance(
                q, k_smem, v_smem, barriers, slot, stride, first_block + (steps - 1 - b), acc, b > 0, p, m, total,
                scale, position, k_length, left, right, LEFT, RIGHT, BLOCK_K, STAGES, EARLY, C,
            )  # fmt: skip
            slot += stride

        # The last block's values, with the scores of the next tile's first block.
        mbarrier.arrive(q_empty.index(2 * (turn % 2) + C), count=1)
        k_slot = slot + stride + C * (next_stride - stride)
        k_stage, k_phase = _place(k_slot, STAGES)
        v_stage, v_phase = _place(slot, STAGES)
        next_place = 2 * ((turn + 1) % 2) + C
        mbarrier.wait(q_full.index(next_place), ((turn + 1) // 2) & 1, pred=more)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=more)
        take_turn(C)
        token = warpgroup_mma(
            q_smem.index(next_place), k_smem.index(k_stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True
        )
        # The second product is issued no sooner than the first one is nearly complete: until then nothing waits for
        # what is done here. There is time for outputs or for sums, and to ask for the entry of the tile after the next
        # one.
        if LATE:
            _send(out_desc, out, buffer, kept_begin, kept_count, kept_head, HEADS, DV)
        else:
            inverse, log_total = normalization(gl.convert_layout(gl.sum(total, 1), RS), m)
            gl.store(lse + head.to(gl.int64) * num_queries + q_begin + rows, log_total, rows < q_count)
        new_begin, new_count, new_position, new_length, new_first, new_steps, new_head, new_stride = _tile(
            schedule, gl.minimum(turn + 2, rounds - 1), common, HEADS, PAIRED, LEFT, BLOCK_K, C
        )
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc_token = warpgroup_mma(p, v_smem.index(v_stage), acc, use_acc=steps > 0, is_async=True)
        s = warpgroup_mma_wait(1, deps=(token,))
        if EARLY:
            pass_turn(C)
        mbarrier.arrive(k_empty.index(k_stage), count=1, pred=more)
        s = masked_at_edges(
            s, (next_first + next_steps) * BLOCK_K, next_position, next_length, left, right, LEFT, RIGHT, True
        )
        if LATE:
            m_next = gl.max(s, 1) * scale
            # One more test of a barrier that is known to be complete: no arithmetic moves across its branch. Without it
            # compilers put up to half of the powers before the turn is passed on.
            mbarrier.wait(q_full.index(next_place), ((turn + 1) // 2) & 1, pred=more)
            pass_turn(C)
            reference = gl.where(m_next == -float("inf"), 0.0, m_next)
            p_next = gl.exp2(s * scale - gl.expand_dims(reference, 1))
        else:
            x, m_next, _ = exponents(s, nothing_seen, scale, True)
            p_next = _powers(x, EARLY, C)
        next_total = sums(p_next)
        acc, p = warpgroup_mma_wait(0, deps=(acc_token, p))
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        p = rounded(p_next, v_smem.dtype, LO)
        slot = k_slot

        if LATE:
            inverse, log_total = normalization(gl.convert_layout(gl.sum(total, 1), RS), m)
        outputs = times(acc, inverse)
        tma.store_wait(0)
        buffer.store(outputs.to(v_smem.dtype))
        if LATE:
            kept_begin, kept_count, kept_head = q_begin, q_count, head
            gl.store(lse + head.to(gl.int64) * num_queries + q_begin + rows, log_total, rows < q_count)
        else:
            _send(out_desc, out, buffer, q_begin, q_count, head, HEADS, DV)

        m, total = m_next, next_total
        q_begin, q_count, position, k_length = next_begin, next_count, next_position, next_length
        first_block, steps, head, stride = next_first, next_steps, next_head, next_stride
        next_begin, next_count, next_position, next_length = new_begin, new_count, new_position, new_length
        next_first, next_steps, next_head, next_stride = new_first, new_steps, new_head, new_stride
    if LATE:
        _send(out_desc, out, buffer, kept_begin, kept_count, kept_head, HEADS, DV)
    tma.store_wait(0)
    if C == 0:
        take_turn(C)
