"""The norms of a GDPA block in Triton, forward and backward: rows whole in registers, nothing saved but inputs.

n = r (q - mean(q)),  r = 1 / sqrt(mean((q - mean(q))^2) + epsilon)
z = x + n,  s = 1 / sqrt(mean(z^2) + epsilon),  out = q + s z

dz = s (dout - s^2 z mean(dout z)),  dx = dz
dq = L(dn) for a gradient dn of n, and dout + L(dz) for dout, with L(g) = r (g - mean(g) - n mean(g n))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.constants import EPSILON
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


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(query, out, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    n, _r = _normalised(_load(query, places, inside), inside, WIDTH)
    tl.store(out + places, n.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_backward_kernel(
    grad, query, dquery, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    n, r = _normalised(_load(query, places, inside), inside, WIDTH)
    dq = _through_layer_norm(_load(grad, places, inside), n, r, WIDTH)
    tl.store(dquery + places, dq.to(dquery.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_norms_kernel(x, query, out, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    q = _load(query, places, inside)
    n, _r = _normalised(q, inside, WIDTH)
    z = _load(x, places, inside) + n
    s = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + _EPSILON)
    tl.store(out + places, (q + z * s[:, None]).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_norms_backward_kernel(
    grad, x, query, dx, dquery, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    n, r = _normalised(_load(query, places, inside), inside, WIDTH)
    z = _load(x, places, inside) + n
    dout = _load(grad, places, inside)
    s = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + _EPSILON)
    along = tl.sum(dout * z, 1) / WIDTH * s * s
    dz = s[:, None] * (dout - z * along[:, None])
    tl.store(dx + places, dz.to(dx.dtype.element_ty), inside)
    dq = dout + _through_layer_norm(dz, n, r, WIDTH)
    tl.store(dquery + places, dq.to(dquery.dtype.element_ty), inside)


def _launch(kernel: triton.JITFunction, results: int, *tensors: Tensor) -> list[Tensor]:
    """The results of a kernel of rows of `tensors`, which have one shape."""
    rows = [tensor.contiguous() for tensor in tensors]
    outs = [torch.empty_like(rows[0]) for _ in range(results)]
    if rows[0].numel():
        width = rows[0].shape[-1]
        constants = tiling(width)
        num_rows = rows[0].numel() // width
        kernel[(cdiv(num_rows, constants["ROWS"]),)](*rows, *outs, num_rows, **constants)
    return outs


def layer_norm(query: Tensor) -> Tensor:
    """n like query [..., D]."""
    return _launch(layer_norm_kernel, 1, query)[0]


def layer_norm_backward(grad: Tensor, query: Tensor) -> Tensor:
    """dquery."""
    return _launch(layer_norm_backward_kernel, 1, grad, query)[0]


def add_norms(x: Tensor, query: Tensor) -> Tensor:
    """out like x and query, [..., D] of one dtype."""
    return _launch(add_norms_kernel, 1, x, query)[0]


def add_norms_backward(grad: Tensor, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dquery)."""
    dx, dquery = _launch(add_norms_backward_kernel, 2, grad, x, query)
    return dx, dquery
