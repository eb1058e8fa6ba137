"""`array_jagged_bmm_jagged_out` on Hopper, and both of its gradients: a stream of tiles past multiplying warpgroups.

    inner:      out[row b] = a[b] @ y[row b], or a[b]^T        [sum of L_b^2], [N, D] -> [N, D]
    gradients:  da[b] = grad[row b] @ y[row b]^T, or its transpose; dy is `inner` of grad with the other one of the two

A tile is 64 places of a row of the result. A warp loads blocks of places of what is multiplied with TMA, a warpgroup
those of the matrix, which begin at any place, one element at a time, and two more multiply half of the columns each.
For both gradients a tile of y stays while blocks of grad pass, so that each is loaded once for both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.hopper import addressable, operand_layout
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, num_tiles, precision_of
from kernels.jagged.hopper.linear.tiles import descriptor
from kernels.jagged.hopper.square import outer_product
from kernels.jagged.hopper.square.fp32 import PLACES, copy_single, multiply_single
from kernels.jagged.hopper.square.half import copy_half, multiply_half
from kernels.jagged.hopper.square.tiles import ROWS, find_tiles, ring_barriers, tile_list, tile_numbers, tile_table
from kernels.jagged.sizes import SHORT
from kernels.jagged.triton import square as triton_square


@gluon.jit
def _load_own(own_desc, owns, tiles, barriers, GRADIENTS: gl.constexpr):
    """A warp that loads the tiles of y, where they stay for gradients."""
    own_full, own_empty, _full, _empty, _square_full, _square_empty = barriers
    TILES: gl.constexpr = own_full.shape[0]
    if GRADIENTS:
        number = 0
        first, begin, count, _square = tile_numbers(tiles, number)
        while count > 0:
            slot = number % TILES
            mbarrier.wait(own_empty.index(slot), ((number // TILES) & 1) ^ 1)
            mbarrier.expect(own_full.index(slot), 2 * own_desc.block_type.nbytes)
            for p in gl.static_range(2):
                at = [begin + first, p * own_desc.block_type.shape[1]]
                tma.async_copy_global_to_shared(own_desc, at, own_full.index(slot), owns.index(slot * 2 + p))
            number += 1
            first, begin, count, _square = tile_numbers(tiles, number)


@gluon.jit
def _load(stream_desc, streams, tiles, barriers):
    """A warp that loads the blocks."""
    _own_full, _own_empty, full, empty, _square_full, _square_empty = barriers
    BLOCKS: gl.constexpr = full.shape[0]
    PLACES: gl.constexpr = stream_desc.block_type.shape[0]
    number = 0
    blocks = 0
    _first, begin, count, _square = tile_numbers(tiles, number)
    while count > 0:
        for start in range(0, count, PLACES):
            slot = blocks % BLOCKS
            mbarrier.wait(empty.index(slot), ((blocks // BLOCKS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * stream_desc.block_type.nbytes)
            for p in gl.static_range(2):
                at = [begin + start, p * stream_desc.block_type.shape[1]]
                tma.async_copy_global_to_shared(stream_desc, at, full.index(slot), streams.index(slot * 2 + p))
            blocks += 1
        number += 1
        _first, begin, count, _square = tile_numbers(tiles, number)


@gluon.jit
def _multiply(da, out, streams, owns, squares, rests, tiles, barriers, LINES: gl.constexpr, GRADIENTS: gl.constexpr,
              THRICE: gl.constexpr, D: gl.constexpr, C: gl.constexpr):  # fmt: skip
    if out.dtype.element_ty == gl.float32:
        multiply_single(da, out, streams, owns, squares, rests, tiles, barriers, LINES, GRADIENTS, THRICE, D, C)
    else:
        multiply_half(da, out, streams, owns, squares, tiles, barriers, LINES, GRADIENTS, D, C)


@gluon.jit
def _copy(a, squares, rests, tiles, barriers, LINES: gl.constexpr, THRICE: gl.constexpr, COPIES: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    if a.dtype.element_ty == gl.float32:
        copy_single(a, squares, rests, tiles, barriers, LINES, THRICE)
    else:
        copy_half(a, squares, tiles, barriers, LINES, COPIES, C)


@gluon.jit
def _bmm_inner_kernel(
    stream_desc,
    own_desc,
    a,
    schedule,
    starts,
    da,
    out,
    LINES: gl.constexpr,
    GRADIENTS: gl.constexpr,
    THRICE: gl.constexpr,
    D: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    SQUARES: gl.constexpr,
    COPIES: gl.constexpr,
    CONSUMER: gl.constexpr,
    COPY: gl.constexpr,
    LOADER: gl.constexpr,
    SQUARE_LAYOUT: gl.constexpr,
):
    """LINES: a tile's places are lines of the matrix, not its columns. own_desc and da are of GRADIENTS alone.

    TILES of y, where they stay, BLOCKS of places and SQUARES of the matrix are in shared memory. CONSUMER and COPY are
    the registers of threads.
    """
    dtype: gl.constexpr = stream_desc.dtype
    PLACES: gl.constexpr = stream_desc.block_type.shape[0]
    streams = gl.allocate_shared_memory(dtype, [BLOCKS * 2] + stream_desc.block_type.shape, stream_desc.layout)
    squares = gl.allocate_shared_memory(dtype, [SQUARES, ROWS, PLACES], SQUARE_LAYOUT)
    rests = squares
    if THRICE:
        rests = gl.allocate_shared_memory(dtype, [SQUARES, ROWS, PLACES], SQUARE_LAYOUT)
    owns = streams
    if GRADIENTS:
        owns = gl.allocate_shared_memory(dtype, [TILES * 2] + own_desc.block_type.shape, own_desc.layout)
    tiles = tile_table(3 + COPIES + (1 if GRADIENTS else 0))
    barriers = (
        ring_barriers(TILES, 1),
        ring_barriers(TILES, 2),
        ring_barriers(BLOCKS, 1),
        ring_barriers(BLOCKS, 2),
        ring_barriers(SQUARES, 1),
        ring_barriers(SQUARES, 2),
    )
    fence_async_shared()
    if COPIES == 2:
        gl.warp_specialize(
            [
                (_multiply, (da, out, streams, owns, squares, rests, tiles, barriers, LINES, GRADIENTS, THRICE, D, 0)),
                (_multiply, (da, out, streams, owns, squares, rests, tiles, barriers, LINES, GRADIENTS, THRICE, D, 1)),
                (_copy, (a, squares, rests, tiles, barriers, LINES, THRICE, COPIES, 0)),
                (_copy, (a, squares, rests, tiles, barriers, LINES, THRICE, COPIES, 1)),
                (_load, (stream_desc, streams, tiles, barriers)),
                (_load_own, (own_desc, owns, tiles, barriers, GRADIENTS)),
                (find_tiles, (tiles, schedule, starts)),
            ],
            [4, 4, 4, 1, 1, 1],
            [CONSUMER, COPY, COPY, LOADER, LOADER, LOADER],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (da, out, streams, owns, squares, rests, tiles, barriers, LINES, GRADIENTS, THRICE, D, 0)),
                (_multiply, (da, out, streams, owns, squares, rests, tiles, barriers, LINES, GRADIENTS, THRICE, D, 1)),
                (_copy, (a, squares, rests, tiles, barriers, LINES, THRICE, COPIES, 0)),
                (_load, (stream_desc, streams, tiles, barriers)),
                (_load_own, (own_desc, owns, tiles, barriers, GRADIENTS)),
                (find_tiles, (tiles, schedule, starts)),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER, COPY, LOADER, LOADER, LOADER],
        )


_launch = Launcher(_bmm_inner_kernel, num_warps=4)


def _config(single: bool, gradients: bool) -> dict[str, int]:
    """What of `_bmm_inner_kernel` depends on the operands: for float32 or not."""
    if single:
        numbers = {"TILES": 1, "BLOCKS": 3 if gradients else 4, "SQUARES": 6, "COPIES": 1}
        return numbers | {"CONSUMER": 192, "COPY": 80, "LOADER": 40, "maxnreg": 128}
    if gradients:
        numbers = {"TILES": 2, "BLOCKS": 3, "SQUARES": 4, "COPIES": 1}
        return numbers | {"CONSUMER": 176, "COPY": 112, "LOADER": 40, "maxnreg": 128}
    # Slots are an even number, so that each is always of one of the two warpgroups that copy.
    numbers = {"TILES": 2, "BLOCKS": 5, "SQUARES": 4, "COPIES": 2}
    return numbers | {"CONSUMER": 144, "COPY": 80, "LOADER": 32, "maxnreg": 96}


def _run(stream: Tensor, own: Tensor, a: Tensor, offsets: Tensor, squares: Tensor, da: Tensor, out: Tensor,
         lines: bool, gradients: bool) -> None:  # fmt: skip
    stream, own = addressable(stream), addressable(own)
    a, offsets, squares = a.contiguous(), offsets.contiguous(), squares.contiguous()
    total, width = stream.shape
    single = a.dtype is torch.float32
    rows, places = ROWS.value, PLACES.value if single else ROWS.value
    columns = 64 * cdiv(width, 128)  # of a consumer
    *numbers, registers = _config(single, gradients).values()
    constants = (lines, gradients, precision_of(a.dtype) == "tf32x3", width, *numbers)
    _launch(
        (min(processors(a.device), num_tiles(total, offsets.shape[0] - 1, rows)), 1, 1),
        (a.device, a.dtype, squares.dtype, aligned(a, squares), constants),
        descriptor(stream, places, columns),
        descriptor(own, rows, columns),
        a,
        tile_list(offsets, total),
        squares,
        da,
        out,
        *constants,
        operand_layout(rows, places, a.dtype),
        maxnreg=registers,
    )


@custom_op("gemsmith::jagged_inner_stream", like="y")
def inner(a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, transpose: bool) -> Tensor:
    """As `triton.square.inner`, for D in multiples of 8 up to 256."""
    out = y.new_empty(y.shape)
    if out.numel():
        _run(y, y, a, offsets, squares, out, out, not transpose, False)
    return out


@custom_op("gemsmith::jagged_inner_stream_gradients", like=("a", "y"))
def inner_gradients(
    grad: Tensor, a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, transpose: bool
) -> tuple[Tensor, Tensor]:
    """(da, dy) of `inner`, in half precision or in tf32 products."""
    da, dy = a.new_empty(a.shape), y.new_empty(y.shape)
    if dy.numel():
        _run(grad, y, a, offsets, squares, da, dy, transpose, True)
    return da, dy


@custom_op("gemsmith::jagged_outer_long")
def outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int) -> Tensor:
    """As `triton.square.outer`, whose kernel makes it in float32, with the gradients of this file."""
    chosen = triton_square.outer if x.dtype is torch.float32 else outer_product.outer
    return chosen(x, y, offsets, squares, total)


@outer.register_fake
def _(x, y, offsets, squares, total):
    return x.new_empty(total)


triton_square.register_outer(outer, inner)
triton_square.register_inner(inner, outer, inner_gradients, lambda y: precision_of(y.dtype) != "tf32x3")


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int
) -> Tensor:
    fused_gradients = x.shape[1] > 128 and max_length >= SHORT
    return (outer if fused_gradients else outer_product.outer)(x, y, offsets, squares, total)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool
) -> Tensor:
    return inner(a, y, offsets, squares, transpose)
