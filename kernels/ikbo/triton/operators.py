"""`linear_compression` by the Triton kernels, as an operator."""

from __future__ import annotations

from kernels.ikbo.lce_operator import compression_operator, gradients_with
from kernels.ikbo.triton.lce import compress, forward, weight_gradient

linear_compression = compression_operator(
    "triton", forward, gradients_with(lambda weight, x: compress(x, weight, None, x.dtype), weight_gradient)
)
