"""The normalisations of every module: RMSNorm over the width, without learned scale.

Element-wise affine parameters are left out: each norm is followed by a linear layer that can absorb a scale, and
Kunlun reports a marginal quality effect. The result has the input's dtype, so that a bf16 stream of sequence tokens is
not widened in memory.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from kernels.tokens import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm", "row_norm"]

QUIET = 0.1
"""Root mean square of a looked-up row below which `row_norm` treats it as still unlearned."""


@overload
def row_norm(rows: Tensor, dtype: torch.dtype | None = None, *, twice: Literal[False] = False) -> Tensor: ...


@overload
def row_norm(rows: Tensor, dtype: torch.dtype | None = None, *, twice: Literal[True]) -> tuple[Tensor, ...]: ...


def row_norm(rows: Tensor, dtype: torch.dtype | None = None, *, twice: bool = False) -> Tensor | tuple[Tensor, ...]:
    """RMSNorm of what was looked up: x / sqrt(mean(x^2) + QUIET^2), [..., d] -> [..., d] in `dtype`; with `twice` a
    pair of it, for two readers, as `rms_norm` makes it.

    The row of a rare id is little more than its first, random value, which is small (`model.table_std`). RMSNorm would
    make this noise as loud as the row of any other id; here it stays quiet until the row has grown to `QUIET`.
    """
    if twice:
        return rms_norm(rows, dtype=dtype, epsilon=QUIET**2, twice=True)
    return rms_norm(rows, dtype=dtype, epsilon=QUIET**2)
