"""Items of the Hopper attention forward: in which order a program takes them, and half tiles in pairs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.scheduling import MAIN_BEGIN, MAIN_COUNT, MAIN_POSITION

ROWS = gl.constexpr(64)  # queries of one consumer


@gluon.jit
def mixed_turn(turn, common, BLOCK_K: gl.constexpr):
    """Which round of the list (longest items first) comes in turn `turn`; all programs have at least `common` rounds.

    With short blocks: the longest, the shortest, the second longest and so on, since short rows wait for memory and
    long ones leave it idle.
    """
    if BLOCK_K < 128:
        turn = gl.where(turn < common, gl.where(turn % 2 == 0, turn // 2, common - 1 - turn // 2), turn)
    return turn


@gluon.jit
def paired_item(entry, head, HEADS: gl.constexpr):
    """(first query, how many there are, head, 1 if that is the first of two) of an item of a list of half tiles.

    A half of a whole tile stands for the tile and half of the heads; a single half for itself and all heads in pairs.
    """
    begin = gl.load(entry + MAIN_BEGIN)
    count = gl.load(entry + MAIN_COUNT)
    second = (gl.load(entry + MAIN_POSITION) // ROWS) % 2
    alone = (second == 0) & (count <= ROWS)
    count = gl.where(second == 0, count, gl.minimum(count, ROWS) + ROWS)
    head = gl.where(alone, 2 * head, head + second * (HEADS // 2))
    return begin - second * ROWS, count, head, alone.to(gl.int32)
