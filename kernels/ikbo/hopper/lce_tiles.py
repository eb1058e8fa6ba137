"""Tiles of the Hopper product of linear compression: shapes, their order, and how they are loaded (Gluon).

Everything is made of blocks of 64: of the M rows of a weight and of the N columns of an entry of the batch. A tile has
12 products of blocks, 3 x 4, all of one block of columns, and comes in two forms:

    rows     3 blocks of the weight by 4 entries; a consumer multiplies all 3 by its own two entries
    columns  3 entries by 4 blocks of the weight; a consumer multiplies all 3 by its own two blocks of the weight

so that ROW_TILES tiles of the first form and COLUMN_TILES of the second cover 3 * ROW_TILES + 4 * COLUMN_TILES blocks
of the weight: 433 rows take 7 blocks, not the 8 or 9 of equal tiles, and no tile is smaller than another. Neighbouring
entries mostly have one owner, so that the same block is added to most of their products, and read once.

The tiles of a chunk of 12 entries are neighbours, so that they read the same inputs at about the same time. A stage of
the ring is 7 blocks of 64 x 64, the 3 that every consumer reads first, for either form.

If there are few users, their tiles have one block where others have three (SHARED below): more programs share them, and
candidates wait less. Where nearly every candidate has a user of its own, a tile of candidates runs through the
tokens of its users first (WITHIN), and there are no tiles of users.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PANELS = gl.constexpr(7)  # blocks of a stage
SHARED_PANELS = gl.constexpr(3)  # those of them that both consumers read
CHUNK = 12  # entries
_CHUNK = gl.constexpr(CHUNK)


def num_tiles(num_entries: int, blocks_n: int, tiles: tuple[int, int], shared: int = 3) -> int:
    """Tiles of a batch, whose shared side has so many blocks."""
    chunks, rest = divmod(num_entries, CHUNK)
    by_rows, by_columns = 3 * tiles[0] // shared, tiles[1]
    per_chunk = 3 * by_rows + CHUNK // shared * by_columns
    return blocks_n * (chunks * per_chunk + -(-rest // 4) * by_rows + -(-rest // shared) * by_columns)


@gluon.jit
def turns_of(num_user_tiles, num_tiles):
    """(tiles of the users that this program takes, tiles of both kinds).

    Users' tiles are dealt from the first program upwards, those of the candidates from the last one downwards, so that
    the last round of the one and the first of the other fill each other.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    user_turns = (num_user_tiles - program + programs - 1) // programs
    return user_turns, user_turns + (num_tiles + program) // programs


@gluon.jit
def tile_at(
    turn, user_turns, num_entries, OF_USERS: gl.constexpr, SHARED: gl.constexpr,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr,
):  # fmt: skip
    """(whether its form is rows, first entry, block of columns, first block of the weight)."""
    BY_ROWS: gl.constexpr = 3 * ROW_TILES // SHARED
    PER_CHUNK: gl.constexpr = BLOCKS_N * (3 * BY_ROWS + _CHUNK // SHARED * COLUMN_TILES)
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if OF_USERS:
        tile = program + turn * programs
    else:
        tile = programs - 1 - program + (turn - user_turns) * programs
    full_chunks = num_entries // _CHUNK
    chunk = gl.minimum(tile // PER_CHUNK, full_chunks)
    rest = tile - chunk * PER_CHUNK
    # The last chunk may be smaller.
    entries = gl.minimum(num_entries - chunk * _CHUNK, _CHUNK)
    row_places = (entries + 3) // 4 * BY_ROWS
    per_block = row_places + (entries + SHARED - 1) // SHARED * COLUMN_TILES
    n = rest // per_block
    place = rest % per_block
    rows = place < row_places
    entry = chunk * _CHUNK
    block = 0
    if COLUMN_TILES > 0:
        other = place - row_places
        column_entry = entry + SHARED * (other // COLUMN_TILES)
        block = 3 * ROW_TILES + 4 * (other % COLUMN_TILES)
        if ROW_TILES > 0:
            entry = gl.where(rows, entry + 4 * (place // BY_ROWS), column_entry)
            block = gl.where(rows, SHARED * (place % BY_ROWS), block)
        else:
            entry = column_entry
    else:
        entry = entry + 4 * (place // BY_ROWS)
        block = SHARED * (place % BY_ROWS)
    return rows, entry, n, block


@gluon.jit
def _load_steps(
    w_desc, x_desc, ring, full, empty, step, num_steps, entries, n, block,
    SHARED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w_desc.dtype
    X_LAYOUT: gl.constexpr = x_desc.layout
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    FIRST_W: gl.constexpr = 0 if ROWS else SHARED_PANELS
    FIRST_X: gl.constexpr = SHARED_PANELS if ROWS else 0
    NUM_W: gl.constexpr = SHARED if ROWS else 4
    NUM_X: gl.constexpr = 4 if ROWS else SHARED
    for k in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), (SHARED + 4) * w_desc.block_type.nbytes)
        for i in gl.static_range(NUM_W):
            tma.async_copy_global_to_shared(
                w_desc, [(block + i) * 64, k * BLOCK_K], full.index(stage), ring.index(stage * PANELS + FIRST_W + i)
            )
        for i in gl.static_range(NUM_X):
            panel = ring.index(stage * PANELS + FIRST_X + i)._reinterpret(dtype, [1, 64, BLOCK_K], X_LAYOUT)
            if dtype.primitive_bitwidth == 8:
                tma.async_copy_global_to_shared(x_desc, [entries[i], n * 64, k * BLOCK_K], full.index(stage), panel)
            else:
                tma.async_copy_global_to_shared(x_desc, [entries[i], k * BLOCK_K, n * 64], full.index(stage), panel)
        step += 1
    return step


@gluon.jit
def _neighbours(entry):
    return entry, entry + 1, entry + 2, entry + 3


@gluon.jit
def _owners_of(owners, entry, num_entries):
    last = num_entries - 1
    first, second = gl.load(owners + entry), gl.load(owners + gl.minimum(entry + 1, last))
    third, fourth = gl.load(owners + gl.minimum(entry + 2, last)), gl.load(owners + gl.minimum(entry + 3, last))
    return first, second, third, fourth


@gluon.jit
def _load_tile(
    w_desc, x_desc, wu_desc, xu_desc, ring, barriers, owners, step, num_steps, num_user_steps, num_entries, entry, n,
    block, SHARED: gl.constexpr, STAGES: gl.constexpr, WITHIN: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    full, empty = barriers
    if WITHIN:
        of_users = _owners_of(owners, entry, num_entries)
        step = _load_steps(
            wu_desc, xu_desc, ring, full, empty, step, num_user_steps, of_users, n, block, SHARED, STAGES, ROWS
        )
    entries = _neighbours(entry)
    step = _load_steps(w_desc, x_desc, ring, full, empty, step, num_steps, entries, n, block, SHARED, STAGES, ROWS)
    # A stage for the results.
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.arrive(full.index(stage), count=1)
    return step + 1


@gluon.jit
def load(
    w_desc, x_desc, wu_desc, xu_desc, ring, barriers, owners, num_user_tiles, num_tiles, num_steps, num_user_steps,
    num_entries, num_users, ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr,
    STAGES: gl.constexpr, USER_SHARED: gl.constexpr, WITHIN: gl.constexpr,
):  # fmt: skip
    """The loading warpgroup. The ring does not stop between tiles, nor between users and candidates."""
    step = 0
    user_turns, turns = turns_of(num_user_tiles, num_tiles)
    if USER_SHARED > 0:
        for turn in range(user_turns):
            rows, entry, n, block = tile_at(
                turn, user_turns, num_users, True, USER_SHARED, ROW_TILES, COLUMN_TILES, BLOCKS_N
            )
            if rows:
                step = _load_tile(
                    wu_desc, xu_desc, wu_desc, xu_desc, ring, barriers, owners, step, num_user_steps, 0, num_users,
                    entry, n, block, USER_SHARED, STAGES, False, True,
                )  # fmt: skip
            else:
                step = _load_tile(
                    wu_desc, xu_desc, wu_desc, xu_desc, ring, barriers, owners, step, num_user_steps, 0, num_users,
                    entry, n, block, USER_SHARED, STAGES, False, False,
                )  # fmt: skip
    for turn in range(user_turns, turns):
        rows, entry, n, block = tile_at(turn, user_turns, num_entries, False, 3, ROW_TILES, COLUMN_TILES, BLOCKS_N)
        if rows:
            step = _load_tile(
                w_desc, x_desc, wu_desc, xu_desc, ring, barriers, owners, step, num_steps, num_user_steps, num_entries,
                entry, n, block, SHARED_PANELS, STAGES, WITHIN, True,
            )  # fmt: skip
        else:
            step = _load_tile(
                w_desc, x_desc, wu_desc, xu_desc, ring, barriers, owners, step, num_steps, num_user_steps, num_entries,
                entry, n, block, SHARED_PANELS, STAGES, WITHIN, False,
            )  # fmt: skip
