"""Which rows each program of GDPA's Hopper backward walks: those of `kernels.jagged.attention_rows.row_table`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
    """The fields of `row_table`, and which key head."""
    entry = table_ptr + item // HEADS * 8
    q_start = gl.load(entry)
    q_length = gl.load(entry + 1)
    k_start = gl.load(entry + 2)
    k_length = gl.load(entry + 3)
    first_tile = gl.load(entry + 4)
    return q_start, q_length, k_start, k_length, first_tile, item % HEADS
