"""Which experts score highest."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.moe import reference


def top_k(scores: Tensor, k: int, *, backend: str | None = None) -> Tensor:
    """The k largest of scores [N, E] of each token, largest first -> their indices [N, k] int64, without a gradient.

    Of equal scores the triton backend takes the first, torch.topk any.

    Raises:
        ValueError: k outside 1..E.
    """
    if scores.dim() != 2 or not 1 <= k <= scores.shape[1]:
        raise ValueError(f"scores must be [N, E] with k in 1..E, got {list(scores.shape)} and k={k}")
    scores = scores.detach()
    return dispatch.choose("moe_top_k", backend, scores, num_experts=scores.shape[1], k=k)(scores, k)


def _fits(*, device: str, capability: Hashable, dtype: torch.dtype, num_experts: int, k: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if num_experts > 1024 or k > 32:
        return f"holds up to 1024 scores of a token and chooses up to 32, got {num_experts} and {k}"
    return None


dispatch.declare(
    "moe_top_k",
    Backend("triton", "kernels.moe.triton.top_k:top_k", _fits),
    Backend("reference", reference.top_k),
)
