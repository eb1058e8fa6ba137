"""Device functions of the attention backward in `hopper.backward`: what its warpgroups share, and the loader.

A tile of queries has 64 of them, a tile of keys 128. An item is a tile of keys of one key head; a step is one tile of
queries of one query head against it. An item meets its runs of queries one after the other. Key tiles that no query
sees have no steps and are not loaded.

Shared with `gdpa`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.attention.hopper.tables import COLUMNS, FIRST_TILE, K_LENGTH, K_START, LATER, NUMBER, Q_LENGTH, Q_START

# Tiles of queries (q, g and their numbers) in flight; tiles of keys (k and v); and ds of steps.
STAGES = gl.constexpr(2)


@gluon.jit
def turns_of(num_items):
    """How many of the items this program takes: item `turn * programs + program` in each turn below it."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return (num_items - program + programs - 1) // programs


@gluon.jit
def _item_of(turn, num_items):
    """After the last item that one."""
    return gl.minimum(turn * gl.num_programs(0) + gl.program_id(0), num_items - 1)


@gluon.jit
def keys_of(table_ptr, turn, num_items, HEADS: gl.constexpr, RUNS: gl.constexpr):
    """The columns of `hopper.tables.tile_table` about the keys of an item, its number in the row, and its key head."""
    item = _item_of(turn, num_items)
    entry = table_ptr + (1 + item // HEADS * RUNS).to(gl.int64) * COLUMNS
    return gl.load(entry + K_START), gl.load(entry + K_LENGTH), gl.load(entry + NUMBER), item % HEADS


@gluon.jit
def queries_of(table_ptr, turn, num_items, HEADS: gl.constexpr, RUNS: gl.constexpr):
    """Its columns about a run of queries: where and how many they are, their first tile, and how many tiles come later.

    `turn` counts runs, RUNS to an item.
    """
    item = _item_of(turn // RUNS, num_items)
    entry = table_ptr + (1 + item // HEADS * RUNS + turn % RUNS).to(gl.int64) * COLUMNS
    later = 0
    if RUNS > 1:
        later = gl.load(entry + LATER)
    return gl.load(entry + Q_START), gl.load(entry + Q_LENGTH), gl.load(entry + FIRST_TILE), later


@gluon.jit
def tile_of(table_ptr, turn, num_items, HEADS: gl.constexpr):
    """(`keys_of`, `queries_of`) an item of a table of one run of queries a row."""
    return keys_of(table_ptr, turn, num_items, HEADS, 1), queries_of(table_ptr, turn, num_items, HEADS, 1)


@gluon.jit
def query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Query tiles [low, high) that see a key of tile j. The last key tile also takes the queries that see nothing."""
    low = 0
    high = query_tiles
    if RIGHT:
        low = gl.minimum(gl.maximum(j * 128 - right, 0) // 64, query_tiles)
    if LEFT:
        reach = gl.minimum((j * 128 + 127 + left) // 64 + 1, query_tiles)
        high = query_tiles if j == key_tiles - 1 else gl.maximum(reach, low)
    return low, high


@gluon.jit
def key_tiles_of(i, key_tiles, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """First and last key tile that adds to dq of query tile i."""
    first = 0
    last = key_tiles - 1
    if LEFT:
        first = gl.minimum(gl.maximum(i * 64 - left, 0) // 128, key_tiles - 1)
    if RIGHT:
        last = gl.minimum((i * 64 + 63 + right) // 128, key_tiles - 1)
    return first, last


@gluon.jit
def raise_flag(flags_ptr, index):
    if index >= 0:
        gl.atomic_add(flags_ptr + index, 1, sem="release", scope="gpu")


@gluon.jit
def await_flag(flags_ptr, index, height, stage_empty, step, b):
    """Wait until the flag of the step before `step` has the height that its dq needs. Returns b, or -1 if it is raised.

    Before it waits for other programs, this one raises all its own flags: otherwise they could wait for each other. The
    flag is read by an atomic, whose result is the same for all warps: they have to take the same branches.
    """
    if height > 0:
        seen = gl.atomic_add(flags_ptr + index, 0, sem="acquire", scope="gpu")
        if seen < height:
            mbarrier.wait(stage_empty.index((step - 1) % STAGES), (step - 1) // STAGES & 1, pred=step > 1)
            raise_flag(flags_ptr, b)
            b = -1
            while seen < height:
                seen = gl.atomic_add(flags_ptr + index, 0, sem="acquire", scope="gpu")
    return b


@gluon.jit
def steps_of(keys, queries, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """How many key tiles the row of an item has, and which tiles [low, high) of a run of queries see the item's."""
    _k_start, k_length, j, _head = keys
    _q_start, q_length, _first_tile, _later = queries
    key_tiles = gl.maximum((k_length + 127) // 128, 1)
    low, high = query_tiles_of(j, key_tiles, (q_length + 63) // 64, left, right, LEFT, RIGHT)
    return key_tiles, low, high


@gluon.jit
def has_steps(keys, queries, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Of an item, by its first run of queries."""
    _q_start, _q_length, _first_tile, later = queries
    _key_tiles, low, high = steps_of(keys, queries, left, right, LEFT, RIGHT)
    return high - low + later > 0


@gluon.jit
def _load_keys(descs, buffers, bars, keys, tile, K_STEP: gl.constexpr, V_STEP: gl.constexpr):
    """Keys and values of an item, which is number `tile` of those that have steps."""
    _q_desc, k_desc, v_desc, _g_desc, _statistics_desc = descs
    k_s, v_s, _q_s, _g_s, _ds_s, _lse_s, _delta_s = buffers
    _q_full, _g_full, _stage_empty, kv_full, kv_empty, _exchanged, _dq_turn, _done = bars
    k_start, _k_length, j, head = keys
    slot = tile & 1
    full = kv_full.index(slot)
    mbarrier.wait(kv_empty.index(slot), (tile // 2 & 1) ^ 1)
    mbarrier.expect(full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
    for half in gl.static_range(2):
        key = k_start + j * 128 + half * 64
        tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], full, k_s.index(slot * 2 + half))
        tma.async_copy_global_to_shared(v_desc, [key, head * V_STEP], full, v_s.index(slot * 2 + half))


@gluon.constexpr_function
def _discards(dim):
    """PTX of a lane's share of the lines of a tile of sums."""
    return " ".join(f"discard.global.L2 [$1+{part * 4096}], 128;" for part in range(dim // 16)) + " mov.b32 $0, 0;"


@gluon.jit
def forget(scratch_ptr, index, D: gl.constexpr):
    """Discard sums of dq that have been read, at `index` unless it is negative: L2 need not write them to memory."""
    if index >= 0:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        address = scratch_ptr.to(gl.int64) + index.to(gl.int64) * (256 * D) + lane * 128
        gl.inline_asm_elementwise(_discards(D), "=r,l", [address], gl.int32, False, 1)


@gluon.jit
def load_tiles(
    descs, buffers, bars, table_ptr, scratch_ptr, flags_ptr, tiles_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RUNS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warp. Q_STEP is the number of columns from one head to the next in the matrix of q_desc.

    It also keeps the order in which key tiles add to dq. A flag counts how many have added to a tile of dq. It is
    raised when both consumers are seen to be done with the step after, in which they do it; `a`, `b` and `c` are the
    flags to raise for the last three steps (-1 for none), `read`, `older` and `oldest` those whose sums the consumers
    have read since. dq_turn lets the consumers add to dq of a step once its flag counts the key tiles before. After the
    last step comes one more without data, because consumers look one step ahead.
    """
    q_desc, _k_desc, _v_desc, g_desc, statistics_desc = descs
    _k_s, _v_s, q_s, g_s, _ds_s, lse_s, delta_s = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, _exchanged, dq_turn, done = bars
    num_items = gl.load(table_ptr) * HEADS
    tile = 0
    step = 0
    a = -1
    b = -1
    c = -1
    index = 0
    height = 0
    read = -1
    older = -1
    oldest = -1
    deltas = HEADS * GROUP * tiles_stride * 64
    D: gl.constexpr = q_desc.block_type.shape[1]
    turns = turns_of(num_items)
    keys = keys_of(table_ptr, 0, num_items, HEADS, RUNS)
    queries = queries_of(table_ptr, 0, num_items, HEADS, RUNS)
    loaded = False
    for turn in range(turns):
        _k_start, _k_length, j, head = keys
        # Requested here, because the result takes a while.
        next_keys = keys_of(table_ptr, turn + 1, num_items, HEADS, RUNS)
        if has_steps(keys, queries, left, right, LEFT, RIGHT) & (loaded == 0):
            _load_keys(descs, buffers, bars, keys, tile, K_STEP, V_STEP)
            tile += 1
        loaded = False
        for run in range(RUNS):
            q_start, _q_length, first_tile, _later = queries
            key_tiles, low, high = steps_of(keys, queries, left, right, LEFT, RIGHT)
            following = queries_of(table_ptr, turn * RUNS + run + 1, num_items, HEADS, RUNS)
            # In the last run, behind which `following` is of the next item. The place of its keys is free once the
            # consumers have done this item's first step.
            countdown = gl.where(run == RUNS - 1, gl.minimum((high - low) * GROUP - 1, 2), -1)
            for member in range(GROUP):
                q_head = head * GROUP + member
                for i in range(low, high):
                    stage = step % STAGES
                    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
                    query = q_start + i * 64
                    statistic = (q_head * tiles_stride + first_tile + i) * 64
                    full = q_full.index(stage)
                    mbarrier.expect(full, q_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                    tma.async_copy_global_to_shared(statistics_desc, [statistic], full, lse_s.index(stage))
                    full = g_full.index(stage)
                    mbarrier.expect(full, g_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    tma.async_copy_global_to_shared(statistics_desc, [deltas + statistic], full, delta_s.index(stage))
                    raise_flag(flags_ptr, c)
                    b = await_flag(flags_ptr, index, height, stage_empty, step, b)
                    mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
                    forget(scratch_ptr, oldest, D)
                    first, last = key_tiles_of(i, key_tiles, left, right, LEFT, RIGHT)
                    index = q_head * tiles_stride + first_tile + i
                    height = j - first
                    oldest = older
                    older = read
                    read = gl.where((j == last) & (j > first), index, -1)
                    c = b
                    b = a
                    a = index if j < last else -1
                    step += 1
                    if countdown == 0:
                        wanted = has_steps(next_keys, following, left, right, LEFT, RIGHT)
                        if (turn + 1 < turns) & wanted:
                            _load_keys(descs, buffers, bars, next_keys, tile, K_STEP, V_STEP)
                            tile += 1
                            loaded = True
                    countdown -= 1
            queries = following
        keys = next_keys
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(q_full.index(stage), count=1)
    mbarrier.wait(kv_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(kv_full.index(tile & 1), count=1)
    raise_flag(flags_ptr, c)
    b = await_flag(flags_ptr, index, height, stage_empty, step, b)
    mbarrier.arrive(dq_turn.index((step & 1) ^ 1), count=1, pred=step > 0)
    mbarrier.wait(done, 0)
    raise_flag(flags_ptr, b)
    raise_flag(flags_ptr, a)
