"""The computing warpgroups of the Hopper product of linear compression; `hopper.lce_forward` has the whole.

Products of users stay in float32, in scratch that is private to the kernel and so need not look like a matrix: a block
of 64 x 64 is stored in the order of the threads' registers, 16 bytes of a thread and 512 of a warp next to each other.

Any wait at the end of a tile of candidates leaves the tensor cores idle. A block of users is therefore loaded during
the products of the last step, or while the results of the block before it are stored, and only if it is not the same
block as before, which it mostly is because the entries of a tile are neighbours.
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

from kernels.attention.hopper.backward_consumer import cells
from kernels.core.hopper import barrier, halves
from kernels.ikbo.hopper.lce_tiles import PANELS, SHARED_PANELS, tile_at, turns_of

BLOCK = gl.constexpr(64 * 64)  # elements
OUT_PANELS = gl.constexpr(3)  # blocks of results of a consumer that may still be being stored


@gluon.jit
def _issue(
    ring, full, empty, step, num_steps, LAYOUT: gl.constexpr, SHARED: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The SHARED x 2 products of blocks of consumer C, summed over the steps: accumulators [64, 128], three of them,
    and the next step. Products of the last step may still be in flight.
    """
    dtype: gl.constexpr = ring.dtype
    OPERAND: gl.constexpr = ring.layout
    BLOCK_K: gl.constexpr = ring.shape[2]
    ALONG: gl.constexpr = dtype.primitive_bitwidth == 8
    acc0 = gl.zeros((64, 128), gl.float32, LAYOUT)
    acc1 = acc0
    acc2 = acc0
    for _ in range(num_steps):
        stage = step % STAGES
        first = stage * PANELS
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        own = ring.index(first + SHARED_PANELS + 2 * C)
        if ROWS:  # own: a block of two entries
            if ALONG:
                b = own._reinterpret(dtype, [128, BLOCK_K], OPERAND).permute((1, 0))
            else:
                b = own._reinterpret(dtype, [64, 128], OPERAND)
            a0 = ring.index(first)
            a1 = ring.index(first + 1)
            a2 = ring.index(first + 2)
        else:  # own: two blocks of the weight
            b = own._reinterpret(dtype, [128, BLOCK_K], OPERAND).permute((1, 0))
            if ALONG:
                a0 = ring.index(first)
                a1 = ring.index(first + 1)
                a2 = ring.index(first + 2)
            else:
                a0 = ring.index(first).permute((1, 0))
                a1 = ring.index(first + 1).permute((1, 0))
                a2 = ring.index(first + 2).permute((1, 0))
        acc0 = warpgroup_mma(a0, b, acc0, is_async=True)
        if SHARED == 3:
            acc1 = warpgroup_mma(a1, b, acc1, is_async=True)
            acc2 = warpgroup_mma(a2, b, acc2, is_async=True)
            acc0, acc1, acc2 = warpgroup_mma_wait(3, deps=(acc0, acc1, acc2))
        else:
            acc0 = warpgroup_mma_wait(1, deps=(acc0,))
        tma.store_wait(0)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        step += 1
    return acc0, acc1, acc2, step


@gluon.jit
def _blocks(acc):
    """The two blocks [64, 64] of an accumulator, which is free."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    first, second = halves(acc)
    return gl.convert_layout(first, HALF), gl.convert_layout(second, HALF)


@gluon.jit
def _load_block(scratch, index):
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    FLAT: gl.constexpr = cells(gl.zeros((64, 64), gl.float32, HALF)).type.layout
    flat = gl.load(scratch + index.to(gl.int64) * BLOCK + gl.arange(0, 4096, FLAT))
    block = flat.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64])
    return gl.convert_layout(block, HALF)


@gluon.jit
def _store_block(scratch, index, block):
    flat = cells(block)
    gl.store(scratch + index.to(gl.int64) * BLOCK + gl.arange(0, 4096, flat.type.layout), flat)


@gluon.jit
def _user_block(row, n, m, BLOCKS_N: gl.constexpr, BLOCKS_M: gl.constexpr):
    return (row * BLOCKS_N + n) * BLOCKS_M + m


@gluon.jit
def _flag_of(
    row, n, block, ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, ROWS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """The flag that counts how many blocks of a user are ready that consumer C adds to a candidate's tile."""
    flag = 1 + (row * BLOCKS_N + n) * (ROW_TILES + 2 * COLUMN_TILES)
    if ROWS:
        flag += block // 3
    else:
        flag += ROW_TILES + (block - 3 * ROW_TILES) // 2 + C
    return flag


@gluon.jit
def _user_tile(
    ring, barriers, scratch, flags, step, num_steps, num_users, entry, n, block,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, SHARED: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    full, empty = barriers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    BLOCKS_M: gl.constexpr = 3 * ROW_TILES + 4 * COLUMN_TILES
    ENTRIES: gl.constexpr = 2 if ROWS else SHARED  # of this consumer
    acc0, acc1, acc2, step = _issue(ring, full, empty, step, num_steps, LAYOUT, SHARED, STAGES, ROWS, C)
    acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=num_steps > 0)
    accumulators = (acc0, acc1, acc2)
    for i in gl.static_range(SHARED):
        blocks = _blocks(accumulators[i])
        for h in gl.static_range(2):
            row = entry + (2 * C + h if ROWS else i)
            m = block + (i if ROWS else 2 * C + h)
            if row < num_users:
                _store_block(scratch, _user_block(row, n, m, BLOCKS_N, BLOCKS_M), blocks[h])
    barrier()
    for e in gl.static_range(ENTRIES):
        row = entry + (2 * C + e if ROWS else e)
        if row < num_users:
            count: gl.constexpr = SHARED if ROWS else 2
            flag = _flag_of(row, n, block, ROW_TILES, COLUMN_TILES, BLOCKS_N, ROWS, C)
            gl.atomic_add(flags + flag, count, sem="release", scope="gpu")
            gl.atomic_add(flags, count, sem="release", scope="gpu")
    return step + 1


@gluon.jit
def _await(flags, ready, num_blocks, flag, count):
    """Wait for a flag. Returns whether all blocks are ready, after which no flag need be read.

    Flags are read by atomics, whose result is the same for all warps: they have to take the same branches.
    """
    if ready == 0:
        if gl.atomic_add(flags, 0, sem="acquire", scope="gpu") == num_blocks:
            ready = 1
        else:
            while gl.atomic_add(flags + flag, 0, sem="acquire", scope="gpu") < count:
                pass
    return ready


@gluon.jit
def _write(out_desc, panel, result, row, m, n, ROWS: gl.constexpr):
    """Store a block of results to rows 64 m and columns 64 n of entry `row`, through a buffer that may still be being
    read.

    TMA writes nothing for entries and rows that do not exist.
    """
    OUT: gl.constexpr = out_desc.layout
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    matrix = panel._reinterpret(out_desc.dtype, [64, 64], MATRIX)
    tma.store_wait(OUT_PANELS - 1)
    barrier()
    if ROWS:
        matrix.store(result)
    else:
        matrix.permute((1, 0)).store(result)
    fence_async_shared()
    tma.async_copy_shared_to_global(
        out_desc, [row, m * 64, n * 64], panel._reinterpret(out_desc.dtype, [1, 64, 64], OUT)
    )


@gluon.jit
def _finish(
    j: gl.constexpr, out_desc, ring, first_panel, scratch, added, blocks, rows_of, first_entry, first_m, n,
    BLOCKS_N: gl.constexpr, BLOCKS_M: gl.constexpr, USERS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Finish block j of the six of a consumer, in an order in which blocks with the same block of users are neighbours.

    Returns what has to be added to the next one.
    """
    ENTRIES: gl.constexpr = 2 if ROWS else 3
    e: gl.constexpr = j % ENTRIES
    result = blocks[j // 2][j % 2] if ROWS else blocks[j % 3][j // 3]
    if USERS:
        result += added
    result = result.to(out_desc.dtype)
    if USERS:  # noqa: SIM102
        if j < 5:
            next_e: gl.constexpr = (j + 1) % ENTRIES
            if next_e == 0:
                index = _user_block(rows_of[0], n, first_m + (j + 1) // ENTRIES, BLOCKS_N, BLOCKS_M)
                added = _load_block(scratch, index)
            else:
                if rows_of[next_e] != rows_of[e]:
                    index = _user_block(rows_of[next_e], n, first_m + j // ENTRIES, BLOCKS_N, BLOCKS_M)
                    added = _load_block(scratch, index)
    panel = ring.index(first_panel + j % OUT_PANELS)
    _write(out_desc, panel, result, first_entry + e, first_m + j // ENTRIES, n, ROWS)
    return added


@gluon.jit
def _candidate_tile(
    out_desc, ring, barriers, owners, scratch, flags, step, ready, num_blocks, num_entries, num_steps,
    entry, n, block,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USERS: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    full, empty = barriers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    BLOCKS_M: gl.constexpr = 3 * ROW_TILES + 4 * COLUMN_TILES
    ENTRIES: gl.constexpr = 2 if ROWS else 3
    first_entry = entry + (2 * C if ROWS else 0)
    first_m = block + (0 if ROWS else 2 * C)
    owner0 = 0
    owner1 = 0
    owner2 = 0
    if USERS:
        owner0 = gl.load(owners + gl.minimum(first_entry, num_entries - 1))
        owner1 = gl.load(owners + gl.minimum(first_entry + 1, num_entries - 1))
        owner2 = gl.load(owners + gl.minimum(first_entry + ENTRIES - 1, num_entries - 1))
    rows_of = (owner0, owner1, owner2)
    acc0, acc1, acc2, step = _issue(ring, full, empty, step, num_steps, LAYOUT, SHARED_PANELS, STAGES, ROWS, C)
    added = gl.zeros((64, 64), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    if USERS:
        for e in gl.static_range(ENTRIES):
            flag = _flag_of(rows_of[e], n, block, ROW_TILES, COLUMN_TILES, BLOCKS_N, ROWS, C)
            ready = _await(flags, ready, num_blocks, flag, 3 if ROWS else 2)
        added = _load_block(scratch, _user_block(owner0, n, first_m, BLOCKS_N, BLOCKS_M))
    acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=num_steps > 0)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    first_panel = step % STAGES * PANELS + OUT_PANELS * C
    blocks = (_blocks(acc0), _blocks(acc1), _blocks(acc2))
    for j in gl.static_range(6):
        added = _finish(
            j, out_desc, ring, first_panel, scratch, added, blocks, rows_of, first_entry, first_m, n,
            BLOCKS_N, BLOCKS_M, USERS, ROWS,
        )  # fmt: skip
    return step + 1, ready


@gluon.jit
def consume(
    out_desc, ring, barriers, owners, scratch, flags, num_user_tiles, num_tiles, num_steps,
    num_user_steps, num_blocks, num_entries, num_users,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USER_SHARED: gl.constexpr, WITHIN: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C of every tile of the program."""
    step = 0
    ready = 0
    user_turns, turns = turns_of(num_user_tiles, num_tiles)
    if USER_SHARED > 0:
        for turn in range(user_turns):
            rows, entry, n, block = tile_at(
                turn, user_turns, num_users, True, USER_SHARED, ROW_TILES, COLUMN_TILES, BLOCKS_N
            )
            if rows:
                step = _user_tile(
                    ring, barriers, scratch, flags, step, num_user_steps, num_users, entry, n, block,
                    ROW_TILES, COLUMN_TILES, BLOCKS_N, USER_SHARED, STAGES, True, C,
                )  # fmt: skip
            else:
                step = _user_tile(
                    ring, barriers, scratch, flags, step, num_user_steps, num_users, entry, n, block,
                    ROW_TILES, COLUMN_TILES, BLOCKS_N, USER_SHARED, STAGES, False, C,
                )  # fmt: skip
    steps = num_steps
    if WITHIN:
        steps += num_user_steps
    for turn in range(user_turns, turns):
        rows, entry, n, block = tile_at(turn, user_turns, num_entries, False, 3, ROW_TILES, COLUMN_TILES, BLOCKS_N)
        if rows:
            step, ready = _candidate_tile(
                out_desc, ring, barriers, owners, scratch, flags, step, ready, num_blocks, num_entries,
                steps, entry, n, block, ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USER_SHARED > 0, True, C,
            )  # fmt: skip
        else:
            step, ready = _candidate_tile(
                out_desc, ring, barriers, owners, scratch, flags, step, ready, num_blocks, num_entries,
                steps, entry, n, block, ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USER_SHARED > 0, False, C,
            )  # fmt: skip
    tma.store_wait(0)
