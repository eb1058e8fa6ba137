"""Offsets that are computed from other offsets, once for all layers that share those.

So what `kernels.core.caches` keeps for offsets, such as lists of tiles, is also kept for the computed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kernels.core.caches import remembered
from kernels.core.operator import watched


def derived(make: Callable[[], Tensor], key: Hashable, *sources: Tensor) -> Tensor:
    """`make()`, a new tensor that depends only on `key` and these offsets or indices, or what it returned last time.

    It is made again where a compiler, a mode or a transform must see how, and in inference mode, whose tensors no later
    backward may save. The result must not be written to.
    """
    if watched(sources) or torch.is_inference_mode_enabled():
        return make()
    return remembered(make, key, *sources)


def scaled_offsets(offsets: Tensor, count: int) -> Tensor:
    """Offsets of rows whose every value is `count` values."""
    return offsets if count == 1 else derived(lambda: offsets * count, ("scaled", count), offsets)


def narrowed(offsets: Tensor) -> Tensor:
    """Offsets in int32."""
    return offsets if offsets.dtype is torch.int32 else derived(offsets.int, "int32", offsets)
