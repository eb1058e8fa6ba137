"""The specification of `linear_compression` in plain PyTorch; see `kernels.ikbo.lce`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.jagged.reference import row_of


@dispatch.register("linear_compression", "reference")
def linear_compression(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    """Levels from the outermost one downwards; sums of products in at least float32."""
    wide = torch.promote_types(candidate.dtype, torch.float32)

    def product(weight: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("mk,bkn->bmn", weight.to(wide), x.to(wide))

    xs, weights = [*requests, candidate], [*w_requests, w_candidate]
    out = product(weights[0], xs[0])
    for x, weight, level_offsets in zip(xs[1:], weights[1:], offsets, strict=True):
        out = product(weight, x) + out[row_of(level_offsets, x.shape[0])]
    return out.to(candidate.dtype)
