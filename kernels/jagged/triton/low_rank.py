"""A product of rank n whose first factor is a row's own and whose second one all rows share; Triton.

    P[i] = left[b] @ x[i], out[i] = weight @ P[i] for i in row b      [B, n, D], [N, D], [E, n] -> [N, n], [N, E]

The forward reads x once and writes out; the few columns of P, the size of n / D of x, are kept for the backward. With
G[i] = weight^T @ dout[i] the backward is two passes, each of which reads one wide operand once:

    G, dweight = dout @ weight, dout^T @ P            reads dout, whatever rows are
    dx, dleft[b] = G @ left[b], G[row b]^T @ x[row b] reads x and writes dx: `triton.bmm`'s gradients
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.core.chip import shared_limit
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.partial_sums import add_partial_sums
from kernels.core.triton import block_width, cdiv, flat, near, precision_of, steps_of
from kernels.jagged.triton import bmm, bmm_narrow
from kernels.jagged.triton.parts import num_parts, part_of

MAX_RANK = 16  # columns of the least tile that tensor cores take
MAX_WIDTH = 1024  # columns of out, for each 128 of which code is repeated
_PART = 256  # places of a program: enough to start loads early, few enough that programs end together
_LARGE = 200 * 1024  # bytes of shared memory, which three tiles of the widest results take
_PROGRAMS = 16  # warps of a multiprocessor, for the pass over the gradient of out


@triton.jit(do_not_specialize=["num_rows"])
def _low_rank_kernel(
    x,
    left,
    weight,
    offsets,
    out,
    products,
    num_rows,
    D,
    E,
    x_stride,
    left_stride_b,
    left_stride_n,
    left_stride_d,
    weight_stride_e,
    weight_stride_n,
    N: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, _, _, first, last, _ = part_of(offsets, num_rows, tl.program_id(0), PART, STEPS)
    if first >= last:
        return
    tall = (last - first).to(tl.int32)
    i = tl.arange(0, BLOCK_L)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    few = (n < N)[:, None]
    # 64-bit arithmetic for the corner of a part, 32-bit within it.
    x_at = x + first * x_stride
    out_at = out + first * E
    products_at = products + first * N
    left_at = left + row * left_stride_b + n[:, None] * left_stride_n
    weight_at = weight + n[:, None] * weight_stride_n
    a = tl.load(left_at + d[None, :] * left_stride_d, mask=few & (d < D)[None, :], other=0)
    w = tl.load(weight_at + e[None, :] * weight_stride_e, mask=few & (e < E)[None, :], other=0)
    p = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
    # One loop over the tiles and the blocks of each, so that loads of the next tile are under way at the end of one.
    for step in range(tl.cdiv(tall, BLOCK_L) * BLOCKS_D):
        block = step % BLOCKS_D
        place = step // BLOCKS_D * BLOCK_L + i
        column = block * BLOCK_D + d
        values = tl.load(
            x_at + place[:, None] * x_stride + column[None, :],
            mask=(place < tall)[:, None] & (column < D)[None, :],
            other=0,
        )
        if BLOCKS_D > 1:
            a = tl.load(left_at + column[None, :] * left_stride_d, mask=few & (column < D)[None, :], other=0)
            p = tl.dot(a, tl.trans(values), tl.where(block == 0, 0.0, p), input_precision=PRECISION)
        else:
            p = tl.dot(a, tl.trans(values), input_precision=PRECISION)
        if block == BLOCKS_D - 1:
            rounded = tl.trans(p).to(products.dtype.element_ty)
            inside = (place < tall)[:, None] & (n < N)[None, :]
            tl.store(products_at + place[:, None] * N + n[None, :], rounded, mask=inside)
            for k in tl.static_range(BLOCKS_E):
                c = k * BLOCK_E + e
                if BLOCKS_E > 1:
                    w = tl.load(weight_at + c[None, :] * weight_stride_e, mask=few & (c < E)[None, :], other=0)
                result = tl.dot(rounded, w, input_precision=PRECISION).to(out.dtype.element_ty)
                inside = (place < tall)[:, None] & (c < E)[None, :]
                tl.store(out_at + place[:, None] * E + c[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["total"])
def _low_rank_weight_kernel(
    grad,
    products,
    weight,
    narrow,
    sums,
    total,
    E,
    grad_stride,
    weight_stride_e,
    weight_stride_n,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """narrow [total, N] = grad @ weight; sums [programs, N, E] float32 of products^T @ grad over a program's tiles."""
    i = tl.arange(0, BLOCK_L)
    n = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    few = (n < N)[:, None]
    weight_at = weight + n[:, None] * weight_stride_n
    # One sum for each block of columns.
    both = (tl.zeros([BLOCK_N, BLOCK_E], tl.float32),)
    for _ in tl.static_range(BLOCKS_E - 1):
        both = both + (tl.zeros([BLOCK_N, BLOCK_E], tl.float32),)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_L, total, tl.num_programs(0) * BLOCK_L):
        real = i < total - first
        at = products + first * N + i[:, None] * N + n[None, :]
        p = tl.trans(tl.load(at, mask=real[:, None] & (n < N)[None, :], other=0))
        result = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
        updated = ()
        for k in tl.static_range(BLOCKS_E):
            c = k * BLOCK_E + e
            w = tl.load(weight_at + c[None, :] * weight_stride_e, mask=few & (c < E)[None, :], other=0)
            at = grad + first * grad_stride + i[:, None] * grad_stride + c[None, :]
            g = tl.load(at, mask=real[:, None] & (c < E)[None, :], other=0)
            updated = updated + (tl.dot(p, g, both[k], input_precision=PRECISION),)
            result = tl.dot(w, tl.trans(g), result, input_precision=PRECISION)
        both = updated
        at = narrow + first * N + i[None, :] * N + n[:, None]
        tl.store(at, result.to(narrow.dtype.element_ty), mask=few & real[None, :])
    for k in tl.static_range(BLOCKS_E):
        c = k * BLOCK_E + e
        at = sums + tl.program_id(0) * N * E + n[:, None] * E + c[None, :]
        tl.store(at, both[k], mask=few & (c < E)[None, :])


def _forward_config(dtype: torch.dtype, inner: int, width: int) -> dict[str, int]:
    single, widest = dtype is torch.float32, max(inner, width)
    block_d, block_e = (block_width(size, 64 if single else 128) for size in (inner, width))
    few, many = widest <= 128, widest > 512
    return {
        "BLOCK_L": 64 if (few or many) and not single else 32,
        "BLOCK_D": block_d,
        "BLOCKS_D": cdiv(inner, block_d),
        "BLOCK_E": block_e,
        "BLOCKS_E": cdiv(width, block_e),
        "BLOCK_N": MAX_RANK,
        "num_warps": 8 if many and not single else 4,
        "num_stages": 3 if few or many else 4,
    }


def _weight_config(dtype: torch.dtype, width: int, shared: int) -> dict[str, int]:
    """`shared` is how many bytes of shared memory a program may use."""
    single, few, many = dtype is torch.float32, width <= 128, width > 512
    block_e = block_width(width, 64 if single else 128)
    return {
        # No fewer than 4 places for each warp, which would have nothing to multiply.
        "BLOCK_L": 32 if many else 64,
        "BLOCK_E": block_e,
        "BLOCKS_E": cdiv(width, block_e),
        "BLOCK_N": MAX_RANK,
        "num_warps": 4 if few and not single else 8,
        "num_stages": 3 if not single and (few or (many and shared > _LARGE)) else 2,
    }


_launch_forward = Launcher(_low_rank_kernel)
_launch_weight = Launcher(_low_rank_weight_kernel)


@custom_op("gemsmith::jagged_low_rank")
def low_rank(x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(out [N, E], P [N, n]) of x [N, D], left [B, n, D] and weight [E, n]; `longest` is for the gradient of left."""
    (width, rank), num_rows = weight.shape, left.shape[0]
    out, products = x.new_empty(x.shape[0], width), x.new_empty(x.shape[0], rank)
    if out.numel() == 0 or rank == 0 or x.shape[1] == 0:
        return out.zero_(), products.zero_()
    x, left, offsets = flat(x), near(left), offsets.contiguous()
    *blocks, warps, stages = _forward_config(x.dtype, x.shape[1], width).values()
    numbers = (
        x.shape[1], width, x.stride(0), *left.stride(), *weight.stride(), rank, _PART, steps_of(num_rows),
        precision_of(x.dtype), *blocks,
    )  # fmt: skip
    inputs = (x, left, weight, offsets)
    _launch_forward(
        (num_parts(x.shape[0], num_rows, _PART), 1, 1),
        (x.device, x.dtype, offsets.dtype, *aligned(*inputs), *numbers, warps, stages),
        *inputs, out, products, num_rows, *numbers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, products


@low_rank.register_fake
def _(x, offsets, left, weight, longest):
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[1])


def _weight_gradient(grad: Tensor, products: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(grad @ weight [N, n], grad^T @ products [E, n]) of grad [N, E], products [N, n] and weight [E, n]."""
    (width, rank), total = weight.shape, grad.shape[0]
    narrow, dweight = grad.new_empty(total, rank), weight.new_empty(width, rank)
    if narrow.numel() == 0 or width == 0:
        return narrow.zero_(), dweight.zero_()
    if grad.dtype is torch.float32 and width > 128:  # whose sums, in three products each, leave no registers
        return grad @ weight, grad.mT @ products
    grad = flat(grad)
    config = _weight_config(grad.dtype, width, shared_limit(grad.device))
    # As many programs as multiprocessors hold at once: each adds up its own part of the weight's gradient.
    programs = min(cdiv(total, config["BLOCK_L"]), _PROGRAMS // config["num_warps"] * processors(grad.device))
    sums = grad.new_empty(programs, rank, width, dtype=torch.float32)
    *blocks, warps, stages = config.values()
    numbers = (width, grad.stride(0), *weight.stride(), rank, precision_of(grad.dtype), *blocks)
    inputs = (grad, products, weight)
    _launch_weight(
        (programs, 1, 1),
        (grad.device, grad.dtype, *aligned(*inputs), total >> 31, *numbers, warps, stages),
        *inputs, narrow, sums, total, *numbers, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dweight.copy_(add_partial_sums(sums, dweight.dtype).t())
    return narrow, dweight


@custom_op("gemsmith::jagged_low_rank_gradient")
def gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, products: Tensor, longest: int,
    of_x: bool, of_left: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dleft, dweight) of `low_rank`; the first two of no size where they are not asked for."""
    narrow, dweight = _weight_gradient(grad, products, weight)
    if of_x and of_left and bmm_narrow.serves(x.shape[1], left.shape[1], x.dtype, ("wide", "matrix")):
        made = bmm_narrow.products(
            offsets, wide=x, narrow=narrow, matrix=left.mT, to=("wide", "matrix"), longest=longest, transposed=True
        )
        return made["wide"], made["matrix"], dweight
    dx = bmm.dense(narrow, offsets, left) if of_x else x.new_empty(0)
    return dx, bmm.jagged(narrow, x, offsets, longest) if of_left else left.new_empty(0), dweight


@gradient.register_fake
def _(grad, x, offsets, left, weight, products, longest, of_x, of_left):
    return (
        x.new_empty(x.shape if of_x else 0),
        left.new_empty(left.shape if of_left else 0),
        weight.new_empty(weight.shape),
    )


def _save(ctx, inputs, output):
    x, offsets, left, weight, ctx.longest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # of that: as many zeros for nobody
    ctx.save_for_backward(x, offsets, left, weight, output[1])


def _backward(ctx, grad, _):
    if grad is None:  # of a function that gives its input none
        return (None,) * 5
    of_x, _, of_left, of_weight, _ = ctx.needs_input_grad
    dx, dleft, dweight = gradient(grad, *ctx.saved_tensors, ctx.longest, of_x, of_left)
    return dx if of_x else None, None, dleft if of_left else None, dweight if of_weight else None, None


low_rank.register_autograd(_backward, setup_context=_save)


def jagged_low_rank(x: Tensor, offsets: Tensor, left: Tensor, weight: Tensor, max_length: int) -> Tensor:
    width, rank = weight.shape
    if rank > MAX_RANK or width > MAX_WIDTH:
        return F.linear(bmm.dense_bmm(x, offsets, left.mT, max_length), weight)
    return low_rank(x, offsets, left, weight, max_length)[0]
