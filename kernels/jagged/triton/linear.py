"""A linear layer over the values of a jagged tensor with a bias a row and the activation in its epilogue; Triton.

The bias of each place is looked up by its row, so that no [N, E] tensor of biases exists, and the activation is applied
to the float32 sum. Backward, the activation's gradient and the row sums, which are the biases' gradients, come from one
pass; the two products are PyTorch's.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.chip import multiplies_registers
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, next_power_of_2, precision_of, steps_of
from kernels.jagged.triton import elementwise
from kernels.jagged.triton.activations import activate, kept, kept_activation
from kernels.jagged.triton.parts import PART, num_parts, part_of
from kernels.jagged.triton.segment import reduce

_CHUNK = 1024  # rows whose sums a program adds up


@triton.jit(do_not_specialize=["num_rows", "total"])
def _row_of_place_kernel(offsets, rows, num_rows, total, PART: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The row of each place: the search would keep the tiles of a product waiting for longer than they multiply.

    Places behind the last row, where values go on there, count as its own: what they get is an address.
    """
    row, _, _, first, last, _ = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    last = tl.where(row == num_rows - 1, tl.minimum(first + PART, total), last)
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(rows + place, (place * 0 + row).to(tl.int32), mask=place < last)


@triton.jit(do_not_specialize=["total"])
def _linear_kernel(
    x,
    rows,
    weight,
    bias,
    row_bias,
    out,
    for_backward,
    total,
    D,
    E,
    x_stride,
    weight_stride,
    row_bias_stride,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ROW_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Neighbours share a tile of x, which then comes from the cache.
    num_columns = tl.cdiv(E, BLOCK_N)
    start = (tl.program_id(0) // num_columns).to(tl.int64) * BLOCK_M
    tall = tl.minimum(total - start, BLOCK_M).to(tl.int32)
    i = tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    if ROW_BIAS:
        row = tl.load(rows + start + i, mask=i < tall, other=0).to(tl.int64)
    # 64-bit arithmetic for the corner of a tile, 32-bit within it.
    x_tile = i[:, None] * x_stride + inner[None, :]
    w_tile = weight + column[None, :].to(tl.int64) * weight_stride + inner[:, None]
    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, D, BLOCK_K):
        left = tl.load(x + start * x_stride + k + x_tile, mask=(i < tall)[:, None] & (inner < D - k)[None, :], other=0)
        right = tl.load(w_tile + k, mask=(inner < D - k)[:, None] & (column < E)[None, :], other=0)
        z = tl.dot(left, right, z, input_precision=PRECISION)
    mask = (i < tall)[:, None] & (column < E)[None, :]
    if BIAS:
        z += tl.load(bias + column, mask=column < E, other=0).to(tl.float32)[None, :]
    if ROW_BIAS:
        at_row = row_bias + row[:, None] * row_bias_stride + column[None, :]
        z += tl.load(at_row, mask=mask, other=0).to(tl.float32)
    at = i[:, None] * E + column[None, :]
    FAST: tl.constexpr = out.dtype.element_ty != tl.float32
    if KEEP:
        tl.store(for_backward + start * E + at, kept(z, ACTIVATION, FAST).to(out.dtype.element_ty), mask=mask)
    y = activate(z, ACTIVATION, FAST)
    tl.store(out + start * E + at, y.to(out.dtype.element_ty), mask=mask)


def _config(dtype: torch.dtype, inner: int, width: int, from_registers: bool = False) -> dict[str, int]:
    single = dtype is torch.float32
    return {
        "BLOCK_M": 128 if precision_of(dtype) == "tf32x3" else 64,
        "BLOCK_N": max(16, min(64 if single else 128, next_power_of_2(width))),
        "BLOCK_K": max(16, min(32 if single else 64, next_power_of_2(inner))),
        "num_warps": 4 if single and not from_registers else 8,
        "num_stages": 3,
    }


@custom_op("gemsmith::jagged_linear")
def linear(
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_bias: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(out [N, E], what `kept` makes for the backward [N, E], or [0, E] unless `keep`)."""
    total, width = x.shape[0], weight.shape[0]
    out, for_backward = x.new_empty(total, width), x.new_empty(total if keep else 0, width)
    if out.numel() == 0:
        return out, for_backward
    x, weight = flat(x), flat(weight)
    rows = offsets
    if row_bias is not None:
        row_bias, rows = flat(row_bias), offsets.new_empty(total, dtype=torch.int32)
        num_rows = offsets.shape[0] - 1
        _row_of_place_kernel[(num_parts(total, num_rows, PART),)](
            offsets.contiguous(), rows, num_rows, total, PART=PART, STEPS=steps_of(num_rows), BLOCK=256
        )
    config = _config(x.dtype, x.shape[1], width, multiplies_registers(x.device))
    _linear_kernel[(cdiv(total, config["BLOCK_M"]) * cdiv(width, config["BLOCK_N"]),)](
        x,
        rows,
        weight,
        x if bias is None else bias.contiguous(),
        x if row_bias is None else row_bias,
        out,
        for_backward,
        total,
        x.shape[1],
        width,
        x.stride(0),
        weight.stride(0),
        0 if row_bias is None else row_bias.stride(0),
        ACTIVATION=activation,
        BIAS=bias is not None,
        ROW_BIAS=row_bias is not None,
        KEEP=keep,
        PRECISION=precision_of(x.dtype),
        **config,
    )
    return out, for_backward


def linear_like(x, offsets, weight, bias, row_bias, activation, keep):
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0] if keep else 0, weight.shape[0])


@triton.jit(do_not_specialize=["num_rows"])
def _linear_bias_kernel(
    sums,
    of_rows,
    of_chunks,
    num_rows,
    width,
    CHUNK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Rounds the sums of rows and adds up those of a chunk of rows."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    values = tl.load(sums + at, mask=mask, other=0)
    tl.store(of_rows + at, values.to(of_rows.dtype.element_ty), mask=mask)
    result = tl.sum(values, 0).to(of_chunks.dtype.element_ty)
    tl.store(of_chunks + tl.program_id(0) * width + column, result, mask=column < width)


@custom_op("gemsmith::jagged_bias_gradients")
def bias_gradients(sums: Tensor, bias_dtype: torch.dtype, row_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(sums over all rows [E], the sums of each [B, E]) in their dtypes, from sums [B, E] float32."""
    num_rows, width = sums.shape
    of_bias, of_rows = sums.new_empty(width, dtype=bias_dtype), sums.new_empty(sums.shape, dtype=row_dtype)
    if sums.numel() == 0:
        return of_bias.zero_(), of_rows
    chunks = cdiv(num_rows, _CHUNK)
    of_chunks = of_bias.unsqueeze(0) if chunks == 1 else sums.new_empty(chunks, width)
    _linear_bias_kernel[(chunks, cdiv(width, 4))](
        sums, of_rows, of_chunks, num_rows, width, CHUNK=_CHUNK, BLOCK_W=4, num_warps=8
    )
    if chunks > 1:
        of_bias.copy_(of_chunks.sum(0))
    return of_bias, of_rows


@bias_gradients.register_fake
def _(sums, bias_dtype, row_dtype):
    return sums.new_empty(sums.shape[1], dtype=bias_dtype), sums.new_empty(sums.shape, dtype=row_dtype)


def save_linear(ctx, inputs, output):
    x, offsets, weight, bias, row_bias, activation, keep = inputs
    out, for_backward = output
    ctx.mark_non_differentiable(for_backward)
    ctx.set_materialize_grads(False)  # of that: as many zeros for nobody
    # The sign of relu's result is that of what it was applied to.
    point = for_backward if keep else out if activation == "relu" else None
    ctx.activation = kept_activation(activation, x.dtype) if keep else activation
    ctx.save_for_backward(x, offsets, weight, *(() if point is None else (point,)))
    ctx.dtypes = [x.dtype if tensor is None else tensor.dtype for tensor in (bias, row_bias)]


def linear_backward(product, weight_product, ctx, grad, _):
    """`product(grad, offsets, weight)` is grad @ weight, `weight_product(grad, x)` is grad^T @ x."""
    if grad is None:  # of a function that gives its input none
        return (None,) * 7
    x, offsets, weight, *point = ctx.saved_tensors
    needs_sums = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    sums = None
    if point:
        sums = grad.new_empty(offsets.shape[0] - 1, grad.shape[1], dtype=torch.float32)
        grad, sums = elementwise.gradient(grad, point[0], sums, offsets, "none", ctx.activation)
    elif needs_sums:
        sums = reduce(grad, offsets, "sum", torch.float32)
    dx = product(grad, offsets, weight) if ctx.needs_input_grad[0] else None
    dw = weight_product(grad, x) if ctx.needs_input_grad[2] else None
    return linear_gradients(ctx, dx, dw, sums)


def linear_gradients(ctx, dx, dw, sums):
    """Of all inputs of `linear`, from `sums` [B, E] over rows of the gradient before the biases."""
    of_bias, of_rows = ctx.needs_input_grad[3:5]
    db, d_rows = bias_gradients(sums, *ctx.dtypes) if of_bias or of_rows else (None, None)
    return dx, None, dw, db if of_bias else None, d_rows if of_rows else None, None, None


linear.register_fake(linear_like)


def weight_product(grad, x):
    return grad.mT @ x


linear.register_autograd(
    partial(linear_backward, lambda grad, _, weight: grad @ weight, weight_product), setup_context=save_linear
)


def keeps_input(activation: str, *operands: Tensor | None) -> bool:
    """Whether a backward will need the input of the activation."""
    differentiable = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands)
    return differentiable and activation not in ("none", "relu")


def jagged_linear(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, row_bias: Tensor | None, activation: str
) -> Tensor:
    keep = keeps_input(activation, x, weight, bias, row_bias)
    return linear(x, offsets, weight, bias, row_bias, activation, keep)[0]
