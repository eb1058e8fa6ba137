"""Products of jagged rows with dense matrices, and of two jagged tensors over their rows; Triton.

    dense:   out[i] = x[i] @ y[b] for i in row b            [N, D], [B, D, E] -> [N, E]
    jagged:  out[b] = x[row b]^T @ y[row b]                 [N, D], [N, E] -> [B, D, E]

Each is the other's gradient. Where one of D and E is narrow, `triton.bmm_narrow` makes both gradients in one launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.chip import multiplies_registers
from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import block_width, cdiv, flat, num_tiles, precision_of, steps_of, tile_of
from kernels.jagged.triton import bmm_narrow
from kernels.jagged.triton.parts import join, num_parts, part_of, part_size, slots


@triton.jit(do_not_specialize=["num_rows"])
def _bmm_dense_kernel(
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


@triton.jit(do_not_specialize=["num_rows"])
def _bmm_jagged_kernel(
    x,
    y,
    offsets,
    out,
    parts,
    num_rows,
    D,
    E,
    x_stride,
    y_stride,
    out_stride_d,
    out_stride_e,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    # Neighbours have the blocks of one part, whose places are apart in memory by no more than those of a block.
    columns = tl.cdiv(E, BLOCK_E)
    blocks = tl.cdiv(D, BLOCK_D) * columns
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, begin, end, first, last, slot = part_of(offsets, num_rows, program, PART, STEPS, tl.num_programs(0) // blocks)
    if (program >= num_rows) & (first >= last):
        return
    count = (last - first).to(tl.int32)
    d = block // columns * BLOCK_D + tl.arange(0, BLOCK_D)
    e = block % columns * BLOCK_E + tl.arange(0, BLOCK_E)
    step = tl.arange(0, BLOCK_L)
    x_tile = step[:, None] * x_stride + d[None, :]
    y_tile = step[:, None] * y_stride + e[None, :]
    total = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for i in range(0, count, BLOCK_L):
        left = tl.load(
            x + (first + i) * x_stride + x_tile, mask=(step < count - i)[:, None] & (d < D)[None, :], other=0
        )
        right = tl.load(
            y + (first + i) * y_stride + y_tile, mask=(step < count - i)[:, None] & (e < E)[None, :], other=0
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    at = d[:, None] * out_stride_d + e[None, :] * out_stride_e
    inside = (d < D)[:, None] & (e < E)[None, :]
    whole = end - begin <= PART
    tl.store(out + row * D * E + at, total.to(out.dtype.element_ty), mask=inside & whole)
    tl.store(parts + slot * D * E + at, total, mask=inside & ~whole)


def _dense_config(dtype: torch.dtype, inner: int, width: int) -> dict[str, int]:
    single, narrow = dtype is torch.float32, width <= 32
    return {
        "SWAP": narrow,
        # Tiles of 32 rows keep to the tensor core instructions that take float32 operands in either order.
        "BLOCK_M": 32 if single and not narrow else 64,
        "BLOCK_N": block_width(width, 128),
        "BLOCK_K": block_width(inner, 32 if single else 64),
        "num_warps": 4,
        "num_stages": 3,
    }


def _jagged_config(dtype: torch.dtype, narrow: int, wide: int, from_registers: bool = False) -> dict[str, Any]:
    single = dtype is torch.float32
    if single and narrow <= 8:
        # Exact multiply-adds of so few columns take no longer than reading the wide operand; tensor cores would take
        # twice as many columns, in three tf32 products.
        return {
            "PRECISION": "ieee",
            "BLOCK_D": 8,
            "BLOCK_E": block_width(wide, 128),
            "BLOCK_L": 16,
            "num_warps": 4,
            "num_stages": 3,
        }
    if not single and narrow <= 16:
        # Little arithmetic and much to load: many small programs.
        return {
            "PRECISION": precision_of(dtype),
            "BLOCK_D": 16,
            "BLOCK_E": block_width(wide, 128),
            "BLOCK_L": 32,
            "num_warps": 2,
            "num_stages": 2,
        }
    return {
        "PRECISION": precision_of(dtype),
        "BLOCK_D": block_width(narrow, 32 if single else 128),
        "BLOCK_E": block_width(wide, 64 if single else 128),
        "BLOCK_L": 32,
        "num_warps": 8 if from_registers else 4,
        "num_stages": 3,
    }


def dense(x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    num_rows, inner, width = y.shape
    if bmm_narrow.serves(inner, width, x.dtype, ("narrow",)):
        return bmm_narrow.products(offsets, wide=x, matrix=y, to=("narrow",))["narrow"]
    if bmm_narrow.serves(width, inner, x.dtype, ("wide",)):
        return bmm_narrow.products(offsets, narrow=x, matrix=y.mT, to=("wide",))["wide"]
    out = x.new_empty(x.shape[0], width)
    if out.numel() == 0:
        return out
    x, offsets = flat(x), offsets.contiguous()
    config = _dense_config(x.dtype, inner, width)
    *blocks, warps, stages = config.values()
    numbers = (inner, width, x.stride(0), *y.stride(), steps_of(num_rows), precision_of(x.dtype), *blocks)
    _launch_dense(
        (num_tiles(x.shape[0], num_rows, config["BLOCK_M"]), cdiv(width, config["BLOCK_N"]), 1),
        (x.device, x.dtype, y.dtype, offsets.dtype, *aligned(x, offsets, y), *numbers, warps, stages),
        x, offsets, y, out, num_rows, *numbers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def jagged(x: Tensor, y: Tensor, offsets: Tensor, longest: int) -> Tensor:
    num_rows = offsets.shape[0] - 1
    out = x.new_empty(num_rows, x.shape[1], y.shape[1])
    if out.numel() == 0:
        return out
    x, y, offsets = flat(x), flat(y), offsets.contiguous()
    # The narrower one comes first, which the instructions prefer.
    strides = (y.shape[1], 1)
    if x.shape[1] > y.shape[1]:
        x, y, strides = y, x, (1, y.shape[1])
    config = _jagged_config(x.dtype, x.shape[1], y.shape[1], multiplies_registers(x.device))
    total, part = x.shape[0], part_size(longest)
    parts = slots(x, total, part, x.shape[1] * y.shape[1])
    blocks = cdiv(x.shape[1], config["BLOCK_D"]) * cdiv(y.shape[1], config["BLOCK_E"])
    *tiles, warps, stages = config.values()
    numbers = (x.shape[1], y.shape[1], x.stride(0), y.stride(0), *strides, part, steps_of(num_rows), *tiles)
    _launch_jagged(
        (num_parts(total, num_rows, part) * blocks, 1, 1),
        (x.device, x.dtype, y.dtype, offsets.dtype, *aligned(x, y, offsets), *numbers, warps, stages),
        x, y, offsets, out, parts, num_rows, *numbers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    join(parts, offsets, out, total, part)
    return out


_launch_dense = Launcher(_bmm_dense_kernel)
_launch_jagged = Launcher(_bmm_jagged_kernel)


@custom_op("gemsmith::jagged_dense_bmm")
def dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, longest: int) -> Tensor:
    """x [N, D], y [B, D, E] of any strides -> [N, E]; `longest` is a length that few rows exceed, for the gradient."""
    return dense(x, offsets, y)


@dense_bmm.register_fake
def _(x, offsets, y, longest):
    return x.new_empty(x.shape[0], y.shape[2])


@custom_op("gemsmith::jagged_jagged_bmm")
def jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """x [N, D], y [N, E] -> [B, D, E]; rows longer than `longest` are right, but may not be spread over the chip."""
    return jagged(x, y, offsets, longest)


@jagged_bmm.register_fake
def _(x, y, offsets, longest):
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


@custom_op("gemsmith::jagged_dense_bmm_gradient")
def dense_gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, y: Tensor, longest: int, of_x: bool, of_y: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dy) of `dense_bmm`; of no size where it is not asked for."""
    inner, width = y.shape[1:]
    if of_x and of_y and bmm_narrow.serves(inner, width, x.dtype, ("wide", "matrix")):
        made = bmm_narrow.products(offsets, wide=x, narrow=grad, matrix=y, to=("wide", "matrix"), longest=longest)
        return made["wide"], made["matrix"]
    if of_x and of_y and bmm_narrow.serves(width, inner, x.dtype, ("narrow", "matrix")):
        made = bmm_narrow.products(
            offsets, wide=grad, narrow=x, matrix=y.mT, to=("narrow", "matrix"), longest=longest, transposed=True
        )
        return made["narrow"], made["matrix"]
    dx = dense(grad, offsets, y.mT) if of_x else x.new_empty(0)
    return dx, jagged(x, grad, offsets, longest) if of_y else y.new_empty(0)


@dense_gradient.register_fake
def _(grad, x, offsets, y, longest, of_x, of_y):
    return x.new_empty(x.shape if of_x else 0), y.new_empty(y.shape if of_y else 0)


@custom_op("gemsmith::jagged_jagged_bmm_gradient")
def jagged_gradient(
    grad: Tensor, x: Tensor, y: Tensor, offsets: Tensor, of_x: bool, of_y: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dy) of `jagged_bmm`; of no size where it is not asked for."""
    if of_x and of_y and bmm_narrow.serves(x.shape[1], y.shape[1], x.dtype, ("wide", "narrow")):
        made = bmm_narrow.products(offsets, wide=x, narrow=y, matrix=grad, to=("wide", "narrow"))
        return made["wide"], made["narrow"]
    if of_x and of_y and bmm_narrow.serves(y.shape[1], x.shape[1], x.dtype, ("wide", "narrow")):
        made = bmm_narrow.products(offsets, wide=y, narrow=x, matrix=grad.mT, to=("wide", "narrow"))
        return made["narrow"], made["wide"]
    dx = dense(y, offsets, grad.mT) if of_x else x.new_empty(0)
    return dx, dense(x, offsets, grad) if of_y else y.new_empty(0)


@jagged_gradient.register_fake
def _(grad, x, y, offsets, of_x, of_y):
    return x.new_empty(x.shape if of_x else 0), y.new_empty(y.shape if of_y else 0)


def save_dense(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.longest = inputs[3]


def save_jagged(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def dense_backward(ctx, grad):
    of_x, _, of_y, _ = ctx.needs_input_grad
    dx, dy = dense_gradient(grad, *ctx.saved_tensors, ctx.longest, of_x, of_y)
    return dx if of_x else None, None, dy if of_y else None, None


def jagged_backward(ctx, grad):
    of_x, of_y, _, _ = ctx.needs_input_grad
    dx, dy = jagged_gradient(grad, *ctx.saved_tensors, of_x, of_y)
    return dx if of_x else None, dy if of_y else None, None, None


dense_bmm.register_autograd(dense_backward, setup_context=save_dense)
jagged_bmm.register_autograd(jagged_backward, setup_context=save_jagged)
