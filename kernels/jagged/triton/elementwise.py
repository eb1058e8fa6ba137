"""activation(x op y), y a value for each value of x or one for each row; Triton.

The result is computed in float32 and rounded once. The backward recomputes x op y.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, row_of, steps_of, tile_shape
from kernels.jagged.triton.activations import activate, slope
from kernels.jagged.triton.parts import join, num_parts, part_of, reduction_blocks, slots

PART = 128  # places of a program that sums them
APART = 16  # places of a program that does not


@triton.jit
def _combine(x, y, OP: tl.constexpr):
    if OP == "add":
        z = x + y
    elif OP == "mul":
        z = x * y
    else:
        z = x
    return z


@triton.jit(do_not_specialize=["total", "num_rows"])
def _elementwise_kernel(
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
    z = activate(_combine(left, right, OP), ACTIVATION, out.dtype.element_ty != tl.float32)
    tl.store(out + place[:, None] * width + column[None, :], z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load(x, place, last, stride, inside, EVEN: tl.constexpr):
    """After the last place it loads that one again: loads without conditions are issued together."""
    at = x + tl.minimum(place, last) * stride
    if EVEN:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside[None, :], other=0)
    return values


@triton.jit(do_not_specialize=["total", "num_rows"])
def _elementwise_gradient_kernel(
    grad,
    x,
    y,
    offsets,
    dx,
    dy,
    parts,
    total,
    num_rows,
    width,
    grad_stride,
    x_stride,
    y_stride,
    OP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DENSE: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SUMS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """With DENSE a program has a part of a row, whose y is one vector, otherwise PART values."""
    if DENSE:
        row, begin, end, first, last, slot = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    else:
        first = tl.program_id(0).to(tl.int64) * PART
        last = tl.minimum(first + PART, total)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    if DENSE:  # noqa: SIM102
        if first >= last:
            empty = tl.zeros([BLOCK_W], dy.dtype.element_ty)
            tl.store(dy + row * width + column, empty, mask=inside & (tl.program_id(0) < num_rows))
            return
    partial = tl.zeros([SUMS, BLOCK_W], tl.float32)
    if DENSE:
        # Without an operation y is only written.
        right = tl.load(y + row * y_stride + column, mask=inside & (OP != "none"), other=0).to(tl.float32)[None, :]
    # 64-bit arithmetic for the corner of a part, 32-bit within it.
    tall = (last - first).to(tl.int32)
    grad += first * grad_stride + column[None, :]
    x += first * x_stride + column[None, :]
    dx += first * width + column[None, :]
    if not DENSE:
        y += first * y_stride + column[None, :]
        dy += first * width + column[None, :]
    i = tl.arange(0, BLOCK_L)[:, None]
    if DENSE:
        # The next values of the row are loaded while these are computed.
        next_g = _load(grad, i, tall - 1, grad_stride, inside, EVEN)
        next_left = _load(x, i, tall - 1, x_stride, inside, EVEN)
    for start in range(0, tall, BLOCK_L):
        place = start + i
        if DENSE:
            g, left = next_g, next_left
            next_g = _load(grad, place + BLOCK_L, tall - 1, grad_stride, inside, EVEN)
            next_left = _load(x, place + BLOCK_L, tall - 1, x_stride, inside, EVEN)
        else:
            g = _load(grad, place, tall - 1, grad_stride, inside, EVEN)
            left = _load(x, place, tall - 1, x_stride, inside, EVEN)
            right = _load(y, place, tall - 1, y_stride, inside, EVEN).to(tl.float32)
        g = g.to(tl.float32)
        left = left.to(tl.float32)
        g *= slope(_combine(left, right, OP), ACTIVATION, dx.dtype.element_ty != tl.float32)
        of_y = g * left if OP == "mul" else g
        of_x = g * right if OP == "mul" else g
        mask = (place < tall) & inside[None, :]
        tl.store(dx + place * width, of_x.to(dx.dtype.element_ty), mask=mask)
        if DENSE:
            of_y = tl.where(place < tall, of_y, 0.0)
            partial += tl.sum(tl.reshape(of_y, [BLOCK_L // SUMS, SUMS, BLOCK_W]), 0)
        else:
            tl.store(dy + place * width, of_y.to(dy.dtype.element_ty), mask=mask)
    if DENSE:
        whole = end - begin <= PART
        sums = tl.sum(partial, 0)
        tl.store(dy + row * width + column, sums.to(dy.dtype.element_ty), mask=inside & whole)
        tl.store(parts + slot * width + column, sums, mask=inside & ~whole)


def _rows(offsets: Tensor | None, x: Tensor) -> tuple[bool, Tensor, int]:
    """(whether y has a value for each row, offsets, number of rows); without rows any tensor replaces offsets."""
    return (False, x, 0) if offsets is None else (True, offsets.contiguous(), offsets.shape[0] - 1)


@custom_op("gemsmith::jagged_elementwise", like="x")
def elementwise(x: Tensor, y: Tensor, offsets: Tensor | None, op: str, activation: str) -> Tensor:
    """x [N, ...], y [N, ...] or with `offsets` [B, ...] -> [N, ...]; op is 'add' or 'mul'."""
    out = x.new_empty(*x.shape)
    if out.numel() == 0:
        return out
    x, y = flat(x), flat(y)
    dense, offsets, num_rows = _rows(offsets, x)
    total, width = x.shape
    block_r, block_w = tile_shape(width)
    numbers = (width, x.stride(0), y.stride(0), op, activation, dense, steps_of(num_rows), block_r, block_w)
    _launch_forward(
        (cdiv(total, block_r), cdiv(width, block_w), 1),
        (x.device, x.dtype, y.dtype, offsets.dtype, *aligned(x, y, offsets), total >> 31, *numbers),
        x, y, offsets, out, total, num_rows, *numbers,
    )  # fmt: skip
    return out


@custom_op("gemsmith::jagged_elementwise_gradient", like=("x", "y"))
def gradient(
    grad: Tensor, x: Tensor, y: Tensor, offsets: Tensor | None, op: str, activation: str
) -> tuple[Tensor, Tensor]:
    """(dx, dy) of `elementwise`; with op 'none' those of activation(x), where dy [B, ...] are the row sums of dx."""
    dx, dy = x.new_empty(*x.shape), y.new_empty(*y.shape)
    if dx.numel() == 0:
        return dx, dy.zero_()
    grad, x, y = flat(grad), flat(x), flat(y)
    dense, offsets, num_rows = _rows(offsets, x)
    total, width = x.shape
    if dense:
        part, programs = PART, num_parts(total, num_rows, PART)
    else:
        part, programs = APART, cdiv(total, APART)
    if dense and x.element_size() < 4:
        blocks = reduction_blocks(width, programs, x.element_size(), 2, warps=2, widest=128)
    else:
        blocks = reduction_blocks(width, programs, x.element_size(), 4)
    parts = slots(x, total, part, width) if dense else dx
    block_l, block_w, sums, warps = blocks.values()
    tensors = (grad, x, y, offsets)
    numbers = (width, grad.stride(0), x.stride(0), y.stride(0), op, activation, dense, part, steps_of(num_rows))
    constants = (*numbers, block_l, block_w, sums, width % block_w == 0)
    _launch_gradient(
        (programs, cdiv(width, block_w), 1),
        (x.device, *[tensor.dtype for tensor in tensors], *aligned(*tensors), total >> 31, *constants, warps),
        *tensors, dx, dy, parts, total, num_rows, *constants, num_warps=warps,
    )  # fmt: skip
    if dense:
        join(parts, offsets, dy, total, part)
    return dx, dy


_launch_forward = Launcher(_elementwise_kernel)
_launch_gradient = Launcher(_elementwise_gradient_kernel)


def _save_operands(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.facts = inputs[3:]


elementwise.register_autograd(
    lambda ctx, grad: (*gradient(grad, *ctx.saved_tensors, *ctx.facts), None, None, None),
    setup_context=_save_operands,
)
