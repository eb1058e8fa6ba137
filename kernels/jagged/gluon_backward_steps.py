"""Device functions of the attention backward in `gluon_attention_backward`: what its warpgroups share, and the loader.

A tile of queries has 64 of them, a tile of keys 128. A step is one tile of queries against one tile of keys, for one
query head. Key tiles that no query sees have no steps and are not loaded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Tiles of queries (q, g and their numbers) in flight; tiles of keys (k and v); and ds of steps.
STAGES = gl.constexpr(2)


@gluon.jit
def share_of(program, programs, items):
    """How many items this program takes: `item_of(turn)` for turns below it."""
    full = items // programs
    place = program if full % 2 == 0 else programs - 1 - program
    return full + (place < items - full * programs).to(gl.int32)


@gluon.jit
def item_of(turn, program, programs):
    """Items come longest first; going back and forth over the programs evens out their sums."""
    place = program if turn % 2 == 0 else programs - 1 - program
    return turn * programs + place


@gluon.jit
def row_of(table_ptr, item, HEADS: gl.constexpr):
    """The fields of `attention_rows.row_table`, and which key head."""
    entry = table_ptr + item // HEADS * 8
    q_start = gl.load(entry)
    q_length = gl.load(entry + 1)
    k_start = gl.load(entry + 2)
    k_length = gl.load(entry + 3)
    first_tile = gl.load(entry + 4)
    return q_start, q_length, k_start, k_length, first_tile, item % HEADS


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
def load_tiles(
    descs, buffers, bars, table_ptr, items, stats_stride, left, right,
    Q_STEP: gl.constexpr, K_STEP: gl.constexpr, V_STEP: gl.constexpr, G_STEP: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """The TMA warpgroup. Q_STEP is how many columns there are from one head to the next in the matrix of q_desc.

    After the last step it announces one more that carries no data: the consumers always look one step ahead.
    """
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc = descs
    k_s, v_s, q_s, g_s, _ds_s, lse_s, delta_s = buffers
    q_full, g_full, stage_empty, kv_full, kv_empty, _ds_full, _ds_empty = bars
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile = 0
    step = 0
    for turn in range(share_of(program, programs, items)):
        item = item_of(turn, program, programs)
        q_start, q_length, k_start, k_length, first_tile, head = row_of(table_ptr, item, HEADS)
        query_tiles = (q_length + 63) // 64
        key_tiles = gl.maximum((k_length + 127) // 128, 1)
        for j in range(key_tiles):
            low, high = query_tiles_of(j, key_tiles, query_tiles, left, right, LEFT, RIGHT)
            if high > low:
                slot = tile & 1
                full = kv_full.index(slot)
                mbarrier.wait(kv_empty.index(slot), (tile // 2 & 1) ^ 1)
                mbarrier.expect(full, 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
                for c in gl.static_range(2):
                    key = k_start + j * 128 + c * 64
                    tma.async_copy_global_to_shared(k_desc, [key, head * K_STEP], full, k_s.index(slot * 2 + c))
                for c in gl.static_range(2):
                    key = k_start + j * 128 + c * 64
                    tma.async_copy_global_to_shared(v_desc, [key, head * V_STEP], full, v_s.index(slot * 2 + c))
                tile += 1
            for member in range(GROUP):
                q_head = head * GROUP + member
                for i in range(low, high):
                    stage = step % STAGES
                    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
                    query = q_start + i * 64
                    statistic = q_head * stats_stride + (first_tile + i) * 64
                    full = q_full.index(stage)
                    mbarrier.expect(full, q_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(q_desc, [query, q_head * Q_STEP], full, q_s.index(stage))
                    tma.async_copy_global_to_shared(lse_desc, [statistic], full, lse_s.index(stage))
                    full = g_full.index(stage)
                    mbarrier.expect(full, g_desc.block_type.nbytes + 64 * 4)
                    tma.async_copy_global_to_shared(g_desc, [query, q_head * G_STEP], full, g_s.index(stage))
                    tma.async_copy_global_to_shared(delta_desc, [statistic], full, delta_s.index(stage))
                    step += 1
    stage = step % STAGES
    mbarrier.wait(stage_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(q_full.index(stage), count=1)
    mbarrier.wait(kv_empty.index(tile & 1), (tile // 2 & 1) ^ 1)
    mbarrier.arrive(kv_full.index(tile & 1), count=1)
