"""The products in the operands' own precision, on which the MXFP8 ones are built and with which they are compared.

`offsets` [E] int32 are cumulative ends: rows of expert e are offsets[e - 1]:offsets[e]. Rows from offsets[E - 1] on
belong to no expert. `grouped_mm` is differentiable; `grouped_wgrad` is only its weight gradient.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.core.operator import custom_op


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [M, K], weight [E, N, K] -> [M, N], a loop over the experts, which needs their sizes: a sync on a GPU.

    A compiler, which cannot know them, sees one operator.
    """
    return _product(x, weight, offsets) if torch.compiler.is_compiling() else _loop(x, weight, offsets)


def _loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    *groups, rest = x.split_with_sizes(_sizes(offsets, x.shape[0]))
    outputs = [group @ matrix.t() for group, matrix in zip(groups, weight.unbind(), strict=True)]
    return torch.cat([*outputs, x.new_zeros(rest.shape[0], weight.shape[1])])


def grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy [M, N], x [M, K] -> [E, N, K], the sum over each expert's rows of dy^T x; on a GPU, a sync."""
    return _wgrad(dy, x, offsets) if torch.compiler.is_compiling() else _wgrad_loop(dy, x, offsets)


def _wgrad_loop(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    sizes = _sizes(offsets, x.shape[0])
    pairs = zip(dy.split_with_sizes(sizes)[:-1], x.split_with_sizes(sizes)[:-1], strict=True)
    return torch.stack([dy_group.t() @ x_group for dy_group, x_group in pairs])


@custom_op("gemsmith::grouped_mm_loop")
def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _loop(x, weight, offsets)


@_product.register_fake
def _(x, weight, offsets):
    return x.new_empty(x.shape[0], weight.shape[1])


@custom_op("gemsmith::grouped_wgrad_loop")
def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return _wgrad_loop(dy, x, offsets)


@_wgrad.register_fake
def _(dy, x, offsets):
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


def _backward(ctx, dy):
    x, weight, offsets = ctx.saved_tensors
    dx = _product(dy, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    return dx, _wgrad(dy, x, offsets) if ctx.needs_input_grad[1] else None, None


_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _sizes(offsets: Tensor, total: int) -> list[int]:
    """Rows of each expert, then the rows that belong to none."""
    ends = [0, *offsets.tolist(), total]
    if sorted(ends) != ends:
        raise ValueError(f"offsets must not decrease and must end by the number of rows {total}, got {ends[1:-1]}")
    return [end - start for start, end in pairwise(ends)]


class _GroupedMM(torch.autograd.Function):
    """`torch._grouped_mm` with its own backward, because rows without an expert come back uninitialised from it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _clear_rest(torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets), offsets)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        dx = _clear_rest(torch._grouped_mm(dy, weight, offs=offsets), offsets) if ctx.needs_input_grad[0] else None
        dw = torch_grouped_wgrad(dy, x, offsets) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _clear_rest(rows: Tensor, offsets: Tensor) -> Tensor:
    beyond = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    return rows.masked_fill_(beyond[:, None], 0.0)


def torch_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return grouped_mm(x, weight, offsets)
    # Either orientation of a contiguous matrix is taken without a copy.
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    return _GroupedMM.apply(x.contiguous(), weight, offsets)


def torch_grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    # On sm_100 the gradient of an expert without rows is not written (pytorch/pytorch issue 172439).
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    return torch._grouped_mm(dy.t(), x, offs=offsets).masked_fill_(empty[:, None, None], 0.0)
