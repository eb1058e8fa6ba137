"""RMSNorm, rotation and another order in Triton: whole heads of tokens in registers, strided tensors without a copy.

With n = s x and s = 1 / sqrt(mean(x^2) + epsilon): dx = s (dn - n mean(n dn)). A rotation's gradient is the rotation by
the negative angles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv, flat, next_power_of_2, tile_shape

_VALUES = 4096  # of a program; how many heads these are depends on their width


@triton.jit
def _heads(num_heads, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(token int64, head, whether they exist) of the ROWS heads of this program, counted over all tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row // HEADS, row % HEADS, row < num_heads


@triton.jit
def tile(first, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(int64 indices of the elements of rows [first, first + ROWS), which are contiguous; whether they exist)."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    return (row.to(tl.int64) * WIDTH)[:, None] + column[None, :], (row < num_rows)[:, None] & (column < WIDTH)[None, :]


@triton.jit(do_not_specialize=["num_heads"])
def rms_norm_kernel(
    x, out, x_token, x_head, num_heads, EPSILON: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head, real = _heads(num_heads, HEADS, ROWS)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + (token * x_token + head * x_head)[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    s = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPSILON)
    places = ((token * HEADS + head) * WIDTH)[:, None] + column[None, :]
    tl.store(out + places, (values * s[:, None]).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_heads"])
def rms_norm_backward_kernel(
    grad, more, x, beside, dx, x_token, x_head, grad_token, grad_head, more_token, more_head, num_heads,
    EPSILON: tl.constexpr, ADD: tl.constexpr, BESIDE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head, real = _heads(num_heads, HEADS, ROWS)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + (token * x_token + head * x_head)[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    places = ((token * HEADS + head) * WIDTH)[:, None] + column[None, :]
    dn = tl.load(grad + (token * grad_token + head * grad_head)[:, None] + column[None, :], inside, 0.0).to(tl.float32)
    if ADD:
        added = (token * more_token + head * more_head)[:, None] + column[None, :]
        dn += tl.load(more + added, inside, 0.0).to(tl.float32)
    s = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + EPSILON)
    n = values * s[:, None]
    result = s[:, None] * (dn - n * (tl.sum(n * dn, 1) / WIDTH)[:, None])
    if BESIDE:
        result += tl.load(beside + places, inside, 0.0).to(tl.float32)
    tl.store(dx + places, result.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_heads"])
def rotate_kernel(
    x, more, cos, sin, positions, out, x_token, x_head, more_token, more_head, out_token, out_head, num_heads,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, ADD: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WIDTH is half of a head: features i and i + WIDTH are rotated together. A TABLE has angles by position. ADD:
    what is rotated is x + more."""
    token, head, real = _heads(num_heads, HEADS, ROWS)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    position = tl.load(positions + token, real, 0).to(tl.int64) if TABLE else token
    angles = (position * WIDTH)[:, None] + column[None, :]
    c = tl.load(cos + angles, inside, 0.0).to(tl.float32)
    s = tl.load(sin + angles, inside, 0.0).to(tl.float32)
    if INVERSE:
        s = -s
    places = (token * x_token + head * x_head)[:, None] + column[None, :]
    first = tl.load(x + places, inside, 0.0).to(tl.float32)
    second = tl.load(x + places + WIDTH, inside, 0.0).to(tl.float32)
    if ADD:
        places = (token * more_token + head * more_head)[:, None] + column[None, :]
        first += tl.load(more + places, inside, 0.0).to(tl.float32)
        second += tl.load(more + places + WIDTH, inside, 0.0).to(tl.float32)
    places = out + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(places, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(places + WIDTH, (second * c + first * s).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_heads"])
def copy_heads_kernel(
    x, more, out, x_token, x_head, more_token, more_head, out_token, out_head, num_heads,
    ADD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head, real = _heads(num_heads, HEADS, ROWS)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + (token * x_token + head * x_head)[:, None] + column[None, :], inside)
    if ADD:
        places = (token * more_token + head * more_head)[:, None] + column[None, :]
        values = (values.to(tl.float32) + tl.load(more + places, inside).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (token * out_token + head * out_head)[:, None] + column[None, :], values, inside)


@triton.jit(do_not_specialize=["num_rows"])
def move_rows_kernel(
    values, places, out, num_rows, row_stride, SCATTER: tl.constexpr, DIVISOR: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    other = tl.load(places + row, real, 0)
    source, target = (row, other) if SCATTER else (other, row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    moved = tl.load(values + (source * row_stride)[:, None] + column[None, :], inside)
    if DIVISOR != 1:
        moved = tl.div_rn(moved.to(tl.float32), tl.full((ROWS, BLOCK), DIVISOR, tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (target * WIDTH)[:, None] + column[None, :], moved, inside)


def tiling(width: int) -> dict[str, int]:
    """Constants of the kernels for heads, halves of them, or rows, of `width` values."""
    block = next_power_of_2(width)
    return {"WIDTH": width, "ROWS": max(1, _VALUES // block), "BLOCK": block, "num_warps": 8 if block > _VALUES else 4}


_launch_norm = Launcher(rms_norm_kernel)
_launch_norm_backward = Launcher(rms_norm_backward_kernel)
_launch_rotate = Launcher(rotate_kernel)
_launch_copy = Launcher(copy_heads_kernel)
_launch_move = Launcher(move_rows_kernel)


def rms_norm(x: Tensor, dtype: torch.dtype, epsilon: float) -> Tensor:
    """n like x [..., D], contiguous, in `dtype`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _over_heads(_launch_norm, x.shape[-1], _of_heads(x), (out,), options=(epsilon,))
    return out


def rms_norm_backward(
    grad: Tensor, x: Tensor, epsilon: float, beside: Tensor | None = None, more: Tensor | None = None
) -> Tensor:
    """dx like x, contiguous; the gradient of n is `grad`, or grad + more. `beside` like x is added to dx."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = (epsilon, more is not None, beside is not None)
    others = (dx if beside is None else beside.contiguous(), dx)
    x, grad, more = _of_heads(x), _of_heads(grad), _of_heads(grad if more is None else more)
    if x.dim() == 3:
        grad, more = _walkable(grad), _walkable(more)
        strides = (*grad.stride()[:2], *more.stride()[:2])
    else:
        grad, more = grad.contiguous(), more.contiguous()
        strides = (x.shape[-1],) * 4
    _over_heads(_launch_norm_backward, x.shape[-1], x, others, grad, more, strides=strides, options=options)
    return dx


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    inverse: bool,
    out: Tensor | None = None,
    more: Tensor | None = None,
) -> Tensor:
    """x [N, H, d] rotated by its tokens' angles, or back; into `out`, a part of a larger tensor, or contiguous.

    cos and sin are [N, d / 2], or tables [P, d / 2] for positions [N]. `more` like x is added to it before.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    angles = (cos.contiguous(), sin.contiguous())
    places = angles[0] if positions is None else positions.contiguous()
    options = (inverse, positions is not None, more is not None)
    more = _walkable(x if more is None else more)
    tensors, strides = (more, *angles, places, out), (*more.stride()[:2], *out.stride()[:2])
    _over_heads(_launch_rotate, x.shape[2] // 2, x, tensors, strides=strides, options=options)
    return out


def copy_heads(x: Tensor, out: Tensor, more: Tensor | None = None) -> None:
    """Write x [N, H, d], or x + more, into `out`, a part of a larger tensor, in whole cache lines, unlike PyTorch.

    `out` may be x itself.
    """
    added, more = more is not None, _walkable(x if more is None else more)
    strides = (*more.stride()[:2], *out.stride()[:2])
    _over_heads(_launch_copy, x.shape[2], x, (more, out), strides=strides, options=(added,))


def _of_heads(x: Tensor) -> Tensor:
    """x [N, H, D] of one [..., H, D], without a copy where strides allow it."""
    return x.flatten(0, -3) if x.dim() > 3 else x


def _walkable(x: Tensor) -> Tensor:
    """x [N, H, d] with strides that kernels walk."""
    return x if x.stride(2) == 1 else x.contiguous()


def move_rows(values: Tensor, places: Tensor, out: Tensor, scatter: bool, divisor: float = 1.0) -> None:
    """out[i] = values[places[i]] / divisor, or with `scatter` out[places[i]] = values[i] / divisor; out contiguous."""
    if not places.numel() or not values.numel():
        return
    rows = flat(values)
    width = rows.shape[1]
    block_r, block_w = tile_shape(width, elements=8192 // values.element_size())
    tensors = (rows, places.contiguous(), out)
    constants = (scatter, divisor, width, block_r, block_w)
    _launch_move(
        (cdiv(len(places), block_r), cdiv(width, block_w), 1),
        (values.device, values.dtype, *aligned(*tensors), len(places) >> 31, rows.stride(0), *constants),
        *tensors, len(places), rows.stride(0), *constants,
    )  # fmt: skip


def _over_heads(
    launch: Launcher,
    width: int,
    x: Tensor,
    others: tuple[Tensor, ...],
    *before: Tensor,
    strides: tuple[int, ...] = (),
    options: tuple[bool | float, ...] = (),
) -> None:
    """Launch over the heads of x [N, H, D], whose strides the kernels walk, or over its rows if it has another shape.

    `before` and `others` are the tensors before and after x among the arguments, all contiguous except those whose
    strides of tokens and heads are given.
    """
    if not x.numel():
        return
    x = _walkable(x) if x.dim() == 3 else x.contiguous().view(-1, 1, x.shape[-1])
    num_tokens, heads, _ = x.shape
    constants = tiling(width)
    warps = constants.pop("num_warps")
    strides, fixed = (x.stride(0), x.stride(1), *strides), (*options, heads, *constants.values())
    tensors = (*before, x, *others)
    dtypes = tuple([tensor.dtype for tensor in tensors])
    launch(
        (cdiv(num_tokens * heads, constants["ROWS"]), 1, 1),
        (x.device, *dtypes, *aligned(*tensors), num_tokens * heads >> 31, *strides, *fixed),
        *tensors, *strides, num_tokens * heads, *fixed, num_warps=warps,
    )  # fmt: skip
