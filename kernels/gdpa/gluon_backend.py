"""Registers the Hopper kernels of `gdpa`, which are imported when the first of them is called."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.gdpa.operator import gdpa_operator

HEAD_DIMS = (64, 128)


def _forward(*arguments: Any) -> Tensor:
    from kernels.gdpa.gluon_forward import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.gdpa.gluon_backward import backward

    return backward(*arguments)


def _supports(
    *, device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int, **_: Hashable
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)):
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {dtype}"
    if head_dim != value_dim or head_dim not in HEAD_DIMS:
        return f"needs heads of {HEAD_DIMS[0]} or {HEAD_DIMS[1]} features, got {head_dim} and {value_dim}"
    return None


gluon_gdpa = dispatch.register("gdpa", "gluon", supports=_supports, priority=20)(
    gdpa_operator("gluon", _forward, _backward)
)
# The schedule of its forward looks at all lengths anyway.
gluon_gdpa.checks_lengths = True  # type: ignore[attr-defined]
