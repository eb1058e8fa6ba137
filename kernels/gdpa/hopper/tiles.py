"""Which tile of GDPA a persistent program works on next (Gluon).

`kernels.core.scheduling` lists the tiles, those of a row next to each other. RUN of them are one item per head, and
items are dealt to programs in alternating directions. Within a run the next tile mostly belongs to the same row and
head: if all keys and values of that row are still in shared memory, they are not loaded again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.scheduling import COLUMNS, dealt_position, num_rounds


@gluon.jit
def num_turns(num_tiles, num_heads, RUN: gl.constexpr):
    """How many tiles this program is dealt."""
    return num_rounds((num_tiles + RUN - 1) // RUN * num_heads) * RUN


@gluon.jit
def dealt_tile(schedule, num_tiles, turn, num_heads, RUN: gl.constexpr):
    """(pointer to the entry of the tile, head) of this program's tile number `turn`.

    The last run may lack tiles: the last tile is then repeated, which writes the same output twice.
    """
    item = dealt_position(turn // RUN)
    tile = gl.minimum(item // num_heads * RUN + turn % RUN, num_tiles - 1)
    return schedule + (1 + tile) * COLUMNS, item % num_heads
