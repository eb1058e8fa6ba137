"""Offsets that are computed from other ones, made once for all layers that share these.

What is remembered of offsets (`kernels.remember`) then is remembered of the computed ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kernels.custom_op import watched
from kernels.remember import remembered


def derived(make: Callable[[], Tensor], key: Hashable, *sources: Tensor) -> Tensor:
    """`make()`, a new tensor that depends on `key` and the tensors of offsets or indices alone.

    Made anew where a compiler, a mode or a transform is to see how, and in inference mode, whose tensors no later
    backward may keep. Nobody may write to the result.
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
