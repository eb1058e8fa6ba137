"""`jagged_attention` through `torch.nn.attention.varlen` (FlashAttention 2 inside PyTorch): the library baseline."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.attention import reference as attention_reference
from kernels.core import dispatch
from kernels.core.offsets import narrowed
from kernels.jagged.reference import repeat_heads

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
# Wider heads have no backward on some of the chips above.
MAX_HEAD_DIM = 192


def _supports(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    masked: bool,
    same_offsets: bool,
    block_local: bool,
    biased: bool,
    **_: Hashable,
) -> str | None:
    if reason := dispatch.needs_capability(device, capability, *CAPABILITIES) or dispatch.needs_dtype(
        dtype, *dispatch.HALF
    ):
        return reason
    if value_dim != head_dim:
        return f"needs values as wide as keys, got {value_dim} and {head_dim}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"needs a head dimension that is a multiple of 8 and at most {MAX_HEAD_DIM}, got {head_dim}"
    if block_local or biased:
        return "has neither block-local attention nor biases"
    if masked and not same_offsets:
        return "aligns causal and window masks to the end of each row, which is the same only if q_offsets is k_offsets"
    return None


@dispatch.register("jagged_attention", "varlen", supports=_supports, priority=10)
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    if q.shape[0] == 0 or k.shape[0] == 0:
        # FlashAttention wants at least one query and one key; a batch without them is rare and costs little.
        return attention_reference.jagged_attention(q, k, v, q_offsets, k_offsets, max_q, max_k, scale, causal, window)
    # Imported here because it takes a second, which no run on a CPU should wait for.
    from torch.nn.attention.varlen import varlen_attn

    left, right = window
    return varlen_attn(
        q,
        repeat_heads(k, q.shape[1]),
        repeat_heads(v, q.shape[1]),
        narrowed(q_offsets),
        narrowed(k_offsets),
        max_q,
        max_k,
        scale=scale,
        window_size=(left, 0 if causal else right),
    )
