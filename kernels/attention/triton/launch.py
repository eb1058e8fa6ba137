"""Host code that the Triton attention kernels share: tile sizes that fit a chip, and arguments in kernel form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernels.attention.bias import Bias, time_bucket_edges
from kernels.attention.triton.tile import UNLIMITED
from kernels.core.chip import multiplies_registers, shared_limit
from kernels.core.mask import Mask
from kernels.core.offsets import derived
from kernels.core.triton import block_width, precision_of


@dataclass(frozen=True)
class Tile:
    """`m` queries by `n` keys, what one program works on at a time."""

    m: int
    n: int
    warps: int
    stages: int


# (queries, keys, warps, stages) by kernel, bytes of an element and padded head width, without and with biases: the
# fastest that were timed on sm_90. Tiles of a table kernel are square, so that positions in one are those in the table
# modulo its width.
_TILES = {
    ("forward", 2, 64): ((128, 64, 4, 3), (64, 32, 4, 2)),
    ("forward", 2, 128): ((64, 64, 4, 3), (64, 32, 4, 2)),
    ("forward", 2, 256): ((64, 32, 4, 2), (64, 32, 8, 2)),
    ("query", 2, 64): ((64, 32, 4, 3), (64, 32, 4, 2)),
    ("query", 2, 128): ((64, 32, 4, 4), (64, 32, 4, 2)),
    ("query", 2, 256): ((128, 32, 8, 2), (128, 16, 8, 2)),
    ("key", 2, 64): ((64, 64, 4, 2), (32, 64, 4, 2)),
    ("key", 2, 128): ((32, 64, 4, 3), (16, 128, 8, 2)),
    ("key", 2, 256): ((64, 64, 8, 1), (64, 32, 8, 1)),
    ("table", 2, 64): ((32, 32, 4, 1),) * 2,
    ("table", 2, 128): ((32, 32, 4, 1),) * 2,
    ("table", 2, 256): ((16, 16, 4, 1),) * 2,
    ("forward", 4, 64): ((64, 64, 4, 2), (32, 32, 4, 2)),
    ("forward", 4, 128): ((32, 32, 4, 1), (32, 32, 4, 1)),
    ("forward", 4, 256): ((16, 16, 4, 1), (16, 16, 4, 1)),
    ("query", 4, 64): ((64, 32, 4, 2), (32, 32, 4, 1)),
    ("query", 4, 128): ((32, 32, 4, 1), (32, 32, 4, 1)),
    ("query", 4, 256): ((16, 16, 4, 1), (16, 16, 4, 1)),
    ("key", 4, 64): ((32, 64, 4, 1), (32, 32, 4, 1)),
    ("key", 4, 128): ((32, 32, 4, 1), (32, 32, 4, 1)),
    ("key", 4, 256): ((16, 16, 4, 1), (16, 16, 4, 1)),
    ("table", 4, 64): ((16, 16, 4, 1),) * 2,
    ("table", 4, 128): ((16, 16, 4, 1),) * 2,
    ("table", 4, 256): ((16, 16, 4, 1),) * 2,
}


def tile_of(
    kernel: str, itemsize: int, width: int, biased: bool, shared_limit: int, from_registers: bool = False
) -> Tile:
    """The tile of `kernel` ("forward", "query", "key" or "table") for heads padded to `width` on a chip whose programs
    may use `shared_limit` bytes of shared memory, and whose products read operands `from_registers` or do not."""
    tile = Tile(*_TILES[kernel, itemsize, max(width, 64)][biased])
    if from_registers:
        tile = beside_operands(tile, kernel, itemsize, width)
    scores = biased or not from_registers
    return shrink(tile, lambda tile: _shared_bytes(kernel, tile, itemsize, width, scores), shared_limit)


def beside_operands(tile: Tile, kernel: str, itemsize: int, width: int) -> Tile:
    """`tile` small enough, or with enough warps, for threads that hold operands as well as sums.

    In single precision they hold all parts of three tf32 products.
    """
    if itemsize < 4:
        return replace(tile, warps=8) if kernel == "key" or (kernel == "forward" and width > 128) else tile
    most = 32 if kernel == "forward" or width <= 64 else 16
    return replace(tile, m=min(tile.m, most), n=min(tile.n, most))


def shrink(tile: Tile, shared_bytes: Callable[[Tile], int], shared_limit: int) -> Tile:
    """`tile` with fewer stages, and then smaller, until `shared_bytes` of it are within the limit."""
    while shared_bytes(tile) > shared_limit and tile.stages > 1:
        tile = replace(tile, stages=tile.stages - 1)
    while shared_bytes(tile) > shared_limit and max(tile.m, tile.n) > 16:
        tile = replace(tile, m=max(tile.m // 2, 16), n=max(tile.n // 2, 16))
    return tile


def _shared_bytes(kernel: str, tile: Tile, itemsize: int, width: int, scores: bool) -> int:
    """Shared memory for the operands that stay, `stages` of those that stream by, and, where they come into shared
    memory, two tiles of scores or biases."""
    stay, stream = (tile.n, tile.m) if kernel == "key" else (tile.m, tile.n)
    return (stay + tile.stages * stream) * 2 * width * itemsize + scores * tile.m * tile.n * 8


def fit(kernel: str, q: Tensor, v: Tensor, bias: Bias | None) -> Tile:
    """`tile_of` for the widths, dtype and device of a call."""
    width = block_width(max(q.shape[2], v.shape[2]))
    chip = shared_limit(q.device), multiplies_registers(q.device)
    return tile_of(kernel, q.dtype.itemsize, width, bias is not None, *chip)


def constants(q: Tensor, v: Tensor, bias: Bias | None) -> dict[str, Any]:
    """The compile-time arguments that all kernels have."""
    return {
        "HEAD_DIM": q.shape[2],
        "VALUE_DIM": v.shape[2],
        "BLOCK_D": block_width(q.shape[2]),
        "BLOCK_V": block_width(v.shape[2]),
        "HAS_POSITION": bias is not None and bias.position is not None,
        "HAS_TIME": bias is not None and bias.time is not None,
        "PRECISION": precision_of(q.dtype),
    }


def rows_of(x: Tensor) -> Tensor:
    """`x` [N, H, d] with contiguous features, copied if they are not."""
    return x if x.stride(2) == 1 else x.contiguous()


def window_of(mask: Mask) -> tuple[int, int, int]:
    """(left, right, block size) with `UNLIMITED` for no limit; causal is a window that ends at the query."""
    left, right = (UNLIMITED if side < 0 else side for side in mask.window)
    return left, right, UNLIMITED if mask.block_size is None else min(mask.block_size, UNLIMITED)


def bias_tensors(bias: Bias | None, q: Tensor) -> tuple[Tensor, ...]:
    """(position table, time table, bucket edges, query times, key times) as the kernels read them.

    `q` stands in for missing ones, as a pointer that is not read.
    """
    position, time, q_times, k_times, width = Bias() if bias is None else bias
    edges = None
    if time is not None and q_times is not None:
        # Of no times in particular, but all layers and their backwards have the same.
        sizes = time.shape[1], width
        edges = derived(lambda: time_bucket_edges(*sizes, q_times.device), ("time bucket edges", *sizes), q_times)
    return tuple(q if x is None else x.contiguous() for x in (position, time, edges, q_times, k_times))


def bias_sizes(bias: Bias | None) -> tuple[int, int, float]:
    """(positions on each side, time buckets, time buckets per doubling of a gap)."""
    reach = 0 if bias is None or bias.position is None else bias.position.shape[1] // 2
    buckets = 0 if bias is None or bias.time is None else bias.time.shape[1]
    return reach, buckets, 1.0 if bias is None else math.log(2) / bias.bucket_width
