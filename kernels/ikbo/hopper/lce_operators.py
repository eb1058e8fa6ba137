"""`linear_compression` and `linear_compression_float8` by the Hopper kernels, as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.core.operator import custom_op
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


@custom_op("gemsmith::lce_float8_hopper")
def linear_compression_float8(
    candidate: Tensor,
    candidate_scale: Tensor,
    request: Tensor,
    request_scale: Tensor,
    w_candidate: Tensor,
    w_candidate_scale: Tensor,
    w_request: Tensor,
    w_request_scale: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    scales = w_candidate_scale * candidate_scale, w_request_scale * request_scale
    return compress(candidate, w_candidate, request, w_request, offsets.contiguous(), scales, dtype)


@linear_compression_float8.register_fake
def _(
    candidate: Tensor, scale: Tensor, request: Tensor, request_scale: Tensor, w_candidate: Tensor, *rest: Any
) -> Tensor:
    return candidate.new_empty(candidate.shape[0], w_candidate.shape[0], candidate.shape[2], dtype=rest[-1])
