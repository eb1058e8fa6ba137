"""The fused projection to q, k and v with q and k rotated in its epilogue for Hopper, in Gluon.

By itself a rotation reads and writes q and k once more, as many bytes as the projection of a narrow layer moves. Here
heads are rotated as sums of the product (tiles of `hopper.product`), before they are rounded and stored. Feature i of a
head and i + d / 2 are in the same thread for heads of 64, whose halves are those of a piece, and of 128, of which a
piece is one half.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.core.hopper import halves, let_other_start, start
from kernels.core.launch import Launcher, aligned
from kernels.tokens.hopper.product import (
    BLOCK_K,
    CONSUMER_REGISTERS,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PIECE,
    PLACES,
    ROWS,
    descriptor,
    load_tiles,
    place_of,
    programs,
    put,
    shared_memory,
    sums_of_tile,
)


def rotated_product(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, head: int) -> Tensor:
    """x weight^T [M, N] bfloat16, of whose first two thirds each head of so many columns is rotated.

    x [M, K] and weight [N, K] as in `silu_products`; N is three times a multiple of `head`. cos and sin [M, head / 2],
    contiguous, or with positions [M] tables [P, head / 2].
    """
    num_rows, width = x.shape[0], weight.shape[0]
    out = x.new_empty(num_rows, width)
    if not out.numel():
        return out
    columns = 256 if width % 256 == 0 else 128  # a tile of columns that do not exist would keep its programs waiting
    places = cos if positions is None else positions
    table = positions is not None
    _launch(
        (programs(x.device, width, columns), 1, 1),
        (x.device, cos.dtype, sin.dtype, places.dtype, aligned(cos, sin, places), width, x.shape[1], head, table),
        descriptor(x, ROWS.value, BLOCK_K.value),
        descriptor(weight, columns, BLOCK_K.value),
        descriptor(out, ROWS.value, PIECE.value),
        cos,
        sin,
        places,
        num_rows,
        width,
        x.shape[1],
        head,
        table,
        columns,
    )
    return out


@gluon.jit
def _angles(table, positions, row, M, like, TABLE: gl.constexpr, HALF: gl.constexpr):
    """The angles' part [rows, HALF] of a table, laid out as `like`."""
    LAYOUT: gl.constexpr = like.type.layout
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    inside = rows < M
    place = gl.load(positions + rows, inside, 0).to(gl.int64) if TABLE else rows.to(gl.int64)
    at = gl.expand_dims(place * HALF, 1) + gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(table + at, gl.expand_dims(inside, 1), 0.0).to(gl.float32)


@gluon.jit
def _store_two(desc, smem, first, second, cos, sin, turned, row, column, place):
    """A head of 128 whose halves are two pieces, rotated if `turned`."""
    if turned:
        first, second = first * cos - second * sin, second * cos + first * sin
    tma.store_wait(PLACES - 1)
    put(desc, smem.index(place), first.to(gl.bfloat16), row, column)
    tma.store_wait(PLACES - 1)
    put(desc, smem.index(place + 1), second.to(gl.bfloat16), row, column + PIECE)


@gluon.jit
def _store_one(desc, smem, value, cos, sin, turned, row, column, place):
    """A head of 64 that is a piece, rotated if `turned`."""
    if turned:
        first, second = halves(value)
        both = gl.join(first * cos - second * sin, second * cos + first * sin)
        LAYOUT: gl.constexpr = value.type.layout
        value = gl.convert_layout(both.permute((0, 2, 1)).reshape((ROWS, PIECE)), LAYOUT, assert_trivial=True)
    tma.store_wait(PLACES - 1)
    put(desc, smem.index(place), value.to(gl.bfloat16), row, column)


@gluon.jit
def _finish(desc, smem, left, right, cos, sin, turned, row, column, place, HEAD: gl.constexpr):
    """Two pieces."""
    if HEAD == 128:
        _store_two(desc, smem, left, right, cos, sin, column < turned, row, column, place)
    else:
        _store_one(desc, smem, left, cos, sin, column < turned, row, column, place)
        _store_one(desc, smem, right, cos, sin, column + PIECE < turned, row, column + PIECE, place + 1)


@gluon.jit
def _multiply(out_desc, x_smem, w_smem, smem, full, empty, order, cos, sin, positions, M, N, K, HEAD: gl.constexpr,
              TABLE: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    begin, stride, column, _line = place_of(N, COLUMNS)
    steps = gl.cdiv(K, BLOCK_K)
    turned = N // 3 * 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, _right = halves(gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT))
    if COLUMNS == 256:
        left, _right = halves(left)
    if HEAD == 64:
        left, _right = halves(left)
    done = 0
    tiles = 0
    start(order, C)
    for row in range(begin, M, stride):
        own = row + C * ROWS
        c = _angles(cos, positions, own, M, left, TABLE, HEAD // 2)
        s = _angles(sin, positions, own, M, left, TABLE, HEAD // 2)
        acc, done = sums_of_tile(x_smem, w_smem, out_desc, smem, full, empty, order, full.index(0), own, column,
                                 tiles == 0, done, steps, COLUMNS, True, False, C)  # fmt: skip
        if COLUMNS == 256:
            half0, half1 = halves(acc)
            piece0, piece1 = halves(half0)
            piece2, piece3 = halves(half1)
            _finish(out_desc, smem, piece0, piece1, c, s, turned, own, column, C * PLACES, HEAD)
            _finish(out_desc, smem, piece2, piece3, c, s, turned, own, column + 2 * PIECE, C * PLACES + 2, HEAD)
        else:
            piece0, piece1 = halves(acc)
            # Pieces of two tiles take turns in a consumer's places.
            _finish(out_desc, smem, piece0, piece1, c, s, turned, own, column, C * PLACES + tiles % 2 * 2, HEAD)
        tiles += 1
    let_other_start(order, tiles == 0, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _rotated_product_kernel(
    x_desc,
    w_desc,
    out_desc,
    cos,
    sin,
    positions,
    M,
    N,
    K,
    HEAD: gl.constexpr,
    TABLE: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    x_smem, w_smem, smem, full, empty, order = shared_memory(x_desc, w_desc, out_desc)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, x_smem, w_smem, smem, full, empty, order, cos, sin, positions, M, N, K, HEAD, TABLE,
                         COLUMNS, 0)),
            (_multiply, (out_desc, x_smem, w_smem, smem, full, empty, order, cos, sin, positions, M, N, K, HEAD, TABLE,
                         COLUMNS, 1)),
            (load_tiles, (x_desc, w_desc, x_smem, w_smem, full, empty, M, N, K, COLUMNS, True)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_rotated_product_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
