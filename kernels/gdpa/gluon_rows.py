"""What GDPA's Hopper backward reads of the rows that its programs are dealt."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_of(table_ptr, item, HEADS: gl.constexpr):
    """The fields of `kernels.jagged.attention_rows.row_table` for an item, a row and key head; and that head."""
    entry = table_ptr + item // HEADS * 8
    q_start = gl.load(entry)
    q_length = gl.load(entry + 1)
    k_start = gl.load(entry + 2)
    k_length = gl.load(entry + 3)
    first_tile = gl.load(entry + 4)
    return q_start, q_length, k_start, k_length, first_tile, item % HEADS
