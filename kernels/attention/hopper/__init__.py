"""`jagged_attention` on Hopper: the Gluon forward and backward kernels behind one operator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.operator import attention_operator
from kernels.core import dispatch

HEAD_DIMS = (64, 128)


def needs_hopper_heads(
    device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    """A reason why the Hopper kernels of attention and GDPA cannot serve these heads, or None."""
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if head_dim != value_dim or head_dim not in HEAD_DIMS:
        return f"needs heads of {HEAD_DIMS[0]} or {HEAD_DIMS[1]} features, got {head_dim} and {value_dim}"
    return None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from kernels.attention.hopper.forward import attention_forward

    return attention_forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    from kernels.attention.hopper.backward import attention_backward

    return attention_backward(*arguments)


def _supports(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    block_local: bool,
    biased: bool,
    positive_scale: bool,
    few_queries: bool,
    **_: Hashable,
) -> str | None:
    if reason := needs_hopper_heads(device, capability, dtype, head_dim, value_dim):
        return reason
    if block_local or biased:
        return "has no block-local attention and no biases"
    if not positive_scale:
        return "needs a positive scale: it masks scores before they are scaled"
    if few_queries:
        return "needs max_q of at least 64: it pads rows of queries to tiles of 64, in memory for their gradients too"
    return None


gluon_attention = dispatch.register("jagged_attention", "gluon", supports=_supports, priority=20)(
    attention_operator("gluon", _forward, _backward, features=False)
)
# The forward's schedule checks all lengths anyway.
gluon_attention.checks_lengths = True  # type: ignore[attr-defined]
