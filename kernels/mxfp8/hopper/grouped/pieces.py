"""Weight gradients of few tiles: groups are cut into pieces of rows, whose float32 sums are added in a fixed order.

A tile of a weight gradient takes as long as its group has rows. Where there are fewer tiles than a few for each
multiprocessor, those of the longest group, or the last ones, leave most multiprocessors without work. The host does not
know how the rows are divided into groups, so the length of a piece comes from what it does know.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.core.launch import processors
from kernels.mxfp8.triton import pieces

STEP = 128  # rows, a multiple of which a piece has: its elements share no scale with another piece's
_MOST_PARTS = 16  # of all rows
_SKEW = 3  # the longest of many groups, in units of the mean
_GAIN = 0.95  # of the time: what is below the uncertainty of the model does not pay for memory


def parts_of(n: int, k: int, steps: int, groups: int, tile: tuple[int, int], longest_first: bool, programs: int) -> int:
    """Into how many parts `steps` times 128 rows are cut for weight gradients [groups, n, k], 1 for none.

    In units of a program's step: each tile takes two steps more than its rows. The sums of a piece move 8 bytes of each
    element, and two more kernels are launched. One group makes whole waves of tiles. Of several, the programs share the
    work; half of the longest piece is left at the end, unless those were begun first and are short enough.
    """
    tiles = -(-n // tile[0]) * -(-k // tile[1])

    def cost(parts: int) -> float:
        length = -(-steps // parts)
        pieces = parts if groups == 1 else groups if parts == 1 else steps / length + groups / 2
        sums = 5 + 2.5e-6 * n * k * pieces if parts > 1 else 0
        if groups == 1:
            return -(-tiles * parts // programs) * (length + 2) + sums
        longest = min(length, _SKEW * steps / groups)
        work = max(tiles * (steps + 2 * pieces) / programs, longest * -(-tiles // programs))
        return work + (0 if parts == 1 and longest_first else longest / 2) + sums

    best = min(range(1, min(_MOST_PARTS, steps) + 1), key=cost)
    return best if groups == 1 or cost(best) < _GAIN * cost(1) else 1


def in_pieces(
    product: Callable[[Tensor, torch.dtype], Tensor],
    ends: Tensor,
    rows: int,
    shape: tuple[int, int],
    tile: tuple[int, int],
    dtype: torch.dtype,
    longest_first: bool,
) -> Tensor:
    """[E, N, K] of `dtype`: `product(ends, dtype)`, the weight gradients of groups in `rows` rows.

    `shape` is (N, K), `tile` that of what a program computes at a time. `longest_first`: the product begins with the
    longest of few groups.
    """
    groups, steps = ends.shape[0], -(-rows // STEP)
    parts = parts_of(*shape, steps, groups, tile, longest_first, processors(ends.device))
    if parts == 1:
        return product(ends, dtype)
    piece_ends, firsts = pieces.cut(ends, rows, -(-steps // parts) * STEP)
    return pieces.add(product(piece_ends, torch.float32), firsts, dtype)
