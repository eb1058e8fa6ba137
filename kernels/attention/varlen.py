"""`jagged_attention` through `torch.nn.attention.varlen` (FlashAttention 2 inside PyTorch): the library baseline."""

from __future__ import annotations

from torch import Tensor

from kernels.attention import reference
from kernels.core.offsets import narrowed
from kernels.core.rows import repeat_heads


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
        return reference.jagged_attention(q, k, v, q_offsets, k_offsets, max_q, max_k, scale, causal, window)
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
