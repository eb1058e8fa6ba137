"""`linear_compression` by the Hopper kernels, as an operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.ikbo.hopper.lce_forward import compress
from kernels.ikbo.hopper.lce_weight import weight_gradient
from kernels.ikbo.lce_operator import compression_operator, gradients_with


def _forward(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    return compress(candidate, w_candidate, *requests, *w_requests, *offsets)


linear_compression = compression_operator(
    "hopper", _forward, gradients_with(lambda weight, x: compress(x, weight), weight_gradient)
)
