"""The one normalisation of every module: RMSNorm over the width, without learned scale.

Element-wise affine parameters are left out: each norm is followed by a linear layer that can absorb a scale, and
Kunlun reports a marginal quality effect. The result has the input's dtype, so that a bf16 stream of sequence tokens is
not widened in memory.
"""

from kernels.tokens import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
