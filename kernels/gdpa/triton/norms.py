"""The norms of a GDPA block in Triton, forward and backward: rows whole in registers, nothing saved but inputs.

n = r (q - mean(q)),  r = 1 / sqrt(mean((q - mean(q))^2) + epsilon)
z = x + n,  s = 1 / sqrt(mean(z^2) + epsilon),  out = q + s z
N(y) = y / sqrt(mean(y^2) + epsilon), of heads of n, or of out

dz = s (dout - s^2 z mean(dout z)),  dx = dz
dq = L(dn) for a gradient dn of n, and dout + L(dz) for dout, with L(g) = r (g - mean(g) - n mean(g n))
dy = t (g - t^2 y mean(g y)) for a gradient g of N(y) = t y
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.constants import EPSILON
from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv
from kernels.tokens.triton.tokens import tiling

_EPSILON = tl.constexpr(EPSILON)


@triton.jit
def _load(pointer, places, inside):
    return tl.load(pointer + places, inside, 0.0).to(tl.float32)


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(places [ROWS, BLOCK] of this program's values, which of them exist)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    return rows[:, None] * WIDTH + columns[None, :], (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def _normalised(q, inside, WIDTH: tl.constexpr):
    """(n, zero beyond the width; r [ROWS])."""
    centred = tl.where(inside, q - (tl.sum(q, 1) / WIDTH)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + _EPSILON)
    return centred * r[:, None], r


@triton.jit
def _through_layer_norm(grad, n, r, WIDTH: tl.constexpr):
    """L(grad), for a gradient that is zero beyond the width; the result beyond it is meaningless."""
    mean, along = tl.sum(grad, 1) / WIDTH, tl.sum(grad * n, 1) / WIDTH
    return r[:, None] * (grad - mean[:, None] - n * along[:, None])


@triton.jit
def _rms(y, WIDTH: tl.constexpr):
    """(N(y), t [ROWS]) of rows that are zero beyond the width."""
    t = tl.rsqrt(tl.sum(y * y, 1) / WIDTH + _EPSILON)
    return y * t[:, None], t


@triton.jit
def _through_rms(grad, y, t, WIDTH: tl.constexpr):
    along = tl.sum(grad * y, 1) / WIDTH * t * t
    return t[:, None] * (grad - y * along[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    query, out, num_rows, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """HEAD: 0, or the width of the heads that are normalised, a power of two."""
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    n, _r = _normalised(_load(query, places, inside), inside, WIDTH)
    if HEAD:
        normed, _t = _rms(n.reshape(ROWS * BLOCK // HEAD, HEAD), HEAD)
        n = normed.reshape(ROWS, BLOCK)
    tl.store(out + places, n.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_backward_kernel(
    grad, query, more, dquery, num_rows, HEAD: tl.constexpr, HAS_MORE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    n, r = _normalised(_load(query, places, inside), inside, WIDTH)
    dn = _load(grad, places, inside)
    if HEAD:
        heads = n.reshape(ROWS * BLOCK // HEAD, HEAD)
        _normed, t = _rms(heads, HEAD)
        dn = _through_rms(dn.reshape(ROWS * BLOCK // HEAD, HEAD), heads, t, HEAD).reshape(ROWS, BLOCK)
    dq = _through_layer_norm(dn, n, r, WIDTH)
    if HAS_MORE:
        dq += _load(more, places, inside)
    tl.store(dquery + places, dq.to(dquery.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_norms_kernel(
    x, query, out, normed, num_rows, NORM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    q = _load(query, places, inside)
    n, _r = _normalised(q, inside, WIDTH)
    z, _s = _rms(_load(x, places, inside) + n, WIDTH)
    rounded = (q + z).to(out.dtype.element_ty)
    tl.store(out + places, rounded, inside)
    if NORM:
        # The norm is that of the sum as it is stored.
        of_sum, _t = _rms(rounded.to(tl.float32), WIDTH)
        tl.store(normed + places, of_sum.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_norms_backward_kernel(
    grad, d_normed, more, x, query, dx, dquery, num_rows, HAS_GRAD: tl.constexpr, NORM: tl.constexpr,
    HAS_MORE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum is `grad` and, with NORM, what comes through its norm from d_normed + more."""
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    q = _load(query, places, inside)
    n, r = _normalised(q, inside, WIDTH)
    z = _load(x, places, inside) + n
    of_z, s = _rms(z, WIDTH)
    if NORM:
        dn = _load(d_normed, places, inside)
        if HAS_MORE:
            dn += _load(more, places, inside)
        total = (q + of_z).to(query.dtype.element_ty).to(tl.float32)
        _normed, t = _rms(total, WIDTH)
        dout = _through_rms(dn, total, t, WIDTH)
        if HAS_GRAD:
            dout += _load(grad, places, inside)
    else:
        dout = _load(grad, places, inside)
    dz = _through_rms(dout, z, s, WIDTH)
    tl.store(dx + places, dz.to(dx.dtype.element_ty), inside)
    dq = dout + _through_layer_norm(dz, n, r, WIDTH)
    tl.store(dquery + places, dq.to(dquery.dtype.element_ty), inside)


_launch_layer_norm = Launcher(layer_norm_kernel)
_launch_layer_norm_backward = Launcher(layer_norm_backward_kernel)
_launch_add_norms = Launcher(add_norms_kernel)
_launch_add_norms_backward = Launcher(add_norms_backward_kernel)


def _over_rows(launch: Launcher, like: Tensor, *tensors: Tensor | None, options: tuple[int, ...]) -> None:
    """Launch over the rows of `like`, which all tensors are like; it stands for those that are None."""
    if not like.numel():
        return
    rows = [(like if tensor is None else tensor).contiguous() for tensor in tensors]
    width = like.shape[-1]
    constants = tiling(width)
    warps = constants.pop("num_warps")
    num_rows = like.numel() // width
    launch(
        (cdiv(num_rows, constants["ROWS"]), 1, 1),
        (like.device, tuple([each.dtype for each in rows]), aligned(*rows), num_rows >> 31, options, width),
        *rows, num_rows, *options, *constants.values(), num_warps=warps,
    )  # fmt: skip


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def layer_norm(query: Tensor, head: int) -> Tensor:
    """n like query [..., D], with its heads of so many columns normalised unless that is 0."""
    out = _empty(query)
    _over_rows(_launch_layer_norm, query, query, out, options=(head,))
    return out


def layer_norm_backward(grad: Tensor, query: Tensor, more: Tensor | None, head: int) -> Tensor:
    """dquery, with `more` added."""
    dquery = _empty(query)
    _over_rows(_launch_layer_norm_backward, query, grad, query, more, dquery, options=(head, more is not None))
    return dquery


def add_norms(x: Tensor, query: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """(out like x and query, [..., D] of one dtype; N(out) with `norm`, else of no size)."""
    out = _empty(query)
    normed = _empty(query) if norm else query.new_empty(0)
    _over_rows(_launch_add_norms, query, x, query, out, normed if norm else None, options=(norm,))
    return out, normed


def add_norms_backward(
    grad: Tensor | None, d_normed: Tensor | None, more: Tensor | None, x: Tensor, query: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dquery) from the gradient of out and those of two readers of N(out), as far as there are any."""
    dx, dquery = _empty(query), _empty(query)
    given = tuple(each is not None for each in (grad, d_normed, more))
    _over_rows(_launch_add_norms_backward, query, grad, d_normed, more, x, query, dx, dquery, options=given)
    return dx, dquery
