"""The one normalisation of every module: RMSNorm over the width, without learned scale.

Element-wise affine parameters are left out: each norm is followed by a linear layer that can absorb a scale, and
Kunlun reports a marginal quality effect.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-5


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-5) over the last dimension; zeros stay zeros with a finite gradient.

    Statistics in at least float32 whatever the input; the result has the input's dtype, so that a bf16 stream of
    sequence tokens is not widened in memory.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, x.shape[-1:], eps=EPSILON).to(x.dtype)
