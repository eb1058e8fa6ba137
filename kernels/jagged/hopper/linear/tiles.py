"""What the Hopper kernels of `jagged_linear` share: the rows of a tile's places, and descriptors of matrices."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import UncheckedDescriptor, operand_layout

ROWS = gl.constexpr(64)  # values of a tile
WINDOW = gl.constexpr(8)  # rows whose biases are added by the tensor cores


@gluon.jit
def _row_of(offsets, num_rows, place, LEVELS: gl.constexpr, LANES: gl.constexpr):
    """The row that holds a place; 32 offsets at a time, because steps wait for each other."""
    way = gl.arange(0, 32, layout=LANES)
    row = place * 0
    for level in gl.static_range(LEVELS):
        step = 1 << (5 * (LEVELS - 1 - level))
        candidate = row + way * step
        real = candidate < num_rows
        begin = gl.load(offsets + candidate, mask=real, other=0).to(gl.int32)
        row += (gl.sum((real & (begin <= place)).to(gl.int32), 0) - 1) * step
    return row


@gluon.jit
def rows_of(offsets, num_rows, first, total, PLACES: gl.constexpr, LEVELS: gl.constexpr):
    """The rows of a tile's places: those of the first and the last, and between them, if they differ, of each."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lowest = _row_of(offsets, num_rows, first, LEVELS, LANES)
    span = _row_of(offsets, num_rows, gl.minimum(first + PLACES, total) - 1, LEVELS, LANES) - lowest
    place = first + gl.arange(0, PLACES, layout=LANES)
    row = place * 0 + lowest
    for level in gl.static_range(5 * LEVELS):
        step = 1 << (5 * LEVELS - 1 - level)
        if step <= span:
            candidate = row + step
            real = candidate < num_rows
            begin = gl.load(offsets + candidate, mask=real, other=0).to(gl.int32)
            row = gl.where(real & (begin <= place), candidate, row)
    return row


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of blocks of a matrix that was allocated here or is `addressable`."""
    layout = operand_layout(rows, columns, x.dtype)
    return UncheckedDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns], layout)
