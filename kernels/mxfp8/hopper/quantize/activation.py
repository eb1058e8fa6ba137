"""What stands around a layer's product element by element, quantised where it is computed, in groups of 128; Gluon.

One tile of 128 x 128 a program, as in `tiles`: it is read once by TMA, computed in `column_layout`, where a thread has
two columns and so two values of a bias, and goes through shared memory to be quantised along its rows, too. Results are
rounded to bfloat16 before they are quantised, as if they had been written and read again: they are those of
`tokens.activate` and its gradient bit for bit, except where a sigmoid is below 2^-126.

Sums of a gradient over the rows of each tile are added up in float32 before it is rounded. The gradient of a bias is
their sum over the tiles, which is the same bits every time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.hopper import left_half, pair, right_half, sigmoid_of
from kernels.core.launch import Launcher, aligned
from kernels.core.partial_sums import add_partial_sums
from kernels.core.triton import cdiv
from kernels.mxfp8.grouped import BYTES, VALUES, Quantized
from kernels.mxfp8.hopper.quantize.blocks import tile_place
from kernels.mxfp8.hopper.quantize.operators import empty_operands
from kernels.mxfp8.hopper.quantize.pairs import (
    WARPS,
    codes_descriptor,
    codes_layout,
    column_layout,
    row_layout,
    store_columns,
    store_rows,
    table_of,
    words_descriptor,
    words_layout,
)

# Three programs share a multiprocessor, and two of the gradient of a factor, which has three tiles in shared memory.
REGISTERS, FACTOR_REGISTERS = 80, 128
Operands = tuple[Quantized, Quantized]
_GROUP, _BYTES, _VALUES = gl.constexpr(128), gl.constexpr(BYTES), gl.constexpr(VALUES)


@gluon.jit
def _bias_of(bias, column):
    """(left, right) [1, 64] float32 of the words of a tile's rows."""
    LAYOUT: gl.constexpr = column_layout()
    at = bias + column + 2 * gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    left, right = gl.load(at).to(gl.float32), gl.load(at + 1).to(gl.float32)
    return gl.expand_dims(left, 0), gl.expand_dims(right, 0)


@gluon.jit
def _sum_of_warps(x):
    """[4, 64]: of the 32 rows that each thread has."""
    return gl.sum(gl.reshape(x, [4, 32, 64]), 1)


@gluon.jit
def _store_sums(left, right, sums, row, column, num_columns):
    """Of the left and the right columns of a tile's words, to `sums` [tiles along the rows, num_columns]."""
    total = gl.reshape(gl.sum(gl.join(left, right), 0), [128])
    at = (row // 128).to(gl.int64) * num_columns + column + gl.arange(0, 128, total.type.layout)
    gl.store(sums + at, total)


@gluon.jit
def _store_both(words, words_smem, codes_smem, row_desc, column_desc, row_scales, column_scales, row, column,
                tile_rows, num_columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                COLUMN_FORM: gl.constexpr):  # fmt: skip
    """Quantise a tile in `column_layout`: along rows by way of `words_smem`, and along columns.

    Codes are stored from `codes_smem`, which may be the same memory.
    """
    buffers = codes_smem._reinterpret(gl.int16, [2, 128, 64], codes_layout())
    if ROWS:
        words_smem.store(words)
        along = words_smem.load(row_layout())
        store_rows(along, buffers.index(0), row_desc, row, column // 2, row_scales, None, row, column // 32,
                   tile_rows * 128, num_columns // 32, _GROUP, False, _BYTES)  # fmt: skip
    if COLUMNS:
        store_columns(words, buffers.index(1), column_desc, column, row // 2, column_scales, None, column,
                      row // 32, num_columns, tile_rows * 4, _GROUP, False, COLUMN_FORM)  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "tile_rows"])
def silu_quantized_kernel(
    z_desc,
    bias,
    row_desc,
    column_desc,
    row_scales,
    column_scales,
    num_rows,
    tile_rows,
    num_columns,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """One tile of silu(z + bias), with zeros in the rows that z lacks."""
    LAYOUT: gl.constexpr = column_layout()
    smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, z_desc.block_type.nbytes)
    row, column = tile_place(gl.program_id(0), tile_rows, num_columns // 128)
    tma.async_copy_global_to_shared(z_desc, [row, column // 2], full, smem)
    left_bias, right_bias = _bias_of(bias, column)
    mbarrier.wait(full, 0)
    words = smem.load(LAYOUT)
    left, right = left_half(words) + left_bias, right_half(words) + right_bias
    words = pair(left * sigmoid_of(left), right * sigmoid_of(right))
    if row + 128 > num_rows:
        exists = row + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) < num_rows
        words = gl.where(gl.expand_dims(exists, 1), words, 0)
    _store_both(words, smem, smem, row_desc, column_desc, row_scales, column_scales, row, column, tile_rows,
                num_columns, ROWS, COLUMNS, _VALUES)  # fmt: skip
    tma.store_wait(0)
    smem._keep_alive()
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


@gluon.jit
def _silu_gradient(grad, u):
    s = sigmoid_of(u)
    return grad * (s * (1.0 + u * (1.0 - s)))


@gluon.jit(do_not_specialize=["tile_rows"])
def silu_gradient_quantized_kernel(
    grad_desc,
    z_desc,
    bias,
    row_desc,
    column_desc,
    row_scales,
    column_scales,
    sums,
    tile_rows,
    num_columns,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """One tile of the gradient of z, where grad is that of silu(z + bias). Rows that grad lacks give zeros of
    either sign.
    """
    LAYOUT: gl.constexpr = column_layout()
    grad_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    z_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, grad_desc.block_type.nbytes + z_desc.block_type.nbytes)
    row, column = tile_place(gl.program_id(0), tile_rows, num_columns // 128)
    tma.async_copy_global_to_shared(grad_desc, [row, column // 2], full, grad_smem)
    tma.async_copy_global_to_shared(z_desc, [row, column // 2], full, z_smem)
    left_bias, right_bias = _bias_of(bias, column)
    mbarrier.wait(full, 0)
    grad, z = grad_smem.load(LAYOUT), z_smem.load(LAYOUT)
    left = _silu_gradient(left_half(grad), left_half(z) + left_bias)
    left_sums = _sum_of_warps(left)
    right = _silu_gradient(right_half(grad), right_half(z) + right_bias)
    _store_sums(left_sums, _sum_of_warps(right), sums, row, column, num_columns)
    _store_both(pair(left, right), grad_smem, z_smem, row_desc, column_desc, row_scales, column_scales, row, column,
                tile_rows, num_columns, ROWS, COLUMNS, _BYTES)  # fmt: skip
    tma.store_wait(0)
    # Otherwise exchanges between threads would use its memory, which copies of codes still read.
    z_smem._keep_alive()
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


@gluon.jit(do_not_specialize=["tile_rows"])
def factor_gradient_quantized_kernel(
    grad_desc,
    z_desc,
    factor_desc,
    d_factor_desc,
    bias,
    row_desc,
    column_desc,
    row_scales,
    column_scales,
    sums,
    tile_rows,
    num_columns,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """One tile of the gradients of z and of the factor, where grad is that of (z + bias) * factor. Rows that grad lacks
    give zeros of either sign.
    """
    LAYOUT: gl.constexpr = column_layout()
    grad_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    z_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    factor_smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 3 * grad_desc.block_type.nbytes)
    row, column = tile_place(gl.program_id(0), tile_rows, num_columns // 128)
    tma.async_copy_global_to_shared(grad_desc, [row, column // 2], full, grad_smem)
    tma.async_copy_global_to_shared(z_desc, [row, column // 2], full, z_smem)
    tma.async_copy_global_to_shared(factor_desc, [row, column // 2], full, factor_smem)
    left_bias, right_bias = _bias_of(bias, column)
    mbarrier.wait(full, 0)
    grad, z = grad_smem.load(LAYOUT), z_smem.load(LAYOUT)
    left, right = left_half(grad), right_half(grad)
    z_smem.store(pair(left * (left_half(z) + left_bias), right * (right_half(z) + right_bias)))
    fence_async_shared()
    factor = factor_smem.load(LAYOUT)
    left, right = left * left_half(factor), right * right_half(factor)
    _store_sums(_sum_of_warps(left), _sum_of_warps(right), sums, row, column, num_columns)
    tma.async_copy_shared_to_global(d_factor_desc, [row, column // 2], z_smem)
    _store_both(pair(left, right), grad_smem, factor_smem, row_desc, column_desc, row_scales, column_scales, row,
                column, tile_rows, num_columns, ROWS, COLUMNS, _BYTES)  # fmt: skip
    tma.store_wait(0)
    # Otherwise exchanges between threads would use their memory, which copies still read.
    z_smem._keep_alive()
    factor_smem._keep_alive()
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch_silu = Launcher(silu_quantized_kernel, num_warps=WARPS, maxnreg=REGISTERS)
_launch_silu_gradient = Launcher(silu_gradient_quantized_kernel, num_warps=WARPS, maxnreg=REGISTERS)
_launch_factor_gradient = Launcher(factor_gradient_quantized_kernel, num_warps=WARPS, maxnreg=FACTOR_REGISTERS)


def _launch(launch: Launcher, tensors: list[Tensor], bias: Tensor, operands: Operands, further: Tensor | int) -> None:
    """Fill `operands` from `tensors` [M, C], as many as the kernel has, with one further argument of its own."""
    num_rows, num_columns = tensors[0].shape
    tile_rows = cdiv(num_rows, 128)
    rows, columns = (operand.codes.numel() > 0 for operand in operands)
    bias = bias.contiguous()
    launch(
        (tile_rows * (num_columns // 128), 1, 1),
        (bias.device, rows, columns, bias.dtype, *aligned(bias)),
        *[words_descriptor(tensor) for tensor in tensors],
        bias,
        # For codes that are not written, any tensor.
        *[codes_descriptor(each.codes if each.codes.numel() else tensors[0]) for each in operands],
        *[table_of(operand.scales) for operand in operands],
        further,
        tile_rows,
        num_columns,
        rows,
        columns,
    )


def _empty_sums(z: Tensor) -> Tensor:
    return z.new_empty(cdiv(z.shape[0], 128), z.shape[1], dtype=torch.float32)


def silu_quantized(z: Tensor, bias: Tensor, columns: bool) -> Operands:
    """silu(z + bias) along its rows, and if asked for along its columns with VALUES; see `empty_operands`.

    Args:
        z: [M, C] bfloat16 of at least one row, C a multiple of 128; contiguous on a boundary of 16 bytes, as are all
            tensors of this file but biases.
        bias: [C] of any floating dtype.
    """
    operands = empty_operands(z, True, columns, VALUES)
    _launch(_launch_silu, [z], bias, operands, z.shape[0])
    return operands


def silu_gradient_quantized(
    grad: Tensor, z: Tensor, bias: Tensor, rows: bool, columns: bool
) -> tuple[Quantized, Quantized, Tensor]:
    """The gradient of z where grad [M, C] is that of silu(z + bias), along its rows and along its columns with BYTES.

    What is not asked for is empty. The last result is the gradient of the bias, float32 [C].
    """
    operands, sums = empty_operands(z, rows, columns, BYTES), _empty_sums(z)
    _launch(_launch_silu_gradient, [grad, z], bias, operands, sums)
    return *operands, add_partial_sums(sums, torch.float32)


def factor_gradient_quantized(
    grad: Tensor, z: Tensor, bias: Tensor, factor: Tensor, rows: bool, columns: bool
) -> tuple[Quantized, Quantized, Tensor, Tensor]:
    """The gradient of z where grad [M, C] is that of (z + bias) * factor, as of `silu_gradient_quantized`, and that of
    the factor, like z."""
    operands, sums, d_factor = empty_operands(z, rows, columns, BYTES), _empty_sums(z), torch.empty_like(z)
    _launch(_launch_factor_gradient, [grad, z, factor, d_factor], bias, operands, sums)
    return *operands, add_partial_sums(sums, torch.float32), d_factor
