"""Functions of padded tensors under `torch.compile`, for the backends that others are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

SHAPES = 64
"""How often a function may be compiled; PyTorch's own limit of 8, beyond which it runs uncompiled, is fewer than the
event types of a model have lengths."""


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled anew for each set of shapes. Compiled when first called: torch.compile takes seconds to
    import."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, SHAPES)
    return torch.compile(function, dynamic=False)
