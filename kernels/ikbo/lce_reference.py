"""The specification of `linear_compression` in plain PyTorch; see `kernels.ikbo.lce`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import dispatch


def owners_of(offsets: Tensor, total: int) -> Tensor:
    """[total] int32: the row that each of `total` entries belongs to."""
    entries = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    # The row is how many rows have ended.
    return torch.searchsorted(offsets[1:].contiguous(), entries, right=True, out_int32=True)


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
            rows = rows + above[owners_of(offsets[level + 1], rows.shape[0])]
        above = rows
    out = product(w_candidate, candidate)
    if above is not None:
        out = out + above[owners_of(offsets[0], out.shape[0])]
    return out.to(candidate.dtype)
