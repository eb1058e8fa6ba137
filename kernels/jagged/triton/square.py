"""Products of each row with itself, in the layout of one L x L matrix a row behind another; Triton.

    outer:  a[b] = x[row b] @ y[row b]^T                    [N, D], [N, D] -> [sum of L_b^2]
    inner:  out[row b] = a[b] @ y[row b], or a[b]^T          [sum of L_b^2], [N, D] -> [N, D]

Each is the other's gradient; in half precision one kernel makes both of inner's. The matrices begin at any place and
their rows are of any length, so their elements are loaded and stored one by one; x, y and out are read and written in
whole vectors.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.core.chip import is_hopper, multiplies_registers
from kernels.core.hopper import addressable
from kernels.core.operator import custom_op
from kernels.core.triton import block_width, cdiv, flat, num_tiles, precision_of, steps_of, tile_of

MAX_WIDTH = 256  # of both gradients at once


@triton.jit
def _bmm_outer_kernel(
    x,
    y,
    offsets,
    squares,
    out,
    num_rows,
    D,
    x_stride,
    y_stride,
    TMA: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x and y are descriptors with TMA."""
    row, begin, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_M, STEPS)
    if start >= end:
        return
    count = (end - begin).to(tl.int32)
    tall = (end - start).to(tl.int32)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it.
    corner = out + tl.load(squares + row).to(tl.int64) + (start - begin) * count
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    if not TMA:
        x_corner = x + start * x_stride
        d = tl.arange(0, BLOCK_D)
        x_tile = i[:, None] * x_stride + d[None, :]
        y_tile = d[:, None] + j[None, :] * y_stride
    out_tile = i[:, None] * count + j[None, :]
    for first in range(0, count, BLOCK_N):
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if not TMA:
            y_corner = y + (begin + first) * y_stride
        for k in range(0, D, BLOCK_D):
            if TMA:
                left = x.load([start.to(tl.int32), k])
                right = tl.trans(y.load([begin.to(tl.int32) + first, k]))
            else:
                left = tl.load(x_corner + k + x_tile, mask=(i < tall)[:, None] & (d < D - k)[None, :], other=0)
                y_mask = (d < D - k)[:, None] & (j < count - first)[None, :]
                right = tl.load(y_corner + k + y_tile, mask=y_mask, other=0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        mask = (i < tall)[:, None] & (j < count - first)[None, :]
        tl.store(corner + first + out_tile, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bmm_inner_kernel(
    a,
    y,
    offsets,
    squares,
    out,
    num_rows,
    D,
    y_stride,
    TRANSPOSE: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, begin, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_M, STEPS)
    if start >= end:
        return
    count = (end - begin).to(tl.int32)
    tall = (end - start).to(tl.int32)
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it.
    matrix = a + tl.load(squares + row).to(tl.int64)
    if TRANSPOSE:
        a_corner = matrix + (start - begin)
        a_tile = j[None, :] * count + i[:, None]
        a_step = BLOCK_N * (end - begin)
    else:
        a_corner = matrix + (start - begin) * count
        a_tile = i[:, None] * count + j[None, :]
        a_step = (end - begin) * 0 + BLOCK_N
    y_tile = j[:, None] * y_stride + d[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Elements of two bytes cannot be copied asynchronously: those of the next step are on their way during a product.
    left = tl.load(a_corner + a_tile, mask=(i < tall)[:, None] & (j < count)[None, :], other=0)
    for k in range(0, count, BLOCK_N):
        right = tl.load(y + (begin + k) * y_stride + y_tile, mask=(j < count - k)[:, None] & (d < D)[None, :], other=0)
        a_corner += a_step
        ahead = tl.load(a_corner + a_tile, mask=(i < tall)[:, None] & (j < count - k - BLOCK_N)[None, :], other=0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        left = ahead
    at = out + start * D + i[:, None] * D + d[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(i < tall)[:, None] & (d < D)[None, :])


@triton.jit
def _bmm_gradients_kernel(
    grad,
    a,
    y,
    offsets,
    squares,
    da,
    dy,
    num_rows,
    D,
    grad_stride,
    y_stride,
    TRANSPOSE: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Both gradients of `inner`: blocks of grad pass a tile of y, for da and dy at once."""
    row, begin, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_M, STEPS)
    if start >= end:
        return
    count = (end - begin).to(tl.int32)
    tall = (end - start).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it. A tile's lines are columns of the matrix, or rows.
    corner = tl.load(squares + row).to(tl.int64)
    if TRANSPOSE:
        corner += (start - begin) * count
        tile = m[:, None] * count + n[None, :]
        step = (end - begin) * 0 + BLOCK_N
    else:
        corner += start - begin
        tile = n[None, :] * count + m[:, None]
        step = BLOCK_N * (end - begin)
    y_tile = m[:, None] * y_stride + d[None, :]
    own = tl.load(y + start * y_stride + y_tile, mask=(m < tall)[:, None] & (d < D)[None, :], other=0)
    grad_tile = n[:, None] * grad_stride + d[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    left = tl.load(a + corner + tile, mask=(m < tall)[:, None] & (n < count)[None, :], other=0)
    for k in range(0, count, BLOCK_N):
        mask = (m < tall)[:, None] & (n < count - k)[None, :]
        right_mask = (n < count - k)[:, None] & (d < D)[None, :]
        right = tl.load(grad + (begin + k) * grad_stride + grad_tile, mask=right_mask, other=0)
        left_mask = (m < tall)[:, None] & (n < count - k - BLOCK_N)[None, :]
        ahead = tl.load(a + corner + step + tile, mask=left_mask, other=0)  # as in `_bmm_inner_kernel`
        total = tl.dot(left, right, total, input_precision=PRECISION)
        product = tl.dot(own, tl.trans(right), input_precision=PRECISION)
        tl.store(da + corner + tile, product.to(da.dtype.element_ty), mask=mask)
        left = ahead
        corner += step
    at = dy + start * D + m[:, None] * D + d[None, :]
    tl.store(at, total.to(dy.dtype.element_ty), mask=(m < tall)[:, None] & (d < D)[None, :])


def _outer_config(dtype: torch.dtype, width: int, from_registers: bool = False) -> dict[str, Any]:
    precision = precision_of(dtype)
    single = dtype is torch.float32
    # Three tf32 products of a tile keep so many operands that only a small one fits into registers.
    thrice = precision == "tf32x3"
    return {
        "PRECISION": precision,
        "BLOCK_M": 64,
        "BLOCK_N": 32 if thrice else 128,
        "BLOCK_D": block_width(width, 32 if single else 64),
        "num_warps": 8 if from_registers else 4,
        "num_stages": 4 if single and not thrice else 3,
    }


def _inner_config(dtype: torch.dtype, width: int) -> dict[str, int]:
    single = dtype is torch.float32
    return {
        "BLOCK_M": 32 if single else 64,
        "BLOCK_N": 16 if single else 32,
        "BLOCK_D": block_width(width, 128 if precision_of(dtype) == "tf32x3" else 256),
        "num_warps": 4 if single else 8,
        "num_stages": 3,
    }


def _gradients_config(width: int, from_registers: bool = False) -> dict[str, int]:
    warps = 8 if from_registers else 4
    return {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_D": block_width(width), "num_warps": warps, "num_stages": 3}


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


@custom_op("gemsmith::jagged_outer")
def outer(x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int) -> Tensor:
    """x [N, D], y [N, D] -> [total], row b's matrix from squares[b] on."""
    out = x.new_empty(total)
    if total == 0:
        return out
    if x.shape[1] == 0:
        return out.zero_()
    x, y = flat(x), flat(y)
    num_rows, width = offsets.shape[0] - 1, x.shape[1]
    config = _outer_config(x.dtype, width, multiplies_registers(x.device))
    # Copies by TMA take no registers for addresses, of which three products have too few.
    tma = config["PRECISION"] == "tf32x3" and width >= 64 and width % 4 == 0 and is_hopper(x.device)
    if tma:
        config["BLOCK_D"] = 64
        x, y = addressable(x), addressable(y)
    _bmm_outer_kernel[(num_tiles(x.shape[0], num_rows, config["BLOCK_M"]),)](
        _blocks(x, config["BLOCK_M"], config["BLOCK_D"]) if tma else x,
        _blocks(y, config["BLOCK_N"], config["BLOCK_D"]) if tma else y,
        offsets.contiguous(),
        squares.contiguous(),
        out,
        num_rows,
        width,
        x.stride(0),
        y.stride(0),
        TMA=tma,
        STEPS=steps_of(num_rows),
        **config,
    )
    return out


@outer.register_fake
def _(x, y, offsets, squares, total):
    return x.new_empty(total)


@custom_op("gemsmith::jagged_inner", like="y")
def inner(a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, transpose: bool) -> Tensor:
    """a [sum of L_b^2], y [N, D] -> [N, D]."""
    out = y.new_empty(y.shape)
    if out.numel() == 0:
        return out
    y = flat(y)
    num_rows, width = offsets.shape[0] - 1, y.shape[1]
    config = _inner_config(y.dtype, width)
    _bmm_inner_kernel[(num_tiles(y.shape[0], num_rows, config["BLOCK_M"]), cdiv(width, config["BLOCK_D"]))](
        a.contiguous(),
        y,
        offsets.contiguous(),
        squares.contiguous(),
        out,
        num_rows,
        width,
        y.stride(0),
        TRANSPOSE=transpose,
        STEPS=steps_of(num_rows),
        PRECISION=precision_of(y.dtype),
        **config,
    )
    return out


@custom_op("gemsmith::jagged_inner_gradients", like=("a", "y"))
def inner_gradients(
    grad: Tensor, a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, transpose: bool
) -> tuple[Tensor, Tensor]:
    """(da, dy) of `inner`, in half precision for D of up to 256."""
    da, dy = a.new_empty(a.shape), y.new_empty(y.shape)
    if dy.numel() == 0:
        return da.zero_(), dy
    grad, y = flat(grad), flat(y)
    num_rows, width = offsets.shape[0] - 1, y.shape[1]
    config = _gradients_config(width, multiplies_registers(y.device))
    _bmm_gradients_kernel[(num_tiles(y.shape[0], num_rows, config["BLOCK_M"]),)](
        grad,
        a.contiguous(),
        y,
        offsets.contiguous(),
        squares.contiguous(),
        da,
        dy,
        num_rows,
        width,
        grad.stride(0),
        y.stride(0),
        TRANSPOSE=transpose,
        STEPS=steps_of(num_rows),
        PRECISION=precision_of(y.dtype),
        **config,
    )
    return da, dy


def register_outer(outer: Any, inner: Any) -> None:
    """The second is the gradient of the first."""

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])

    def gradient(ctx, grad):
        x, y, offsets, squares = ctx.saved_tensors
        dx = inner(grad, y, offsets, squares, False) if ctx.needs_input_grad[0] else None
        dy = inner(grad, x, offsets, squares, True) if ctx.needs_input_grad[1] else None
        return dx, dy, None, None, None

    outer.register_autograd(gradient, setup_context=save)


def register_inner(inner: Any, outer: Any, inner_gradients: Any, fused: Callable[[Tensor], bool]) -> None:
    """The second is the gradient of the first's matrix; where `fused` says so of y, the third makes both gradients."""

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])
        ctx.transpose = inputs[4]

    def gradient(ctx, grad):
        a, y, offsets, squares = ctx.saved_tensors
        da = dy = None
        # The two below can be differentiated again.
        if all(ctx.needs_input_grad[:2]) and fused(y) and not torch.is_grad_enabled():
            da, dy = inner_gradients(grad, a, y, offsets, squares, ctx.transpose)
            return da, dy, None, None, None
        if ctx.needs_input_grad[0]:
            x, y_of_a = (y, grad) if ctx.transpose else (grad, y)
            da = outer(x, y_of_a, offsets, squares, a.shape[0])
        if ctx.needs_input_grad[1]:
            dy = inner(a, grad, offsets, squares, not ctx.transpose)
        return da, dy, None, None, None

    inner.register_autograd(gradient, setup_context=save)


def _fused(y: Tensor) -> bool:
    return y.dtype is not torch.float32 and y.shape[1] <= MAX_WIDTH  # float32 values have no room beside their sums


register_outer(outer, inner)
register_inner(inner, outer, inner_gradients, _fused)


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, total: int, max_length: int
) -> Tensor:
    return outer(x, y, offsets, squares, total)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, offsets: Tensor, squares: Tensor, max_length: int, transpose: bool
) -> Tensor:
    return inner(a, y, offsets, squares, transpose)
