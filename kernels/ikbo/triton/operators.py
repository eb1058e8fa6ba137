"""`linear_compression` by the Triton kernels, as an operator, with PyTorch's batched products where those are faster.

A batched product needs numbers of tokens whose rows start at multiples of 16 bytes: for others, such as 21 tokens,
libraries have kernels of half the speed only. The gradient of a weight is a product over candidates and features at
once. PyTorch copies both of its operands for that, the kernel reads them where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.ikbo import lce_torch
from kernels.ikbo.lce_operator import compression_operator, gradients_with
from kernels.ikbo.triton import lce


def forward(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    chosen = lce_torch.forward if all(map(_aligned, [w_candidate, *w_requests])) else lce.forward
    return chosen(candidate, w_candidate, requests, w_requests, offsets)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return lce_torch.batched(weight, x) if _aligned(weight) else lce.compress(x, weight, None, x.dtype)


def _aligned(weight: Tensor) -> bool:
    """Whether rows of the weight, without gaps, would all start at multiples of 16 bytes."""
    return weight.shape[1] * weight.element_size() % lce_torch.ALIGNMENT == 0


linear_compression = compression_operator("triton", forward, gradients_with(_product, lce.weight_gradient))
