"""`linear_compression` from PyTorch's batched products: decomposed, with aligned operands, for every device and dtype.

Products with a weight are `bmm` with a batch stride of 0. A weight whose rows do not start at multiples of 16 bytes is
copied into a buffer whose rows do, of unchanged shape: libraries choose their kernels by that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core.rows import row_of
from kernels.ikbo.lce_operator import compression_operator, gradients_with

ALIGNMENT = 16  # bytes


def room(matrix: Tensor, alignment: int) -> Tensor:
    """The matrix if rows are contiguous and start at multiples of `alignment` bytes, otherwise a buffer for it."""
    step = alignment // matrix.element_size()
    rows, columns = matrix.shape
    row_step = matrix.stride(0)
    if matrix.stride(1) == 1 and row_step >= columns and row_step % step == 0 and matrix.data_ptr() % alignment == 0:
        return matrix
    # Allocating less than whole rows would do, but whole rows keep the address arithmetic simple.
    return matrix.new_empty(rows, -(-columns // step) * step)[:, :columns]


def aligned_rows(matrix: Tensor, alignment: int = ALIGNMENT) -> Tensor:
    """The matrix, or a copy, with a contiguous last dimension and rows that start at multiples of `alignment` bytes."""
    target = room(matrix, alignment)
    return matrix if target is matrix else target.copy_(matrix)


def batched(weight: Tensor, x: Tensor) -> Tensor:
    """weight [M, K] times each x[b] [K, N]: [B, M, N]."""
    return torch.bmm(aligned_rows(weight).expand(x.shape[0], -1, -1), x)


def forward(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    xs, weights = [*requests, candidate], [*w_requests, w_candidate]
    out = batched(weights[0], xs[0])
    for x, weight, level_offsets in zip(xs[1:], weights[1:], offsets, strict=True):
        rows = out.index_select(0, row_of(level_offsets, x.shape[0]))
        # In place: the product reads the broadcast rows once, into its accumulators.
        out = rows.baddbmm_(aligned_rows(weight).expand(x.shape[0], -1, -1), x)
    return out


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """sum_b grad[b] x[b]^T of grad [B, M, N] and x [B, K, N]: [M, K], as one product that runs over b and n."""
    return torch.mm(grad.transpose(0, 1).flatten(1), x.transpose(0, 1).flatten(1).mT)


linear_compression = compression_operator("torch", forward, gradients_with(batched, weight_gradient))
