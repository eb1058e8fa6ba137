"""Device functions and launch arithmetic that the Triton kernels of the jagged operators share.

Nothing here knows lengths on the host. A kernel that wants tiles inside rows launches `num_tiles` programs, a bound
from shapes, and each finds its tile by a search over the offsets.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE_ROWS = 128  # which `row_of` looks up at once


@triton.jit
def _advance(row, offsets, num_rows, places, step, also):
    """The last of row, row + step, ... (32 of them, each int64) that begins at or before each of `places`."""
    way = tl.arange(0, 32)
    candidate = row[:, None] + (way * step)[None, :]
    real = candidate < num_rows
    begin = tl.load(offsets + candidate, mask=real, other=0).to(tl.int64)
    if also is not None:
        begin += tl.load(also + candidate, mask=real, other=0).to(tl.int64)
    passed = tl.sum((real & (begin <= places[:, None])).to(tl.int32), 1)
    return row + (passed - 1) * step


@triton.jit
def row_of(offsets, num_rows, places, STEPS: tl.constexpr, also=None):
    """Row, int64, that holds each of `places`; the last one for places behind the end. STEPS is steps_of(num_rows).

    With `also`, offsets to add, rows are those of the sums. A step looks at 32 offsets for each place, because steps
    wait for each other. The rows of the first and the last place are looked up alone: most tiles lie within a row or a
    few, and then the steps that are longer than that have nothing to find.
    """
    BITS: tl.constexpr = 5
    LEVELS: tl.constexpr = (STEPS + BITS - 1) // BITS
    ends = tl.where(tl.arange(0, 2) == 0, tl.min(places, 0), tl.max(places, 0))
    end_rows = ends * 0
    for level in tl.static_range(LEVELS):
        end_rows = _advance(end_rows, offsets, num_rows, ends, 1 << (BITS * (LEVELS - 1 - level)), also)
    lowest = tl.min(end_rows, 0)
    span = tl.max(end_rows, 0) - lowest
    row = places * 0 + lowest
    for level in tl.static_range(LEVELS):
        step = 1 << (BITS * (LEVELS - 1 - level))
        if step <= span:
            row = _advance(row, offsets, num_rows, places, step, also)
    return row


@triton.jit
def tile_of(offsets, num_rows, tile, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """(row, begin and end of that row, first place of the tile), all int64; a tile at or behind `end` is empty.

    Row b owns the tiles from offsets[b] // BLOCK + b up to the same of b + 1. That is never fewer than it needs, and at
    most one more than that, so that no running sum of tile counts has to be made first.
    """
    BITS: tl.constexpr = 5
    LEVELS: tl.constexpr = (STEPS + BITS - 1) // BITS
    way = tl.arange(0, 1 << BITS)
    row = tile.to(tl.int64) * 0
    for level in tl.static_range(LEVELS):
        step = 1 << (BITS * (LEVELS - 1 - level))
        candidate = row + way * step
        real = candidate < num_rows
        first = tl.load(offsets + candidate, mask=real, other=0).to(tl.int64) // BLOCK + candidate
        row += (tl.sum((real & (first <= tile)).to(tl.int32), 0) - 1) * step
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    start = begin + (tile - (begin // BLOCK + row)) * BLOCK
    return row, begin, end, start


# Triton has these two for kernels as well, with more around them.
def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def block_width(width: int, most: int = 1 << 30) -> int:
    """A power of two that covers `width` up to `most`, and 16 at least, which is the least that tensor cores take."""
    return max(16, min(most, next_power_of_2(width)))


def steps_of(num_rows: int) -> int:
    """Bits of a row index, which the searches over `num_rows` rows go through, rounded up to a multiple of 5.

    Searches look at 5 or 10 bits at a time, so that the multiple costs them nothing, and kernels need not be compiled
    anew for the few requests that are left at the end of an epoch.
    """
    return -(-max(num_rows - 1, 1).bit_length() // 5) * 5


def num_tiles(total: int, num_rows: int, block: int) -> int:
    """Programs that `tile_of` needs for any division of `total` values into rows."""
    return total // block + num_rows


def flat(values: Tensor) -> Tensor:
    """[N, ...] as [N, W] whose last stride is 1; a copy only when the trailing dimensions are not contiguous."""
    matrix = values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def near(x: Tensor) -> Tensor:
    """x [B, ...], copied if an entry's elements are too far apart for addresses of 32 bits within it.

    They are where another dimension is the outermost one of the storage: [K, B, N] puts the whole batch between two
    rows of an entry.
    """
    span = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if span < 2**31 else x.clone(memory_format=torch.contiguous_format)


def tile_shape(width: int, elements: int = 4096) -> tuple[int, int]:
    """(rows, columns), powers of two, of a tile of `elements` or less that covers a width of up to 512 at once."""
    columns = min(next_power_of_2(max(width, 1)), 512)
    return max(min(elements // columns, MAX_TILE_ROWS), 1), columns


def precision_of(dtype: torch.dtype) -> str:
    """How float32 operands meet the tensor cores: in one tf32 product where PyTorch's flag allows it, else in three.

    Three products of operands split in two tf32 halves drop only the product of the low halves, about 2^-22.
    """
    return "tf32" if dtype is not torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
