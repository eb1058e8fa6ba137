"""Bias, activation and factor after a linear layer's product in Triton.

A program has up to `_COLUMNS` columns of some rows: wider rows are in several parts. In the backward the gradient of
the bias, a sum over all rows, is added up in the same pass: each program keeps the sums of its rows, and a short second
step adds those of all programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.partial_sums import add_partial_sums
from kernels.core.triton import cdiv
from kernels.tokens.triton.tokens import tiling

_COLUMNS = 2048
_PROGRAMS = 4  # for each multiprocessor


@triton.jit
def tile_of_part(first, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(columns of this part, int64 indices of its elements of rows [first, first + ROWS), whether they exist)."""
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    return column, (row.to(tl.int64) * WIDTH)[:, None] + column[None, :], inside


@triton.jit(do_not_specialize=["num_rows"])
def activate_kernel(
    z, bias, factor, out, num_rows, SILU: tl.constexpr, HAS_FACTOR: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column, places, inside = tile_of_part(tl.program_id(0).to(tl.int64) * ROWS, num_rows, WIDTH, ROWS, BLOCK)
    u = tl.load(z + places, inside, 0.0).to(tl.float32) + tl.load(bias + column, column < WIDTH, 0.0).to(tl.float32)
    y = u * tl.sigmoid(u) if SILU else u
    if HAS_FACTOR:
        y *= tl.load(factor + places, inside, 0.0).to(tl.float32)
    tl.store(out + places, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def activate_backward_kernel(
    grad, z, bias, factor, dz, dfactor, sums, num_rows, SILU: tl.constexpr, HAS_FACTOR: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sums` [programs, WIDTH] float32: of dz, over the rows of each program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(bias + column, column < WIDTH, 0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        _, places, inside = tile_of_part(first, num_rows, WIDTH, ROWS, BLOCK)
        g = tl.load(grad + places, inside, 0.0).to(tl.float32)
        u = tl.load(z + places, inside, 0.0).to(tl.float32) + b
        s = tl.sigmoid(u)
        if HAS_FACTOR:
            f = tl.load(factor + places, inside, 0.0).to(tl.float32)
            tl.store(dfactor + places, (g * (u * s if SILU else u)).to(dfactor.dtype.element_ty), inside)
            g *= f
        if SILU:
            g *= s * (1 + u * (1 - s))
        tl.store(dz + places, g.to(dz.dtype.element_ty), inside)
        total += g
    tl.store(sums + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), column < WIDTH)


_launch_forward = Launcher(activate_kernel)
_launch_backward = Launcher(activate_backward_kernel)


@custom_op("gemsmith::activate", like="z")
def activate(z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> Tensor:
    """activation(z + bias) * factor like z [..., E], contiguous, of bias [E] and factor like z."""
    z, bias = z.contiguous(), bias.contiguous()
    out = torch.empty_like(z)
    tensors = (z, bias, z if factor is None else factor.contiguous(), out)
    if z.numel():
        _launch(_launch_forward, tiles_of_rows(z), z, tensors, activation, factor)
    return out


@custom_op("gemsmith::activate_backward")
def activate_backward(
    grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, of bias, and of the factor, the last of no size without one."""
    grad, z, bias = grad.contiguous(), z.contiguous(), bias.contiguous()
    dz = torch.empty_like(z)
    dfactor = z.new_empty(0 if factor is None else z.shape, dtype=(z if factor is None else factor).dtype)
    if not z.numel():
        return dz, torch.zeros_like(bias), dfactor
    programs = min(tiles_of_rows(z), cdiv(_PROGRAMS * processors(z.device), tiling_of_parts(z)[1]))
    sums = z.new_empty(programs, z.shape[-1], dtype=torch.float32)
    tensors = (grad, z, bias, z if factor is None else factor.contiguous(), dz, dfactor, sums)
    _launch(_launch_backward, programs, z, tensors, activation, factor)
    return dz, add_partial_sums(sums, bias.dtype), dfactor


@activate_backward.register_fake
def _(grad: Tensor, z: Tensor, bias: Tensor, activation: str, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), bias.new_empty(bias.shape), z.new_empty(0 if factor is None else z.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, bias, ctx.activation, factor = inputs
    ctx.save_for_backward(z, bias, factor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
    z, bias, factor = ctx.saved_tensors
    dz, dbias, dfactor = activate_backward(grad, z, bias, ctx.activation, factor)
    return dz, dbias, None, None if factor is None else dfactor


activate.register_autograd(_backward, setup_context=_save)


def silu_mlp(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor | None) -> Tensor:
    """The products by PyTorch."""
    return F.linear(activate(F.linear(x, inner), bias, "silu", None), outer, outer_bias)


def tiling_of_parts(z: Tensor) -> tuple[dict[str, int], int]:
    """(constants of the kernels for z [..., E], parts of each row)."""
    parts = cdiv(z.shape[-1], _COLUMNS)
    return tiling(z.shape[-1]) if parts == 1 else tiling(_COLUMNS) | {"WIDTH": z.shape[-1]}, parts


def tiles_of_rows(z: Tensor) -> int:
    return cdiv(z.numel() // z.shape[-1], tiling_of_parts(z)[0]["ROWS"])


def _launch(
    launch: Launcher, programs: int, z: Tensor, tensors: tuple[Tensor, ...], activation: str, factor: Tensor | None
) -> None:
    num_rows = z.numel() // z.shape[-1]
    constants, parts = tiling_of_parts(z)
    warps = constants.pop("num_warps")
    options = (activation == "silu", factor is not None, *constants.values())
    dtypes = tuple([tensor.dtype for tensor in tensors])
    launch(
        (programs, parts, 1), (z.device, dtypes, aligned(*tensors), num_rows >> 31, *options),
        *tensors, num_rows, *options, num_warps=warps,
    )  # fmt: skip
