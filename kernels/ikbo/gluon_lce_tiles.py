"""Tiles of the Hopper kernels of linear compression: shapes, their order, and how they are loaded (Gluon).

Everything is made of blocks of 64: of the M rows of a weight, and of the columns of the inputs, N / 64 for each entry
of the batch, numbered through the batch. A tile has 12 products of blocks, 3 x 4, and comes in two forms:

    rows     3 blocks of the weight by 4 blocks of columns; a consumer multiplies all 3 by its own two columns
    columns  3 blocks of columns by 4 blocks of the weight; a consumer multiplies all 3 by its own two blocks

so that ROW_TILES tiles of the first form and COLUMN_TILES of the second cover 3 * ROW_TILES + 4 * COLUMN_TILES blocks
of the weight: 433 rows take 7 blocks, not the 8 or 9 of equal tiles, and no tile is smaller than another. A group of
12 blocks of columns has 3 ROW_TILES + 4 COLUMN_TILES tiles side by side, which read the same inputs at about the same
time. A stage of the ring is 7 blocks of 64 x 64, the 3 that every consumer reads first, for either form.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PANELS = gl.constexpr(7)  # blocks of a stage
SHARED_PANELS = gl.constexpr(3)  # those of them that both consumers read


@gluon.jit
def turns_of(num_user_tiles, num_tiles):
    """(tiles of the users that this program takes, tiles of both kinds).

    Users' tiles are dealt from the first program upwards, those of the candidates from the last one downwards: what
    the last round of the one lacks, the first of the other fills.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    user_turns = (num_user_tiles - program + programs - 1) // programs
    return user_turns, user_turns + (num_tiles + program) // programs


@gluon.jit
def tile_at(turn, user_turns, ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr):
    """(whether it is the users', whether its form is rows, first block of columns, first block of the weight)."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    of_users = turn < user_turns
    tile = gl.where(of_users, program + turn * programs, programs - 1 - program + (turn - user_turns) * programs)
    per_group: gl.constexpr = 3 * ROW_TILES + 4 * COLUMN_TILES
    group = tile // per_group
    place = tile % per_group
    rows = place < 3 * ROW_TILES
    column = 0
    block = 0
    if COLUMN_TILES > 0:
        other = place - 3 * ROW_TILES
        column = group * 12 + 3 * (other // COLUMN_TILES)
        block = 3 * ROW_TILES + 4 * (other % COLUMN_TILES)
    if ROW_TILES > 0:
        column = gl.where(rows, group * 12 + 4 * (place // ROW_TILES), column)
        block = gl.where(rows, 3 * (place % ROW_TILES), block)
    return of_users, rows, column, block


@gluon.jit
def _load_tile(
    w_desc, x_desc, ring, full, empty, step, num_steps, column, block, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w_desc.dtype
    X_LAYOUT: gl.constexpr = x_desc.layout
    FIRST_W: gl.constexpr = 0 if ROWS else SHARED_PANELS
    FIRST_X: gl.constexpr = SHARED_PANELS if ROWS else 0
    NUM_W: gl.constexpr = 3 if ROWS else 4
    for k in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), PANELS * w_desc.block_type.nbytes)
        for i in gl.static_range(NUM_W):
            tma.async_copy_global_to_shared(
                w_desc, [(block + i) * 64, k * 64], full.index(stage), ring.index(stage * PANELS + FIRST_W + i)
            )
        for i in gl.static_range(PANELS - NUM_W):
            entry = (column + i) // BLOCKS_N
            panel = ring.index(stage * PANELS + FIRST_X + i)._reinterpret(dtype, [1, 64, 64], X_LAYOUT)
            tma.async_copy_global_to_shared(
                x_desc, [entry, k * 64, ((column + i) % BLOCKS_N) * 64], full.index(stage), panel
            )
        step += 1
    return step


@gluon.jit
def load(
    w_desc, x_desc, wu_desc, xu_desc, ring, barriers, num_user_tiles, num_tiles, num_steps, num_user_steps,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USERS: gl.constexpr,
):  # fmt: skip
    """The loading warpgroup. The ring does not stop between tiles, nor between users and candidates."""
    full, empty = barriers
    step = 0
    user_turns, turns = turns_of(num_user_tiles, num_tiles)
    for turn in range(turns):
        of_users, rows, column, block = tile_at(turn, user_turns, ROW_TILES, COLUMN_TILES)
        if USERS:  # noqa: SIM102
            if of_users:
                if rows:
                    step = _load_tile(
                        wu_desc, xu_desc, ring, full, empty, step, num_user_steps, column, block, BLOCKS_N, STAGES, True
                    )
                else:
                    step = _load_tile(
                        wu_desc, xu_desc, ring, full, empty, step, num_user_steps, column, block, BLOCKS_N, STAGES,
                        False,
                    )  # fmt: skip
        if not of_users:
            if rows:
                step = _load_tile(
                    w_desc, x_desc, ring, full, empty, step, num_steps, column, block, BLOCKS_N, STAGES, True
                )
            else:
                step = _load_tile(
                    w_desc, x_desc, ring, full, empty, step, num_steps, column, block, BLOCKS_N, STAGES, False
                )
