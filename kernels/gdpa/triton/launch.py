"""Host code that the Triton kernels of `gdpa` share: tile sizes that fit a chip, and arguments in kernel form."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from kernels.attention import Bias
from kernels.attention.triton import launch as attention_launch
from kernels.attention.triton.launch import (
    Tile,
    beside_operands,
    bias_sizes,
    bias_tensors,
    rows_of,
    shrink,
    window_of,
)
from kernels.attention.triton.tile import UNLIMITED
from kernels.core.chip import multiplies_registers, shared_limit
from kernels.core.mask import Mask
from kernels.core.triton import block_width, precision_of
from kernels.gdpa.triton import activations as triton_activations

__all__ = [
    "NO_BLOCKS",
    "bias_arguments",
    "bias_constants",
    "constants",
    "fit",
    "limits",
    "rows_of",
    "strides",
    "tile_of",
    "tiling",
]

NO_BLOCKS = tl.constexpr(UNLIMITED)

# (queries, keys, warps, stages) by kernel, bytes of an element and padded head width. Those of half precision are the
# fastest that were timed on sm_90.
_TILES = {
    ("forward", 2, 64): (64, 64, 4, 3),
    ("forward", 2, 128): (64, 64, 4, 3),
    ("forward", 2, 256): (128, 64, 8, 2),
    ("query", 2, 64): (64, 32, 4, 3),
    ("query", 2, 128): (64, 64, 4, 2),
    ("query", 2, 256): (128, 32, 8, 2),
    ("key", 2, 64): (32, 64, 4, 3),
    ("key", 2, 128): (32, 64, 4, 3),
    ("key", 2, 256): (64, 64, 8, 1),
    ("forward", 4, 64): (64, 64, 4, 2),
    ("forward", 4, 128): (32, 32, 4, 1),
    ("forward", 4, 256): (16, 16, 4, 1),
    ("query", 4, 64): (64, 32, 4, 2),
    ("query", 4, 128): (32, 32, 4, 1),
    ("query", 4, 256): (16, 16, 4, 1),
    ("key", 4, 64): (32, 64, 4, 1),
    ("key", 4, 128): (32, 32, 4, 1),
    ("key", 4, 256): (16, 16, 4, 1),
}


def tile_of(kernel: str, itemsize: int, width: int, shared_limit: int, from_registers: bool = False) -> Tile:
    """The tile of `kernel` ("forward", "query" or "key") for heads padded to `width` on a chip whose programs may use
    `shared_limit` bytes of shared memory, and whose products read operands `from_registers` or do not."""

    def shared_bytes(tile: Tile) -> int:
        """Operands that stay, a forward's queries or two tiles of a backward, and two that stream by in stages.

        Single precision needs less than twice that, for copies in the layouts of its products.
        """
        stay, stream = (tile.n, tile.m) if kernel == "key" else (tile.m, tile.n)
        rows = stay * (1 if kernel == "forward" else 2) + stream * 2 * tile.stages
        return rows * width * itemsize * (2 if itemsize == 4 else 1)

    tile = Tile(*_TILES[kernel, itemsize, max(width, 64)])
    if from_registers:
        tile = beside_operands(tile, kernel, itemsize, width)
    return shrink(tile, shared_bytes, shared_limit)


def fit(kernel: str, q: Tensor, v: Tensor, bias: Bias | None = None) -> Tile:
    """`tile_of` for the widths, dtype and device of a call; with a bias that of attention, also of kernel "table"."""
    if bias is not None:
        return attention_launch.fit(kernel, q, v, bias)
    width = block_width(max(q.shape[2], v.shape[2]))
    return tile_of(kernel, q.dtype.itemsize, width, shared_limit(q.device), multiplies_registers(q.device))


def tiling(tile: Tile) -> dict[str, int]:
    """A tile as arguments of a launch."""
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages}


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of rows and heads of each tensor [N, H, d]; those of features are 1."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def limits(mask: Mask) -> tuple[int, int]:
    """(left, right) with a number that no position reaches for no limit."""
    return window_of(mask)[:2]


def bias_arguments(bias: Bias | None, q: Tensor) -> tuple[Any, ...]:
    """(position table, time table, bucket edges, query times, key times, positions on each side, time buckets, time
    buckets per doubling of a gap), as the kernels take them."""
    return *bias_tensors(bias, q), *bias_sizes(bias)


def bias_constants(bias: Bias | None) -> dict[str, bool]:
    position, time = (None, None) if bias is None else bias[:2]
    return {"HAS_POSITION": position is not None, "HAS_TIME": time is not None}


def constants(q: Tensor, k: Tensor, v: Tensor, activations: tuple[str, ...], mask: Mask) -> dict[str, Any]:
    """The compile-time arguments that all kernels have."""
    return {
        "NUM_HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[2],
        "VALUE_DIM": v.shape[2],
        "BLOCK_D": block_width(q.shape[2]),
        "BLOCK_V": block_width(v.shape[2]),
        "WINDOWED": mask.windowed,
        "PRECISION": precision_of(q.dtype),
    } | triton_activations.constants(activations, q.dtype)
