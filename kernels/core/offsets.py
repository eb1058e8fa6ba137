"""Offsets that are computed from other offsets, once for all layers that share those.

So what `kernels.core.caches` keeps for offsets, such as lists of tiles, is also kept for the computed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kernels.core.caches import cached
from kernels.core.mask import NO_MASK, Mask
from kernels.core.operator import intercepted


def derived(make: Callable[[], Tensor], key: Hashable, *sources: Tensor) -> Tensor:
    """`make()`, a new tensor that depends only on `key` and these offsets or indices, or what it returned last time.

    It is made again where a compiler, a mode or a transform must see how, and in inference mode, whose tensors no later
    backward may save. The result must not be written to.
    """
    if intercepted(sources) or torch.is_inference_mode_enabled():
        return make()
    return cached(make, key, *sources)


def scaled_offsets(offsets: Tensor, count: int) -> Tensor:
    """Offsets of rows whose every value is `count` values."""
    return offsets if count == 1 else derived(lambda: offsets * count, ("scaled", count), offsets)


def narrowed(offsets: Tensor) -> Tensor:
    """Offsets in int32."""
    return offsets if offsets.dtype is torch.int32 else derived(offsets.int, "int32", offsets)


def attended_pairs(q_offsets: Tensor, k_offsets: Tensor, mask: Mask = NO_MASK) -> int:
    """How many pairs of a query and a key of its row see each other. Waits for the device."""
    pairs = 0
    left, right = mask.window
    for num_q, num_k in zip(q_offsets.diff().tolist(), k_offsets.diff().tolist(), strict=True):
        query = torch.arange(num_q)
        first = query - left if left >= 0 else torch.zeros_like(query)
        last = query + right if right >= 0 else torch.full_like(query, num_k - 1)
        if mask.block_size is not None:
            block = query // mask.block_size * mask.block_size
            first, last = torch.maximum(first, block), torch.minimum(last, block + mask.block_size - 1)
        pairs += int((last.clamp(max=num_k - 1) - first.clamp(min=0) + 1).clamp(min=0).sum())
    return pairs
