"""Registers the Hopper kernels of `gdpa`, which are imported when the first of them is called."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.hopper import needs_hopper_heads
from kernels.core import dispatch
from kernels.gdpa.operator import gdpa_operator


def _forward(*arguments: Any) -> Tensor:
    from kernels.gdpa.hopper.forward import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.gdpa.hopper.backward import backward

    return backward(*arguments)


def _supports(
    *, device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int, **_: Hashable
) -> str | None:
    return needs_hopper_heads(device, capability, dtype, head_dim, value_dim)


gluon_gdpa = dispatch.register("gdpa", "gluon", supports=_supports, priority=20)(
    gdpa_operator("gluon", _forward, _backward)
)
# The forward's schedule checks all lengths anyway.
gluon_gdpa.checks_lengths = True  # type: ignore[attr-defined]
