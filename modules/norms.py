"""The one normalisation of every module: RMSNorm over the width, without learned scale.

Element-wise affine parameters are left out: each norm is followed by a linear layer that can absorb a scale, and
Kunlun reports a marginal quality effect.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-5


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-5) over the last dimension; zeros stay zeros with a finite gradient.

    PyTorch takes the statistics in at least float32 whatever the input. The result has the input's dtype, so that a
    bf16 stream of sequence tokens is not widened in memory.
    """
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON).to(x.dtype)
