"""The computing warpgroups of the Hopper forward of GDPA; `hopper.forward` has the whole.

A consumer takes a tile's blocks of keys from the last to the first, so that only the first one taken can reach over the
end of the row. Two products are issued together: the scores of the next block, and the pending activations times the
values of the block before. After a tile's last block the "next block" is the first one of the next tile, so that
nothing drains between tiles, which is what decides the speed on short rows.

Each consumer waits for its own products, which makes the two alternate. With tanh GELU in bfloat16 they also take turns
at issuing them, and pass the turn on when both products are issued: those of the other consumer queue behind them and
do not mix with them.

The product with the values is complete before the activations of the next block are. A consumer therefore waits for it
when half of them are done: the buffer of the values is free for the loader that much earlier, and the other consumer
waits for what is loaded into it.

Compilers move the wait for a product up, or the activation down behind it, until the two no longer overlap. Therefore
the activations are volatile assembly, and between them and the wait there is one more test of a barrier that is known
to be complete: no arithmetic moves across its branch.
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

from kernels.core.hopper import halves, pass_turn, take_turn
from kernels.core.scheduling import FIRST_BLOCK, MAIN_BEGIN, MAIN_COUNT, MAIN_POSITION, NUM_BLOCKS, OTHER_LENGTH, ROW
from kernels.gdpa.hopper.activations import activated, kind_of, rounded, unscaled_factor
from kernels.gdpa.hopper.tiles import dealt_tile, num_turns

ROWS = gl.constexpr(64)  # queries of one consumer


@gluon.jit
def _entry(
    schedule, num_tiles, turn, HEADS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, RUN: gl.constexpr
):  # fmt: skip
    """(first query in q, how many there are, position of the first within its row, the row's number of keys, first
    block of keys, number of blocks, row, head) of this program's tile number `turn`. What is not needed is 0."""
    entry, head = dealt_tile(schedule, num_tiles, turn, HEADS, RUN)
    position = 0
    first_block = 0
    row = 0
    if LEFT or RIGHT:
        position = gl.load(entry + MAIN_POSITION)
    if LEFT:
        first_block = gl.load(entry + FIRST_BLOCK)
    if RUN > 1:
        row = gl.load(entry + ROW)
    begin = gl.load(entry + MAIN_BEGIN)
    count = gl.load(entry + MAIN_COUNT)
    return begin, count, position, gl.load(entry + OTHER_LENGTH), first_block, gl.load(entry + NUM_BLOCKS), row, head


@gluon.jit
def _masked(s, columns_smem, block_start, position, k_length, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Scores, 0 (whose activation is 0) where a query may not see a key; `position` is that of the first row.

    Column numbers come from shared memory: compilers would keep them in registers that activations need.
    """
    RS: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    columns = gl.expand_dims(columns_smem.load(gl.SliceLayout(0, s.type.layout)), 0)
    positions = position + gl.arange(0, s.shape[0], RS)
    if RIGHT:
        end = gl.minimum(positions + (right + 1), k_length) - block_start
        s = gl.where(columns < gl.expand_dims(end, 1), s, 0.0)
    else:
        s = gl.where(columns < k_length - block_start, s, 0.0)
    if LEFT:
        s = gl.where(columns >= gl.expand_dims(positions - left - block_start, 1), s, 0.0)
    return s


@gluon.jit
def _crossed(
    start, position, k_length, left, right, BLOCK_K: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    ROW_END: gl.constexpr,
):  # fmt: skip
    """Whether an edge of what some query sees runs through the block that starts at key `start`."""
    crossed = False
    if ROW_END:
        crossed |= start + BLOCK_K > k_length
    if RIGHT:
        crossed |= start + BLOCK_K - 1 > position + right
    if LEFT:
        crossed |= start < position + (ROWS - 1) - left
    return crossed


@gluon.jit
def _joined(left, right):
    """The inverse of `halves`."""
    return gl.join(left, right).permute([0, 2, 1]).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _take_turn(TURNS: gl.constexpr, C: gl.constexpr):
    if TURNS:
        take_turn(C)


@gluon.jit
def _pass_turn(TURNS: gl.constexpr, C: gl.constexpr):
    if TURNS:
        pass_turn(C)


@gluon.jit
def _store_rows(out, buffer, q_begin, q_count, HEADS: gl.constexpr, head, DV: gl.constexpr):
    """Write the first `q_count` rows of a block of outputs in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    start = ((q_begin + rows).to(gl.int64) * HEADS + head) * DV
    pointers = out + gl.expand_dims(start, 1) + gl.expand_dims(columns, 0)
    gl.store(pointers, buffer.load(LAYOUT), gl.expand_dims(rows < q_count, 1))


@gluon.jit
def attend(
    out_desc, q_smem, k_smem, v_smem, o_smem, columns_smem, barriers, out, schedule, HEADS: gl.constexpr,
    score_scale, out_scale, left, right,
    KINDS: gl.constexpr, HEAD_KINDS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, RUN: gl.constexpr,
    BLOCK_K: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: queries 64 * C to 64 * C + 63 of every tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    zero_scores = gl.zeros((ROWS, BLOCK_K), gl.float32, LS)
    dtype: gl.constexpr = v_smem.dtype
    # With longer activations, with ReLU and under a window, taking turns costs time.
    TURNS: gl.constexpr = (
        len(KINDS) == 1 and KINDS[0] == "gelu_tanh" and dtype == gl.bfloat16 and not LEFT and not RIGHT
    )
    num_tiles = gl.load(schedule)
    turns = num_turns(num_tiles, HEADS, RUN)
    # A program without tiles computes one meaningless block, without waiting for loads that never come.
    some = turns > 0
    begin, count, position, k_length, first_block, num_blocks, row, head = _entry(
        schedule, num_tiles, 0, HEADS, LEFT, RIGHT, RUN
    )
    num_blocks = gl.maximum(num_blocks, 1)
    kind = kind_of(head, HEAD_KINDS)
    next_begin, next_count, next_position, next_length, next_first, next_blocks, next_row, next_head = _entry(
        schedule, num_tiles, gl.minimum(1, gl.maximum(turns - 1, 0)), HEADS, LEFT, RIGHT, RUN
    )
    mbarrier.wait(q_full.index(C), 0, pred=some)
    mbarrier.wait(k_full.index(0), 0, pred=some)
    token = warpgroup_mma(q_smem.index(C), k_smem.index(0).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(token,))
    start = (first_block + num_blocks - 1) * BLOCK_K
    s = _masked(s, columns_smem, start, position + C * ROWS, k_length, left, right, LEFT, RIGHT)
    p = gl.convert_layout(rounded(activated(s, score_scale, kind, KINDS, dtype), dtype), LP)
    acc = gl.zeros((ROWS, DV), gl.float32, LO)
    base = 0  # number, in the order of loading, of the first block of this tile
    if RUN > 1:
        keep = (turns > 1) & (next_row == row) & (next_head == head) & (num_blocks <= STAGES)
    else:
        keep = False
    mbarrier.arrive(k_empty.index(0), count=1, pred=some & (not keep))
    if C == 1:
        _pass_turn(TURNS, C)
    for turn in range(turns):
        more = turn + 1 < turns
        q_begin = begin + C * ROWS
        q_count = count - C * ROWS
        next_blocks = gl.maximum(next_blocks, 1)
        next_kind = kind_of(next_head, HEAD_KINDS)
        if RUN == 1:  # the shorter tiles of runs need no zeros: their first product does not add
            acc = gl.zeros((ROWS, DV), gl.float32, LO)
        q = q_smem.index(2 * (turn % 2) + C)
        todo = num_blocks
        if C == 1:  # the last tile of a row may have no queries for this consumer: it does the last block for nothing
            todo = gl.where(q_count > 0, num_blocks, 1)
            for i in range(num_blocks - todo):
                k_load = base + i + 1
                v_load = base + i
                _take_turn(TURNS, C)
                _pass_turn(TURNS, C)
                mbarrier.wait(k_full.index(k_load % STAGES), (k_load // STAGES) & 1)
                mbarrier.arrive(k_empty.index(k_load % STAGES), count=1, pred=not keep)
                mbarrier.wait(v_full.index(v_load % STAGES), (v_load // STAGES) & 1)
                mbarrier.arrive(v_empty.index(v_load % STAGES), count=1, pred=not keep)
        for i in range(num_blocks - todo, num_blocks - 1):
            k_load = base + i + 1
            v_load = base + i
            k_stage = k_load % STAGES
            v_stage = v_load % STAGES
            mbarrier.wait(k_full.index(k_stage), (k_load // STAGES) & 1)
            _take_turn(TURNS, C)
            s_token = warpgroup_mma(q, k_smem.index(k_stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), (v_load // STAGES) & 1)
            add = True
            if RUN > 1:
                add = i > num_blocks - todo
            acc_token = warpgroup_mma(p, v_smem.index(v_stage), acc, use_acc=add, is_async=True)
            _pass_turn(TURNS, C)
            s = warpgroup_mma_wait(1, deps=(s_token,))
            mbarrier.arrive(k_empty.index(k_stage), count=1, pred=not keep)
            if LEFT or RIGHT:
                start = (first_block + num_blocks - 2 - i) * BLOCK_K
                if _crossed(start, position + C * ROWS, k_length, left, right, BLOCK_K, LEFT, RIGHT, False):
                    s = _masked(s, columns_smem, start, position + C * ROWS, k_length, left, right, LEFT, RIGHT)
            left_scores, right_scores = halves(s)
            y = activated(left_scores, score_scale, kind, KINDS, dtype)
            mbarrier.wait(v_full.index(v_stage), (v_load // STAGES) & 1)
            # The activations are a register operand of the product in flight: they must live until it is complete.
            acc, p, y = warpgroup_mma_wait(0, deps=(acc_token, p, y))
            mbarrier.arrive(v_empty.index(v_stage), count=1, pred=not keep)
            z = activated(right_scores, score_scale, kind, KINDS, dtype)
            p = gl.convert_layout(_joined(rounded(y, dtype), rounded(z, dtype)), LP)

        # The last block's values, with the scores of the next tile's first block.
        mbarrier.arrive(q_empty.index(2 * (turn % 2) + C), count=1)
        v_load = base + num_blocks - 1
        base = gl.where(keep, base, base + num_blocks)
        k_stage = base % STAGES
        v_stage = v_load % STAGES
        next_slot = 2 * ((turn + 1) % 2) + C
        mbarrier.wait(q_full.index(next_slot), ((turn + 1) // 2) & 1, pred=more)
        mbarrier.wait(k_full.index(k_stage), (base // STAGES) & 1, pred=more)
        _take_turn(TURNS, C)
        token = warpgroup_mma(
            q_smem.index(next_slot), k_smem.index(k_stage).permute((1, 0)), zero_scores, use_acc=False, is_async=True
        )
        # The tile after the next one. These loads are waited for at once. The second product is issued no sooner than
        # the first one is nearly complete, so between the two the wait costs nothing.
        new_begin, new_count, new_position, new_length, new_first, new_blocks, new_row, new_head = _entry(
            schedule, num_tiles, gl.minimum(turn + 2, turns - 1), HEADS, LEFT, RIGHT, RUN
        )
        mbarrier.wait(v_full.index(v_stage), (v_load // STAGES) & 1)
        add = True
        if RUN > 1:
            add = todo > 1
        acc_token = warpgroup_mma(p, v_smem.index(v_stage), acc, use_acc=add, is_async=True)
        _pass_turn(TURNS, C)
        if RUN > 1:
            keep_next = (turn + 2 < turns) & (new_row == next_row) & (new_head == next_head) & (next_blocks <= STAGES)
        else:
            keep_next = False
        s = warpgroup_mma_wait(1, deps=(token,))
        mbarrier.arrive(k_empty.index(k_stage), count=1, pred=more & (not keep_next))
        start = (next_first + next_blocks - 1) * BLOCK_K
        if _crossed(start, next_position + C * ROWS, next_length, left, right, BLOCK_K, LEFT, RIGHT, True):
            s = _masked(s, columns_smem, start, next_position + C * ROWS, next_length, left, right, LEFT, RIGHT)
        left_scores, right_scores = halves(s)
        y = rounded(activated(left_scores, score_scale, next_kind, KINDS, dtype), dtype)
        mbarrier.wait(v_full.index(v_stage), (v_load // STAGES) & 1)
        acc, p, y = warpgroup_mma_wait(0, deps=(acc_token, p, y))
        mbarrier.arrive(v_empty.index(v_stage), count=1, pred=not keep)
        z = rounded(activated(right_scores, score_scale, next_kind, KINDS, dtype), dtype)
        p = gl.convert_layout(_joined(y, z), LP)

        buffer = o_smem.index(C)
        tma.store_wait(0)
        buffer.store((acc * (out_scale * unscaled_factor(score_scale, kind, KINDS, dtype))).to(dtype))
        if q_count >= ROWS:
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [q_begin, head * DV], buffer)
        else:  # a whole block would overwrite outputs of the next row
            _store_rows(out, buffer, q_begin, q_count, HEADS, head, DV)

        keep = keep_next
        begin, count, position, k_length = next_begin, next_count, next_position, next_length
        first_block, num_blocks, row, head, kind = next_first, next_blocks, next_row, next_head, next_kind
        next_begin, next_count, next_position, next_length = new_begin, new_count, new_position, new_length
        next_first, next_blocks, next_row, next_head = new_first, new_blocks, new_row, new_head
    tma.store_wait(0)
    if C == 0:
        _take_turn(TURNS, C)
