"""Products with SiLU in their epilogue for Hopper, in Gluon.

Between two linear layers, z [M, N] is what the first one gives, and silu(z) what the second one reads. Made by itself,
the activation reads z and writes as much again; its gradient reads twice that. Here both are made from the sums of the
product before them:

    forward     z = x weight^T + bias,  y = silu(z)               x [M, K], weight [N, K]
    backward    dz = (dy weight) * silu'(z), its sums by column   dy [M, K], weight [K, N]

Tiles are those of `hopper.product`. In the backward, z comes to where dz will be stored from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import halves, left_half, let_other_start, right_half, sigmoid_of, start, words_of
from kernels.core.launch import Launcher, aligned
from kernels.core.partial_sums import add_partial_sums
from kernels.core.triton import cdiv
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

_COLUMNS = gl.constexpr(256)


def product_and_silu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(z, silu(z)), each [M, N] bfloat16, of z = x weight^T + bias; x [M, K] and weight [N, K] bfloat16, bias [N].

    Rows of x and of weight are contiguous and begin at multiples of 16 bytes; N is a multiple of 8.
    """
    num_rows, width = x.shape[0], weight.shape[0]
    z, y = x.new_empty(num_rows, width), x.new_empty(num_rows, width)
    if z.numel():
        blocks = descriptor(x, ROWS.value, BLOCK_K.value), descriptor(weight, _COLUMNS.value, BLOCK_K.value)
        _launch(blocks, z, y, bias, y, x.shape[1], backward=False)
    return z, y


def gradient_of_silu(dy: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(dz [M, N] bfloat16, its sums over the rows [N] float32) for dz = (dy weight) * silu'(z).

    dy [M, K] and weight [K, N] bfloat16 as in `product_and_silu`, z [M, N] as it returns them.
    """
    width = z.shape[1]
    dz = torch.empty_like(z)
    if not z.numel():
        return dz, z.new_zeros(width, dtype=torch.float32)
    lines = 2 * programs(z.device, width, _COLUMNS.value) // cdiv(width, _COLUMNS.value)
    sums = z.new_empty(lines, width, dtype=torch.float32)
    blocks = descriptor(dy, ROWS.value, BLOCK_K.value), descriptor(weight, BLOCK_K.value, _COLUMNS.value)
    _launch(blocks, z, dz, sums, sums, dy.shape[1], backward=True)
    return dz, add_partial_sums(sums, torch.float32)


def _launch(
    operands: tuple[TensorDescriptor, TensorDescriptor],
    z: Tensor,
    out: Tensor,
    bias: Tensor,
    sums: Tensor,
    depth: int,
    *,
    backward: bool,
) -> None:
    num_rows, width = z.shape
    piece = ROWS.value, PIECE.value
    _launch_silu(
        (programs(z.device, width, _COLUMNS.value), 1, 1),
        (z.device, bias.dtype, aligned(bias), width, depth, backward),
        *operands,
        descriptor(z, *piece),
        descriptor(out, *piece),
        bias,
        sums,
        num_rows,
        width,
        depth,
        backward,
    )


@gluon.jit
def _finish_forward(z_desc, y_desc, smem, value, bias, row, column, N, PLACE: gl.constexpr):
    """Write z and y of a consumer's rows, piece by piece, through four places in shared memory in turn."""
    if value.shape[1] > PIECE:
        left, right = halves(value)
        NEXT: gl.constexpr = PLACE if value.shape[1] > 2 * PIECE else PLACE + 2
        _finish_forward(z_desc, y_desc, smem, left, bias, row, column, N, PLACE)
        _finish_forward(z_desc, y_desc, smem, right, bias, row, column + value.shape[1] // 2, N, NEXT)
    else:
        LAYOUT: gl.constexpr = value.type.layout
        columns = column + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
        offset = gl.load(bias + columns, columns < N, 0.0).to(gl.float32)
        z = value + gl.expand_dims(offset, 0)
        tma.store_wait(PLACES - 1)
        put(z_desc, smem.index(PLACE), z.to(gl.bfloat16), row, column)
        words = words_of(z)
        left = left_half(words)
        right = right_half(words)
        y = gl.join(left * sigmoid_of(left), right * sigmoid_of(right)).reshape(z.shape)
        y = gl.convert_layout(y, LAYOUT, assert_trivial=True)
        tma.store_wait(PLACES - 1)
        put(y_desc, smem.index(PLACE + 1), y.to(gl.bfloat16), row, column)


@gluon.jit
def _finish_backward(dz_desc, smem, ones, value, total, row, column):
    """Write a piece of dz over z in shared memory, and from there; returns `total` [columns, 8] and its sums by column.

    They are a product with ones. Threads that added up what is theirs would need four times the registers.
    """
    LAYOUT: gl.constexpr = value.type.layout
    u = smem.load(LAYOUT).to(gl.float32)
    s = sigmoid_of(u)
    put(dz_desc, smem, (value * s * (1.0 + u * (1.0 - s))).to(gl.bfloat16), row, column)
    return warpgroup_mma(smem.permute((1, 0)), ones.permute((1, 0)), total, is_async=True)


@gluon.jit
def _store_sums(sums, total, line, column, N):
    """The 8 columns of `total` are the same."""
    of_columns = gl.sum(total, 1) * 0.125
    LAYOUT: gl.constexpr = of_columns.type.layout
    columns = column + gl.arange(0, PIECE, LAYOUT)
    gl.store(sums + line.to(gl.int64) * N + columns, of_columns, columns < N)


@gluon.jit
def _multiply(z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
              BACKWARD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    begin, stride, column, line = place_of(N, _COLUMNS)
    steps = gl.cdiv(K, BLOCK_K)
    done = 0
    tiles = 0
    total0 = gl.zeros((PIECE, 8), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
    total1 = total0
    total2 = total0
    total3 = total0
    start(order, C)
    for row in range(begin, M, stride):
        own = row + C * ROWS
        acc, done = sums_of_tile(x_smem, w_smem, z_desc, smem, full, empty, order, z_full.index(C), own, column,
                                 tiles == 0, done, steps, _COLUMNS, not BACKWARD, BACKWARD, C)  # fmt: skip
        if BACKWARD:
            mbarrier.wait(z_full.index(C), tiles & 1)
            left, right = halves(acc)
            piece0, piece1 = halves(left)
            piece2, piece3 = halves(right)
            z = C * PLACES
            total0 = _finish_backward(out_desc, smem.index(z), ones, piece0, total0, own, column)
            total1 = _finish_backward(out_desc, smem.index(z + 1), ones, piece1, total1, own, column + PIECE)
            total2 = _finish_backward(out_desc, smem.index(z + 2), ones, piece2, total2, own, column + 2 * PIECE)
            total3 = _finish_backward(out_desc, smem.index(z + 3), ones, piece3, total3, own, column + 3 * PIECE)
            total0, total1, total2, total3 = warpgroup_mma_wait(0, deps=(total0, total1, total2, total3))
        else:
            _finish_forward(z_desc, out_desc, smem, acc, bias, own, column, N, C * PLACES)
        tiles += 1
    let_other_start(order, tiles == 0, C)
    if BACKWARD:
        line = line * 2 + C
        _store_sums(sums, total0, line, column, N)
        _store_sums(sums, total1, line, column + PIECE, N)
        _store_sums(sums, total2, line, column + 2 * PIECE, N)
        _store_sums(sums, total3, line, column + 3 * PIECE, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _silu_product_kernel(
    x_desc,
    w_desc,
    z_desc,
    out_desc,
    bias,
    sums,
    M,
    N,
    K,
    BACKWARD: gl.constexpr,
):
    ones = bias  # which only sums are made with
    if BACKWARD:
        dtype: gl.constexpr = x_desc.dtype
        ones = gl.allocate_shared_memory(dtype, [8, ROWS], gl.NVMMASharedLayout.get_default_for([8, ROWS], dtype))
        ones.store(gl.full((8, ROWS), 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    x_smem, w_smem, smem, full, empty, order = shared_memory(x_desc, w_desc, z_desc)
    z_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(z_full.index(c), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
                         BACKWARD, 0)),
            (_multiply, (z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
                         BACKWARD, 1)),
            (load_tiles, (x_desc, w_desc, x_smem, w_smem, full, empty, M, N, K, _COLUMNS, not BACKWARD)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch_silu = Launcher(_silu_product_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
