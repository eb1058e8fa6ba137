"""What Triton kernels for short rows of jagged attention and GDPA share: positions in a tile, loads, stores and masks.

A row of at most LONGEST queries and keys is one tile of LONGEST positions. If rows are short enough, a tile holds two
or four heads of a row, and pairs of different heads are masked.

Shared with `gdpa`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LONGEST = 64
PLACES = tl.constexpr(LONGEST)
# With assertions, except those for overflow. One stage: a loop over heads has no shared memory for two.
OPTIONS = {"num_warps": 4, "num_stages": 1, "debug": True, "sanitize_overflow": False}
# Registers of a thread of a backward, so that three programs fit on a multiprocessor.
BACKWARD_REGISTERS = 168


def likely_short(num_queries: int, num_keys: int, num_rows: int, max_q: int, max_k: int) -> int:
    """LONGEST if enough rows are likely to have no more queries and keys than that, else 0.

    The host knows only the longest and the mean length. For rows uniform in 1..256, a quarter of which are short,
    serving these separately gains a little; for rows in 1..512, an eighth of which are short, nothing.
    """
    longest, mean = max(max_q, max_k), max(num_queries, num_keys) / max(num_rows, 1)
    return LONGEST if longest <= LONGEST or mean <= min(2.5 * LONGEST, 0.6 * longest) else 0


@triton.jit
def row_of(q_offsets, k_offsets, row, max_q, max_k, CHECKED: tl.constexpr):
    """(first query int64, number of queries, first key int64, number of keys)."""
    q_begin = tl.load(q_offsets + row).to(tl.int64)
    k_begin = tl.load(k_offsets + row).to(tl.int64)
    num_queries = (tl.load(q_offsets + row + 1) - q_begin).to(tl.int32)
    num_keys = (tl.load(k_offsets + row + 1) - k_begin).to(tl.int32)
    if CHECKED:
        tl.device_assert((num_queries <= max_q) & (num_keys <= max_k), "a jagged row is longer than its maximum")
    return q_begin, num_queries, k_begin, num_keys


@triton.jit
def heads_of(longest, TOGETHER: tl.constexpr):
    """(how many heads share a tile, log2 of the places that each has in it)."""
    two = (longest <= PLACES // 2) & TOGETHER
    four = (longest <= PLACES // 4) & TOGETHER
    return tl.where(four, 4, tl.where(two, 2, 1)), tl.where(four, 4, tl.where(two, 5, 6))


@triton.jit
def load(base, stride_n, stride_h, position, head, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[PLACES, BLOCK] of a tile; zeros where no value exists."""
    column = tl.arange(0, BLOCK)[None, :]
    pointers = base + (position * stride_n + head.to(tl.int64) * stride_h)[:, None] + column
    return tl.load(pointers, mask=inside[:, None] & (column < WIDTH), other=0.0)


@triton.jit
def store(base, position, head, inside, values, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    pointers = base + ((position * HEADS + head) * WIDTH)[:, None] + column
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside[:, None] & (column < WIDTH))


@triton.jit
def meets(left, right, position, head, WINDOWED: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Whether queries and keys are of one head and see each other, [queries, keys] or the other way round."""
    together = head[:, None] == head[None, :]
    if WINDOWED:
        ahead = position[None, :] - position[:, None]
        if KEYS_FIRST:
            ahead = -ahead
        together = together & (ahead >= -left) & (ahead <= right)
    return together
