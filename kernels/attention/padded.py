"""`jagged_attention` as written without kernels: pad, attend with a mask under torch.compile, remove the padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.core.compiled import compiled
from kernels.core.mask import Mask
from kernels.core.rows import Rows, repeat_heads
from kernels.jagged import jagged_to_padded, padded_to_jagged


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, mask: Mask) -> Tensor:
    """[B, L, H, d] each, lengths [B] of the keys -> [B, L, H, d]. Rows of queries without a key have any values."""
    j = torch.arange(k.shape[1], device=k.device)
    # A row without keys attends to its padding, whose values are zeros.
    seen = (j < lengths.clamp(min=1)[:, None])[:, None, None]
    if mask.windowed:
        i = torch.arange(q.shape[1], device=q.device)[:, None]
        # Queries of the padding see all keys: a softmax over none would be NaN, and so would all gradients.
        seen = mask.restrict(seen, i, j) | (i >= lengths[:, None, None, None])
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, scale=scale)
    return out.transpose(1, 2)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
) -> Tensor:
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    max_k = -(-max(max_k, 1) // 8) * 8  # fused kernels need rows of a mask to start at multiples of 16 bytes
    padded = (
        jagged_to_padded(values, offsets, length)
        for values, offsets, length in ((q, q_offsets, max_q), (k, k_offsets, max_k), (v, k_offsets, max_k))
    )
    return padded_to_jagged(compiled(attend)(*padded, k_offsets.diff(), scale, mask), q_offsets, q.shape[0])
