"""The parameters of a step that the warpgroups of the Hopper backward of GDPA share, and the buffer of sums of dq."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The parameters of each step that the loader writes for the other warpgroups, so that they need no registers for them:
# they have none left, and a number that is spilled is spilled by 256 threads.
KIND = gl.constexpr(0)  # sums of the next six
QUERIES_LEFT = gl.constexpr(1)  # from the first query of the tile on
KEYS_LEFT = gl.constexpr(2)  # from the first key of the tile on
OFFSET = gl.constexpr(3)  # position of the first key minus that of the first query
SCRATCH_TILE = gl.constexpr(4)
QUERY = gl.constexpr(5)  # the first one's row in q
HEAD = gl.constexpr(6)  # of q
KEY = gl.constexpr(7)  # the first one's row in k
FIRST = gl.constexpr(1)  # no earlier key tile adds to dq of these queries
LAST = gl.constexpr(2)  # no later one does
STARTS = gl.constexpr(4)  # the first step of a key tile
LEAVES = gl.constexpr(8)  # the last step of a key tile
STOP = gl.constexpr(16)  # no step, but the end of them
# How many steps are known at a time: from one that is over, whose dq has still to be added, to two that are loaded
# ahead.
CONTROLS = gl.constexpr(4)
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
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
def sums_in(v_s, slot, C: gl.constexpr):
    """Buffer `slot` of the values, while it holds none, as a buffer of columns C of dq in lines of 32 sums."""
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    return v_s.index(slot * 2 + C)._reinterpret(gl.float32, [v_s.shape[2], 32], LINES)
