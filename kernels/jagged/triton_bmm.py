"""Products of jagged rows with dense matrices, and of two jagged tensors over their rows; Triton.

    dense:   out[i] = x[i] @ y[b] for i in row b            [N, D], [B, D, E] -> [N, E]
    jagged:  out[b] = x[row b]^T @ y[row b]                 [N, D], [N, E] -> [B, D, E]

Each is the other's gradient, so that three launches serve four products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jagged.triton_common import flat, num_tiles, precision_of, steps_of, tile_of, tile_shape


@triton.jit
def _dense_kernel(
    x,
    offsets,
    y,
    out,
    num_rows,
    K,
    E,
    x_stride,
    y_stride_b,
    y_stride_k,
    y_stride_e,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """SWAP multiplies the transposes, for an E so narrow that it would leave most of a product's columns empty."""
    row, _, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_M, STEPS)
    if start >= end:
        return
    tall = (end - start).to(tl.int32)
    i = tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it.
    x_corner = x + start * x_stride
    y_corner = y + row * y_stride_b
    x_tile = i[:, None] * x_stride + inner[None, :]
    y_tile = inner[:, None] * y_stride_k + column[None, :] * y_stride_e
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(x_corner + x_tile, mask=(i < tall)[:, None] & (inner < K - k)[None, :], other=0)
        right = tl.load(y_corner + y_tile, mask=(inner < K - k)[:, None] & (column < E)[None, :], other=0)
        if SWAP:
            total = tl.dot(tl.trans(right), tl.trans(left), total, input_precision=PRECISION)
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
        x_corner += BLOCK_K
        y_corner += BLOCK_K * y_stride_k
    if SWAP:
        total = tl.trans(total)
    at = out + start * E + i[:, None] * E + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(i < tall)[:, None] & (column < E)[None, :])


@triton.jit
def _outer_sum_kernel(
    x,
    offsets,
    y,
    out,
    num_rows,
    E,
    x_stride,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`_dense_kernel` for so few terms K that reading and writing take all the time: no tensor cores, no rounding."""
    row, _, end, start = tile_of(offsets, num_rows, tl.program_id(0), BLOCK_M, STEPS)
    if start >= end:
        return
    tall = (end - start).to(tl.int32)
    i = tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.static_range(K):
        left = tl.load(x + start * x_stride + k + i * x_stride, mask=i < tall, other=0).to(tl.float32)
        right = tl.load(y + (row * K + k) * E + column, mask=column < E, other=0).to(tl.float32)
        total += left[:, None] * right[None, :]
    at = out + start * E + i[:, None] * E + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(i < tall)[:, None] & (column < E)[None, :])


@triton.jit
def _jagged_kernel(
    x,
    y,
    offsets,
    out,
    D,
    E,
    x_stride,
    y_stride,
    out_stride_d,
    out_stride_e,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1).to(tl.int64) - begin).to(tl.int32)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    step = tl.arange(0, BLOCK_L)
    x_tile = step[:, None] * x_stride + d[None, :]
    y_tile = step[:, None] * y_stride + e[None, :]
    total = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for i in range(0, count, BLOCK_L):
        left = tl.load(
            x + (begin + i) * x_stride + x_tile, mask=(step < count - i)[:, None] & (d < D)[None, :], other=0
        )
        right = tl.load(
            y + (begin + i) * y_stride + y_tile, mask=(step < count - i)[:, None] & (e < E)[None, :], other=0
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    at = out + row * D * E + d[:, None] * out_stride_d + e[None, :] * out_stride_e
    tl.store(at, total.to(out.dtype.element_ty), mask=(d < D)[:, None] & (e < E)[None, :])


FEW_TERMS = 8  # of an inner product, up to which tensor cores are not worth their tiles


def _block(width: int, most: int) -> int:
    """A power of two between 16, the least that tensor cores take, and `most`."""
    return max(16, min(most, triton.next_power_of_2(width)))


def _dense_config(dtype: torch.dtype, inner: int, width: int) -> dict[str, int]:
    narrow = width <= 32
    if dtype is torch.float32:
        # Tiles of 32 rows keep to the tensor core instructions that take float32 operands in either order.
        return {
            "SWAP": narrow,
            "BLOCK_M": 64 if narrow else 32,
            "BLOCK_N": _block(width, 128),
            "BLOCK_K": _block(inner, 32),
            "num_warps": 4,
            "num_stages": 3,
        }
    return {
        "SWAP": narrow,
        "BLOCK_M": 64,
        "BLOCK_N": _block(width, 128),
        "BLOCK_K": _block(inner, 64),
        "num_warps": 4,
        "num_stages": 3,
    }


def _jagged_config(dtype: torch.dtype, narrow: int, wide: int) -> dict[str, int]:
    single = dtype is torch.float32
    return {
        "BLOCK_D": _block(narrow, 32 if single else 128),
        "BLOCK_E": _block(wide, 64 if single else 128),
        "BLOCK_L": 32,
        "num_warps": 4,
        "num_stages": 3,
    }


@torch.library.custom_op("gemsmith::jagged_dense_bmm", mutates_args=())
def dense_bmm(x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    """x [N, D], y [B, D, E] of any strides -> [N, E]."""
    out = x.new_empty(x.shape[0], y.shape[2])
    if out.numel() == 0:
        return out
    x = flat(x)
    num_rows, inner, width = y.shape
    if inner <= FEW_TERMS:
        block_m, block_n = tile_shape(width, elements=4096, widest=256)
        block_m = min(block_m, 64)
        _outer_sum_kernel[(num_tiles(x.shape[0], num_rows, block_m), triton.cdiv(width, block_n))](
            x,
            offsets.contiguous(),
            y.contiguous(),
            out,
            num_rows,
            width,
            x.stride(0),
            K=inner,
            STEPS=steps_of(num_rows),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
        )
        return out
    config = _dense_config(x.dtype, inner, width)
    _dense_kernel[(num_tiles(x.shape[0], num_rows, config["BLOCK_M"]), triton.cdiv(width, config["BLOCK_N"]))](
        x,
        offsets.contiguous(),
        y,
        out,
        num_rows,
        inner,
        width,
        x.stride(0),
        *y.stride(),
        STEPS=steps_of(num_rows),
        PRECISION=precision_of(x.dtype),
        **config,
    )
    return out


@dense_bmm.register_fake
def _(x, offsets, y):
    return x.new_empty(x.shape[0], y.shape[2])


@torch.library.custom_op("gemsmith::jagged_jagged_bmm", mutates_args=())
def jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """x [N, D], y [N, E] -> [B, D, E]."""
    num_rows = offsets.shape[0] - 1
    out = x.new_empty(num_rows, x.shape[1], y.shape[1])
    if out.numel() == 0:
        return out
    x, y = flat(x), flat(y)
    # The narrower one comes first, which the instructions prefer.
    strides = (y.shape[1], 1)
    if x.shape[1] > y.shape[1]:
        x, y, strides = y, x, (1, y.shape[1])
    config = _jagged_config(x.dtype, x.shape[1], y.shape[1])
    _jagged_kernel[(num_rows, triton.cdiv(x.shape[1], config["BLOCK_D"]), triton.cdiv(y.shape[1], config["BLOCK_E"]))](
        x,
        y,
        offsets.contiguous(),
        out,
        x.shape[1],
        y.shape[1],
        x.stride(0),
        y.stride(0),
        *strides,
        PRECISION=precision_of(x.dtype),
        **config,
    )
    return out


@jagged_bmm.register_fake
def _(x, y, offsets):
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def _save_dense(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _dense_gradient(ctx, grad):
    x, offsets, y = ctx.saved_tensors
    dx = dense_bmm(grad, offsets, y.mT) if ctx.needs_input_grad[0] else None
    dy = jagged_bmm(x, grad, offsets) if ctx.needs_input_grad[2] else None
    return dx, None, dy


def _jagged_gradient(ctx, grad):
    x, y, offsets = ctx.saved_tensors
    dx = dense_bmm(y, offsets, grad.mT) if ctx.needs_input_grad[0] else None
    dy = dense_bmm(x, offsets, grad) if ctx.needs_input_grad[1] else None
    return dx, dy, None


dense_bmm.register_autograd(_dense_gradient, setup_context=_save_dense)
jagged_bmm.register_autograd(_jagged_gradient, setup_context=_save_dense)
