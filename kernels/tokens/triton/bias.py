"""A linear layer by PyTorch, its bias's gradient by a kernel, in Triton.

The product with a bias is PyTorch's, in one launch. Its sum over the rows of the gradient takes PyTorch several times
as long as reading them; here each program adds up the rows that it reads, and a short second step adds all programs'.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op, intercepted
from kernels.core.partial_sums import add_partial_sums
from kernels.core.triton import cdiv
from kernels.tokens.triton.activation import tile_of_part, tiles_of_rows, tiling_of_parts

_PROGRAMS = 8  # for each multiprocessor


@triton.jit(do_not_specialize=["num_rows"])
def column_sum_kernel(x, sums, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`sums` [programs, WIDTH] float32: of x, over the rows of each program."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        _, places, inside = tile_of_part(first, num_rows, WIDTH, ROWS, BLOCK)
        total += tl.load(x + places, inside, 0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), column < WIDTH)


_launch = Launcher(column_sum_kernel)


@custom_op("gemsmith::column_sum")
def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[E] in `dtype`, of x [..., E] over all rows, added up in float32."""
    x, width = x.contiguous(), x.shape[-1]
    if not x.numel():
        return x.new_zeros(width, dtype=dtype)
    constants, parts = tiling_of_parts(x)
    warps = constants.pop("num_warps")
    programs = min(tiles_of_rows(x), cdiv(_PROGRAMS * processors(x.device), parts))
    num_rows, sums = x.numel() // width, x.new_empty(programs, width, dtype=torch.float32)
    _launch(
        (programs, parts, 1), (x.device, x.dtype, aligned(x), num_rows >> 31, *constants.values()),
        x, sums, num_rows, *constants.values(), num_warps=warps,
    )  # fmt: skip
    return add_partial_sums(sums, dtype)


@column_sum.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=dtype)


class _WithBias(torch.autograd.Function):
    """y, to which the bias has been added without a gradient for it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # Rounded as PyTorch's is where autocast casts the bias: it may have been cast before, with other weights.
        return grad, column_sum(grad, grad.dtype).to(ctx.dtype)


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and bias.requires_grad) or intercepted((x, weight, bias)):
        return F.linear(x, weight, bias)
    return _WithBias.apply(F.linear(x, weight, bias.detach()), bias)
