"""Softmax over the rows of a jagged tensor, and over the rows of its square matrices; Triton."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, next_power_of_2, num_tiles, steps_of, tile_of

MATRIX_ROWS = 32  # of a program
MATRIX_ELEMENTS = 1024  # of a tile


@triton.jit
def _softmax_kernel(x, offsets, out, width, x_stride, BLOCK_L: tl.constexpr, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    largest = tl.full([BLOCK_W], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_W], tl.float32)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        at = x + place[:, None] * x_stride + column[None, :]
        values = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, 0))
        # If all values so far are -inf, the differences would be NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift[None, :]), 0)
        largest = larger
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        values = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        values = tl.exp(values - largest[None, :]) / total[None, :]
        tl.store(out + place[:, None] * width + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_gradient_kernel(
    grad, y, offsets, out, width, grad_stride, y_stride, BLOCK_L: tl.constexpr, BLOCK_W: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    total = tl.zeros([BLOCK_W], tl.float32)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        g = tl.load(grad + place[:, None] * grad_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        p = tl.load(y + place[:, None] * y_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        total += tl.sum(g * p, 0)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & (column < width)[None, :]
        g = tl.load(grad + place[:, None] * grad_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        p = tl.load(y + place[:, None] * y_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        values = p * (g - total[None, :])
        tl.store(out + place[:, None] * width + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _short_rows(x, grad, out, tall, count, GRADIENT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """`tall` matrix rows of `count` values, no more than BLOCK_C: each is read once."""
    j = tl.arange(0, BLOCK_C)
    for first in range(0, tall, BLOCK_R):
        i = first + tl.arange(0, BLOCK_R)
        real = (i < tall)[:, None]
        mask = real & (j < count)[None, :]
        at = i[:, None] * count + j[None, :]
        if GRADIENT:
            values = tl.load(x + at, mask=mask, other=0).to(tl.float32)
            g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
            values = values * (g - tl.sum(values * g, 1)[:, None])
        else:
            values = tl.load(x + at, mask=mask, other=float("-inf")).to(tl.float32)
            values = tl.exp(values - tl.where(real, tl.max(values, 1)[:, None], 0.0))
            values = values / tl.where(real, tl.sum(values, 1)[:, None], 1.0)
        tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _long_row(x, grad, out, count, GRADIENT: tl.constexpr, BLOCK_C: tl.constexpr):
    """One matrix row of any length, read twice."""
    j = tl.arange(0, BLOCK_C)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, count, BLOCK_C):
        mask = j < count - first
        if GRADIENT:
            values = tl.load(x + first + j, mask=mask, other=0).to(tl.float32)
            total += tl.sum(values * tl.load(grad + first + j, mask=mask, other=0).to(tl.float32), 0)
        else:
            values = tl.load(x + first + j, mask=mask, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(values, 0))
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), 0)
            largest = larger
    for first in range(0, count, BLOCK_C):
        mask = j < count - first
        values = tl.load(x + first + j, mask=mask, other=0).to(tl.float32)
        if GRADIENT:
            values = values * (tl.load(grad + first + j, mask=mask, other=0).to(tl.float32) - total)
        else:
            values = tl.exp(values - largest) / total
        tl.store(out + first + j, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _softmax_matrix_kernel(
    x,
    grad,
    offsets,
    squares,
    out,
    num_rows,
    GRADIENT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Softmax of x, or with GRADIENT the gradient of one whose result is x; tiles have as many rows as fit."""
    row, begin, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_R, STEPS)
    if start >= end:
        return
    count = (end - begin).to(tl.int32)
    tall = tl.minimum(end - start, BLOCK_R).to(tl.int32)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it.
    corner = tl.load(squares + row).to(tl.int64) + (start - begin) * count
    x += corner
    grad += corner
    out += corner
    if count <= 64:
        _short_rows(x, grad, out, tall, count, GRADIENT, ELEMENTS // 64, 64)
    elif count <= 128:
        _short_rows(x, grad, out, tall, count, GRADIENT, ELEMENTS // 128, 128)
    elif count <= 256:
        _short_rows(x, grad, out, tall, count, GRADIENT, ELEMENTS // 256, 256)
    elif count <= ELEMENTS:
        _short_rows(x, grad, out, tall, count, GRADIENT, 1, ELEMENTS)
    else:
        for _ in range(tall):
            _long_row(x, grad, out, count, GRADIENT, ELEMENTS)
            x += count
            grad += count
            out += count


def _launch_columns(launch: Launcher, offsets: Tensor, out: Tensor, *inputs: Tensor) -> Tensor:
    offsets, width = offsets.contiguous(), inputs[0].shape[1]
    block_w = min(next_power_of_2(width), 32)
    strides = [x.stride(0) for x in inputs]
    numbers = (width, *strides, 1024 // block_w, block_w)
    launch(
        (offsets.shape[0] - 1, cdiv(width, block_w), 1),
        (out.device, out.dtype, *[x.dtype for x in inputs], offsets.dtype, *aligned(*inputs, offsets), *numbers),
        *inputs, offsets, out, *numbers,
    )  # fmt: skip
    return out


_launch_column = Launcher(_softmax_kernel)
_launch_column_gradient = Launcher(_softmax_gradient_kernel)


@custom_op("gemsmith::jagged_softmax", like="x")
def softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """[N, W] -> [N, W], each column of each row separately."""
    out = x.new_empty(*x.shape)
    if out.numel() == 0:
        return out
    return _launch_columns(_launch_column, offsets, out, flat(x))


@custom_op("gemsmith::jagged_softmax_gradient", like="y")
def softmax_gradient(grad: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    out = y.new_empty(*y.shape)
    if out.numel() == 0:
        return out
    return _launch_columns(_launch_column_gradient, offsets, out, flat(grad), flat(y))


def _launch_matrix(x: Tensor, grad: Tensor | None, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    out = x.new_empty(*x.shape)
    if out.numel() == 0:
        return out
    num_rows = offsets.shape[0] - 1
    _softmax_matrix_kernel[(num_tiles(num_values, num_rows, MATRIX_ROWS),)](
        x.contiguous(),
        x if grad is None else grad.contiguous(),
        offsets.contiguous(),
        squares.contiguous(),
        out,
        num_rows,
        GRADIENT=grad is not None,
        STEPS=steps_of(num_rows),
        BLOCK_R=MATRIX_ROWS,
        ELEMENTS=MATRIX_ELEMENTS,
    )
    return out


@custom_op("gemsmith::jagged2_softmax", like="x")
def matrix_softmax(x: Tensor, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    """[sum of L_b^2] -> the same, each row of each matrix separately; num_values is offsets[B]."""
    return _launch_matrix(x, None, offsets, squares, num_values)


@custom_op("gemsmith::jagged2_softmax_gradient", like="y")
def matrix_softmax_gradient(grad: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, num_values: int) -> Tensor:
    return _launch_matrix(y, grad, offsets, squares, num_values)


def _save_softmax(ctx, inputs, output):
    ctx.save_for_backward(output, inputs[1])


def _save_matrix(ctx, inputs, output):
    ctx.save_for_backward(output, inputs[1], inputs[2])
    ctx.num_values = inputs[3]


softmax.register_autograd(
    lambda ctx, grad: (softmax_gradient(grad, *ctx.saved_tensors), None), setup_context=_save_softmax
)
matrix_softmax.register_autograd(
    lambda ctx, grad: (matrix_softmax_gradient(grad, *ctx.saved_tensors, ctx.num_values), None, None, None),
    setup_context=_save_matrix,
)
