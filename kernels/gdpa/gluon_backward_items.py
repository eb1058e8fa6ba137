"""Which key tiles a block of the Hopper backward of GDPA takes, and what it knows of each step of them.

An item is all key tiles of a row and key head, which the block OWNs, or one of them, dealt over the blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.jagged.gluon_backward_steps import turns_of
from kernels.scheduling import dealt_position, num_rounds

# What the loader leaves for the other warpgroups about each step, so that they keep none of it in registers: they have
# none to spare, and a number that a thread spills is spilled 256 times.
KIND = gl.constexpr(0)  # sums of the next six
QUERIES_LEFT = gl.constexpr(1)  # from the first query of the tile on
KEYS_LEFT = gl.constexpr(2)  # from the first key of the tile on
OFFSET = gl.constexpr(3)  # position of the first key less that of the first query
SCRATCH_TILE = gl.constexpr(4)
QUERY = gl.constexpr(5)  # the first one's row in q
HEAD = gl.constexpr(6)  # of q
KEY = gl.constexpr(7)  # the first one's row in k
FIRST = gl.constexpr(1)  # no earlier key tile adds to dq of these queries
LAST = gl.constexpr(2)  # no later one does
STARTS = gl.constexpr(4)  # the first step of a key tile
LEAVES = gl.constexpr(8)  # the last step of a key tile
STOP = gl.constexpr(16)  # no step, but the end of them
# How many steps are known at a time: one that is over, whose dq is still to be added, up to two that are loaded ahead.
CONTROLS = gl.constexpr(4)
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_WHOLE = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def write_control(controls, step, kind, queries, keys, offset, scratch_tile, query, head, key):
    index = gl.arange(0, 8, _LINE)
    x = gl.where(index == KIND, kind, gl.where(index == QUERIES_LEFT, queries, keys))
    x = gl.where(index == OFFSET, offset, gl.where(index == SCRATCH_TILE, scratch_tile, x))
    x = gl.where(index == QUERY, query, gl.where(index == HEAD, head, gl.where(index == KEY, key, x)))
    controls.index(step % CONTROLS).store(x)


@gluon.jit
def read_control(controls, step):
    """All fields of a step, for `field`; of some other one before the first step."""
    return controls.index((step + CONTROLS) % CONTROLS).load(_WHOLE)


@gluon.jit
def field(control, index: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, _WHOLE) == index, control, 0), 0)


@gluon.jit
def items_of(table_ptr, num_rows, HEADS: gl.constexpr, OWNED: gl.constexpr):
    """How many items there are: rows of `attention_rows.row_table`, or what the head of `tile_table` says, per head."""
    if OWNED:
        items = num_rows * HEADS
    else:
        items = gl.load(table_ptr) * HEADS
    return items


@gluon.jit
def dealt_turns(num_items, OWNED: gl.constexpr):
    """How many of them this block takes."""
    if OWNED:
        turns = num_rounds(num_items)
    else:
        turns = turns_of(num_items)
    return turns


@gluon.jit
def item_of(turn, num_items, OWNED: gl.constexpr):
    """The item of a turn, the last item after that. Tiles whose blocks wait for each other are dealt in their order."""
    if OWNED:
        item = dealt_position(turn)
    else:
        item = turn * gl.num_programs(0) + gl.program_id(0)
    return gl.minimum(item, num_items - 1)


@gluon.jit
def entry_of(table_ptr, item, HEADS: gl.constexpr, OWNED: gl.constexpr):
    """Pointer to the eight fields of an item."""
    row = item // HEADS
    if not OWNED:
        row += 1
    return table_ptr + row.to(gl.int64) * 8


@gluon.jit
def item_at(table_ptr, turn, num_items, HEADS: gl.constexpr, OWNED: gl.constexpr):
    """(first query, queries, first key, keys, first tile of queries, key tile, key head) of the item of a turn."""
    item = item_of(turn, num_items, OWNED)
    entry = entry_of(table_ptr, item, HEADS, OWNED)
    return (
        gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4),
        gl.load(entry + 5), item % HEADS,
    )  # fmt: skip


@gluon.jit
def key_tiles_in_item(j, key_tiles, OWNED: gl.constexpr):
    """First key tile of an item and the one after its last."""
    first = j
    end = j + 1
    if OWNED:
        first = j * 0
        end = key_tiles
    return first, end


@gluon.jit
def scratch_tile(q_head, member, first_tile, i, tiles_stride, GROUP: gl.constexpr, OWNED: gl.constexpr):
    """Which tile of the scratch has dq of tile i of the queries: a block that owns rows needs one row's at a time."""
    if OWNED:
        tile = (gl.program_id(0) * GROUP + member) * tiles_stride + i
    else:
        tile = q_head * tiles_stride + first_tile + i
    return tile
