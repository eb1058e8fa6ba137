"""activation(x op y), y a value for each value of x or one for each row; Triton.

The result is computed in float32 and rounded once. The backward computes x op y again instead of keeping it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jagged.triton_activations import activate, slope
from kernels.jagged.triton_common import flat, reduction_tile, row_of, steps_of, tile_shape


@triton.jit
def _combine(x, y, OP: tl.constexpr):
    if OP == "add":
        z = x + y
    elif OP == "mul":
        z = x * y
    else:
        z = x
    return z


@triton.jit
def _forward_kernel(
    x,
    y,
    offsets,
    out,
    total,
    num_rows,
    width,
    x_stride,
    y_stride,
    OP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DENSE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (place < total)[:, None] & (column < width)[None, :]
    y_row = row_of(offsets, num_rows, place, STEPS) if DENSE else place
    left = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    right = tl.load(y + y_row[:, None] * y_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    z = activate(_combine(left, right, OP), ACTIVATION)
    tl.store(out + place[:, None] * width + column[None, :], z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_kernel(
    grad,
    x,
    y,
    offsets,
    dx,
    dy,
    width,
    grad_stride,
    x_stride,
    y_stride,
    step,
    total,
    OP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program has a row, whose y is one vector with DENSE, or else `step` values."""
    row = tl.program_id(0).to(tl.int64)
    if DENSE:
        begin = tl.load(offsets + row).to(tl.int64)
        end = tl.load(offsets + row + 1).to(tl.int64)
    else:
        begin = row * step
        end = tl.minimum(begin + step, total)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    partial = tl.zeros([BLOCK_L, BLOCK_W], tl.float32)
    if DENSE:
        # Without an operation y is only written.
        right = tl.load(y + row * y_stride + column, mask=inside & (OP != "none"), other=0).to(tl.float32)[None, :]
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        mask = (place < end)[:, None] & inside[None, :]
        at = place[:, None] * width + column[None, :]
        g = tl.load(grad + place[:, None] * grad_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        left = tl.load(x + place[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        if not DENSE:
            right = tl.load(y + place[:, None] * y_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        g *= slope(_combine(left, right, OP), ACTIVATION)
        of_y = g * left if OP == "mul" else g
        of_x = g * right if OP == "mul" else g
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), mask=mask)
        if DENSE:
            # Masked places are zero: their g is.
            partial += of_y
        else:
            tl.store(dy + at, of_y.to(dy.dtype.element_ty), mask=mask)
    if DENSE:
        tl.store(dy + row * width + column, tl.sum(partial, 0).to(dy.dtype.element_ty), mask=inside)


@torch.library.custom_op("gemsmith::jagged_elementwise", mutates_args=())
def elementwise(x: Tensor, y: Tensor, offsets: Tensor, op: str, activation: str, dense: bool) -> Tensor:
    """x [N, ...], y [N, ...] or with `dense` [B, ...] -> [N, ...]; op is 'add' or 'mul'."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    x, y = flat(x), flat(y)
    total, width = x.shape
    num_rows = offsets.shape[0] - 1
    block_r, block_w = tile_shape(width)
    _forward_kernel[(triton.cdiv(total, block_r), triton.cdiv(width, block_w))](
        x,
        y,
        offsets.contiguous(),
        out,
        total,
        num_rows,
        width,
        x.stride(0),
        y.stride(0),
        OP=op,
        ACTIVATION=activation,
        DENSE=dense,
        STEPS=steps_of(num_rows),
        BLOCK_R=block_r,
        BLOCK_W=block_w,
    )
    return out


@elementwise.register_fake
def _(x, y, offsets, op, activation, dense):
    return x.new_empty(x.shape)


@torch.library.custom_op("gemsmith::jagged_elementwise_gradient", mutates_args=())
def gradient(
    grad: Tensor, x: Tensor, y: Tensor, offsets: Tensor, op: str, activation: str, dense: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dy) of `elementwise`; with op 'none' of activation(x), and dy [B, ...] are the row sums of dx."""
    dx, dy = x.new_empty(x.shape), y.new_empty(y.shape)
    if dx.numel() == 0:
        return dx, dy.zero_()
    grad, x, y = flat(grad), flat(x), flat(y)
    total, width = x.shape
    if dense:
        programs = offsets.shape[0] - 1
        block_l, block_w = reduction_tile(width, programs, elements=2048)
        step = 0
    else:
        block_l, block_w = tile_shape(width, elements=2048, widest=256)
        step = block_l * 4
        programs = triton.cdiv(total, step)
    _gradient_kernel[(programs, triton.cdiv(width, block_w))](
        grad,
        x,
        y,
        offsets.contiguous(),
        dx,
        dy,
        width,
        grad.stride(0),
        x.stride(0),
        y.stride(0),
        step,
        total,
        OP=op,
        ACTIVATION=activation,
        DENSE=dense,
        BLOCK_L=block_l,
        BLOCK_W=block_w,
    )
    return dx, dy


@gradient.register_fake
def _(grad, x, y, offsets, op, activation, dense):
    return x.new_empty(x.shape), y.new_empty(y.shape)


def _save_operands(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.facts = inputs[3:]


elementwise.register_autograd(
    lambda ctx, grad: (*gradient(grad, *ctx.saved_tensors, *ctx.facts), None, None, None, None),
    setup_context=_save_operands,
)
