"""`jagged_attention` through `torch.nn.attention.varlen` (FlashAttention 2 inside PyTorch): the library baseline."""

from __future__ import annotations

from torch import Tensor

from kernels.attention import reference
from kernels.core.mask import Mask
from kernels.core.offsets import narrowed
from kernels.core.rows import Rows, repeat_heads


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
) -> Tensor:
    if q.shape[0] == 0 or k.shape[0] == 0:
        # FlashAttention wants at least one query and one key; a batch without them is rare and costs little.
        return reference.jagged_attention(q, k, v, queries, keys, scale, mask)
    # Imported here because it takes a second, which no run on a CPU should wait for.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q,
        repeat_heads(k, q.shape[1]),
        repeat_heads(v, q.shape[1]),
        narrowed(queries.offsets),
        narrowed(keys.offsets),
        queries.max_length,
        keys.max_length,
        scale=scale,
        window_size=mask.window,
    )
