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

    In units of a program's step: each tile takes two steps more than its rows. Equal groups make whole waves of tiles.
    Otherwise programs share the work until the last tiles: half of the longest piece is left then, or if those were
    begun first and are short enough, nothing. Whole groups count as the mean of equal ones and of such of which the
    longest has `_SKEW` times the mean. The sums of a piece move 8 bytes of each element, in two more kernels.
    """
    tiles = -(-n // tile[0]) * -(-k // tile[1])

    def waves(count: int, length: float) -> float:
        return -(-tiles * count // programs) * (length + 2)

    def shared(count: float, longest: float, left: float) -> float:
        return max(tiles * (steps + 2 * count) / programs + left * longest, waves(1, longest))

    def cost(parts: int) -> float:
        length = -(-steps // parts)
        if parts == 1:
            longest = min(length, _SKEW * steps / groups)
            uneven = shared(groups, longest, 0 if longest_first else 0.5)
            return waves(1, length) if groups == 1 else (waves(groups, steps / groups) + uneven) / 2
        pieces = parts if groups == 1 else steps / length + groups / 2
        work = waves(parts, length) if groups == 1 else shared(pieces, length, 0.5)
        return work + 5 + 2.5e-6 * n * k * pieces

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
