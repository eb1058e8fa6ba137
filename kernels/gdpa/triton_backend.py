"""Registers the Triton kernels of `gdpa`, which are imported when the first of them is called."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.gdpa.operator import gdpa_operator

MAX_HEAD_DIM = 256


def _forward(*arguments: Any) -> Tensor:
    from kernels.gdpa.triton.forward import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from kernels.gdpa.triton.backward import backward

    return backward(*arguments)


def _supports(
    *, device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int, **_: Hashable
) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        return f"needs heads of at most {MAX_HEAD_DIM} features, got {head_dim} and {value_dim}"
    return None


# Preferred to the reference because it keeps no scores in memory.
triton_gdpa = dispatch.register("gdpa", "triton", supports=_supports, priority=10)(
    gdpa_operator("triton", _forward, _backward)
)
