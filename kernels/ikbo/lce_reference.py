"""The specification of `linear_compression` in plain PyTorch; see `kernels.ikbo.lce`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import dispatch
from kernels.jagged.reference import row_of


@dispatch.register("linear_compression", "reference")
def linear_compression(
    candidate: Tensor,
    w_candidate: Tensor,
    users: Sequence[Tensor],
    w_users: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    """Levels from the one right above the candidates upwards; sums of products in at least float32."""
    wide = torch.promote_types(candidate.dtype, torch.float32)

    def product(weight: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("mk,bkn->bmn", weight.to(wide), x.to(wide))

    above: Tensor | None = None
    for level in reversed(range(len(users))):
        rows = product(w_users[level], users[level])
        if above is not None:
            rows = rows + above[row_of(offsets[level + 1], rows.shape[0])]
        above = rows
    out = product(w_candidate, candidate)
    if above is not None:
        out = out + above[row_of(offsets[0], out.shape[0])]
    return out.to(candidate.dtype)
