"""Registers the Triton and the Hopper kernels of `linear_compression`, which are imported on their first call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.ikbo.lce_operator import Gradients, compression_operator, gradients_with

MIN_ROWS = 128


def _triton_forward(*arguments: Any) -> Tensor:
    from kernels.ikbo.triton.lce import forward

    return forward(*arguments)


def _triton_backward(*arguments: Any) -> Gradients:
    from kernels.ikbo.triton.lce import compress, weight_gradient

    return gradients_with(lambda weight, x: compress(x, weight, None, x.dtype), weight_gradient)(*arguments)


def _triton_supports(*, device: str, capability: Hashable, dtype: torch.dtype, **_: Hashable) -> str | None:
    return dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS)


def _gluon_forward(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    from kernels.ikbo.hopper.lce_forward import compress

    return compress(candidate, w_candidate, *requests, *w_requests, *offsets)


def _gluon_backward(*arguments: Any) -> Gradients:
    from kernels.ikbo.hopper.lce_forward import compress
    from kernels.ikbo.hopper.lce_weight import weight_gradient

    return gradients_with(lambda weight, x: compress(x, weight), weight_gradient)(*arguments)


def hopper_sizes(num_out: int, width: int, least_depth: int) -> str | None:
    """Why the Hopper kernels cannot multiply a weight [num_out, K] by entries [K, width], K at least `least_depth`."""
    if num_out <= MIN_ROWS:
        return f"needs more than {MIN_ROWS} outputs, got {num_out}: tiles have 192 or 256"
    if width % 128:
        return f"needs a width that is a multiple of 128, got {width}"
    return None if least_depth else "needs a token at every level: TMA does not describe empty tensors"


def _gluon_supports(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    num_out: int,
    width: int,
    num_levels: int,
    least_depth: int,
) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if num_levels > 1:
        return f"has one level of requests, got {num_levels}"
    return hopper_sizes(num_out, width, least_depth)


# Only by name: it is slower than torch's products everywhere.
dispatch.register("linear_compression", "triton", supports=_triton_supports, priority=-1)(
    compression_operator("triton", _triton_forward, _triton_backward)
)
dispatch.register("linear_compression", "gluon", supports=_gluon_supports, priority=20)(
    compression_operator("gluon", _gluon_forward, _gluon_backward)
)
