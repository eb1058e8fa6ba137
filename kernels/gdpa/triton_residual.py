"""residual + RMSNorm(x + normed) in Triton, forward and backward: rows whole in registers, nothing saved but inputs.

z = x + normed, r = 1 / sqrt(mean(z^2) + epsilon), out = residual + r z
dx = dnormed = r (dout - r^2 z mean(dout z)), dresidual = dout
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gdpa import residual as specification

_EPSILON = tl.constexpr(specification.EPSILON)
_VALUES = 4096  # of a program, in as many rows as that gives


@triton.jit
def _load(pointer, places, inside):
    return tl.load(pointer + places, inside, 0.0).to(tl.float32)


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(places [ROWS, BLOCK] of this program's values, which of them exist)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    return rows[:, None] * WIDTH + columns[None, :], (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x, normed, residual, out, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    z = _load(x, places, inside) + _load(normed, places, inside)
    r = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + _EPSILON)
    y = _load(residual, places, inside) + z * r[:, None]
    tl.store(out + places, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def backward_kernel(grad, x, normed, dx, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    places, inside = _places(num_rows, WIDTH, ROWS, BLOCK)
    z = _load(x, places, inside) + _load(normed, places, inside)
    dy = _load(grad, places, inside)
    r = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + _EPSILON)
    along = tl.sum(dy * z, 1) / WIDTH * r * r
    tl.store(dx + places, (r[:, None] * (dy - z * along[:, None])).to(dx.dtype.element_ty), inside)


def tiling(width: int) -> dict[str, int]:
    """Constants of both kernels for rows of `width` values."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "ROWS": max(1, _VALUES // block), "BLOCK": block, "num_warps": 8 if block > _VALUES else 4}


def _launch(kernel: triton.JITFunction, *tensors: Tensor) -> Tensor:
    """The result of a kernel of rows of `tensors`, which have one shape."""
    rows = [tensor.contiguous() for tensor in tensors]
    out = torch.empty_like(rows[0])
    if out.numel():
        width = out.shape[-1]
        constants = tiling(width)
        num_rows = out.numel() // width
        kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](*rows, out, num_rows, **constants)
    return out


def forward(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    """out like x; all [..., D] of one dtype."""
    return _launch(forward_kernel, x, normed, residual)


def backward(grad: Tensor, x: Tensor, normed: Tensor) -> Tensor:
    """The gradient of x, which is that of normed, too."""
    return _launch(backward_kernel, grad, x, normed)
