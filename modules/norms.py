"""The normalisations of every module: RMSNorm over the width, without learned scale.

Element-wise affine parameters are left out: each norm is followed by a linear layer that can absorb a scale, and
Kunlun reports a marginal quality effect. The result has the input's dtype, so that a bf16 stream of sequence tokens is
not widened in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tokens import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm", "row_norm"]

QUIET = 0.1
"""Root mean square of a looked-up row below which `row_norm` treats it as still unlearned."""


def row_norm(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm of what was looked up: x / sqrt(mean(x^2) + QUIET^2), [..., d] -> [..., d] in `dtype`.

    The row of a rare id is little more than its first, random value, which is small (`model.table_std`). RMSNorm would
    make this noise as loud as the row of any other id; here it stays quiet until the row has grown to `QUIET`.
    """
    return rms_norm(rows, dtype=dtype, epsilon=QUIET**2)
