"""The computing warpgroups of the Hopper forward of linear compression; `gluon_lce_forward` has the whole.

Products of users stay in float32, in a scratch that is private to the kernel and so need not look like a matrix: a
unit, what a consumer has in one accumulator, lies there in the order of the threads' registers. The consumer that adds
it to a candidate's product reads 256 bytes in a row with each warp's load.
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

from kernels.ikbo.gluon_lce_tiles import PANELS, SHARED_PANELS, tile_at, turns_of

UNIT = gl.constexpr(64 * 128)  # elements of an accumulator

# Its name up to Triton 3.6, and from 3.7 on.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _multiply(
    ring, full, empty, step, num_steps, LAYOUT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The 3 x 2 products of blocks of consumer C, summed over the steps, as 3 accumulators [64, 128]."""
    dtype: gl.constexpr = ring.dtype
    OPERAND: gl.constexpr = ring.layout
    acc0 = gl.zeros((64, 128), gl.float32, LAYOUT)
    acc1 = acc0
    acc2 = acc0
    for k in range(num_steps):
        stage = step % STAGES
        first = stage * PANELS
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        own = ring.index(first + SHARED_PANELS + 2 * C)
        if ROWS:  # own: two blocks of columns
            b = own._reinterpret(dtype, [64, 128], OPERAND)
            a0 = ring.index(first)
            a1 = ring.index(first + 1)
            a2 = ring.index(first + 2)
        else:  # own: two blocks of the weight
            b = own._reinterpret(dtype, [128, 64], OPERAND).permute((1, 0))
            a0 = ring.index(first).permute((1, 0))
            a1 = ring.index(first + 1).permute((1, 0))
            a2 = ring.index(first + 2).permute((1, 0))
        acc0 = warpgroup_mma(a0, b, acc0, is_async=True)
        acc1 = warpgroup_mma(a1, b, acc1, is_async=True)
        acc2 = warpgroup_mma(a2, b, acc2, is_async=True)
        acc0, acc1, acc2 = warpgroup_mma_wait(3, deps=(acc0, acc1, acc2))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=num_steps > 0)
    return acc0, acc1, acc2, step


@gluon.jit
def _places(LAYOUT: gl.constexpr):
    """Where the elements of an accumulator lie within a unit of the scratch: [64, 128]."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)), 0)
    return column // 8 * 512 + column % 8 + (row // 8 % 2 * 256 + row // 16 * 64 + row % 8 * 8)


@gluon.jit
def _unit_of(
    column, block, i, row_units, BLOCKS_N: gl.constexpr, ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr,
    ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """(entry of the batch, its first column and the first row of the weight of accumulator i of a tile, the number of
    that accumulator's unit of the scratch less those of earlier entries, units an entry has, units before this form's).
    """
    if ROWS:
        mine = column + 2 * C
        row_block = block + i
        per_column: gl.constexpr = 3 * ROW_TILES
        entry = mine // BLOCKS_N
        unit = mine % BLOCKS_N // 2 * per_column + row_block
        return entry, mine % BLOCKS_N * 64, row_block * 64, unit, BLOCKS_N // 2 * per_column, row_units * 0
    else:  # noqa: RET505
        mine = column + i
        row_block = block + 2 * C
        per_column: gl.constexpr = 2 * COLUMN_TILES
        entry = mine // BLOCKS_N
        unit = mine % BLOCKS_N * per_column + (row_block - 3 * ROW_TILES) // 2
        return entry, mine % BLOCKS_N * 64, row_block * 64, unit, BLOCKS_N * per_column, row_units


@gluon.jit
def _await(flags, ready, num_flags, flag):
    """Wait until the unit of a flag is written. Returns whether all are, after which nothing need be looked at.

    Flags are read by atomics, whose result is the same for all warps: they have to take the same branches.
    """
    if ready == 0:
        if gl.atomic_add(flags, 0, sem="acquire", scope="gpu") == num_flags:
            ready = 1
        else:
            while gl.atomic_add(flags + 1 + flag, 0, sem="acquire", scope="gpu") == 0:
                pass
    return ready


@gluon.jit
def _tile(
    out_desc, ring, staging, barriers, owners, scratch, flags, step, ready, num_flags, num_entries, num_users,
    num_steps, row_units, of_users, column, block,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USERS: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    full, empty = barriers
    dtype: gl.constexpr = ring.dtype
    OPERAND: gl.constexpr = ring.layout
    OUT: gl.constexpr = out_desc.layout
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc0, acc1, acc2, step = _multiply(ring, full, empty, step, num_steps, LAYOUT, STAGES, ROWS, C)
    accumulators = (acc0, acc1, acc2)
    for i in gl.static_range(3):
        acc = accumulators[i]
        entry, n, m, unit, units, first_unit = _unit_of(
            column, block, i, row_units, BLOCKS_N, ROW_TILES, COLUMN_TILES, ROWS, C
        )
        if USERS:
            written = of_users & (entry < num_users)
            if written:
                index = first_unit + entry * units + unit
                gl.store(scratch + index.to(gl.int64) * UNIT + _places(LAYOUT), acc)
                _barrier()
                gl.atomic_add(flags + 1 + index, 1, sem="release", scope="gpu")
                gl.atomic_add(flags, 1, sem="release", scope="gpu")
        if (not of_users) & (entry < num_entries):
            if USERS:
                index = first_unit + gl.load(owners + entry) * units + unit
                ready = _await(flags, ready, num_flags, index)
                acc += gl.load(scratch + index.to(gl.int64) * UNIT + _places(LAYOUT))
            tma.store_wait(0)
            panels = staging.index(2 * C)
            if ROWS:
                panels._reinterpret(dtype, [64, 128], OPERAND).store(acc.to(dtype))
            else:
                panels._reinterpret(dtype, [128, 64], OPERAND).permute((1, 0)).store(acc.to(dtype))
            fence_async_shared()
            for half in gl.static_range(2):
                source = staging.index(2 * C + half)._reinterpret(dtype, [1, 64, 64], OUT)
                if ROWS:
                    tma.async_copy_shared_to_global(out_desc, [entry, m, n + half * 64], source)
                else:
                    tma.async_copy_shared_to_global(out_desc, [entry, m + half * 64, n], source)
    return step, ready


@gluon.jit
def consume(
    out_desc, ring, staging, barriers, owners, scratch, flags, num_user_tiles, num_tiles, num_steps, num_user_steps,
    num_flags, num_entries, num_users, row_units,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USERS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C of every tile of the program."""
    step = 0
    ready = 0
    user_turns, turns = turns_of(num_user_tiles, num_tiles)
    for turn in range(turns):
        of_users, rows, column, block = tile_at(turn, user_turns, ROW_TILES, COLUMN_TILES)
        steps = gl.where(of_users, num_user_steps, num_steps)
        if rows:
            step, ready = _tile(
                out_desc, ring, staging, barriers, owners, scratch, flags, step, ready, num_flags, num_entries,
                num_users, steps, row_units, of_users, column, block,
                ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USERS, True, C,
            )  # fmt: skip
        else:
            step, ready = _tile(
                out_desc, ring, staging, barriers, owners, scratch, flags, step, ready, num_flags, num_entries,
                num_users, steps, row_units, of_users, column, block,
                ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USERS, False, C,
            )  # fmt: skip
    tma.store_wait(0)
