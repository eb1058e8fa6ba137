"""Registers the GPU kernels of MXFP8, which are imported when the first of them is called."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.mxfp8.reference import MXTensor


def _supports(*, device: str, capability: Hashable, dtype: torch.dtype, axis: int, **facts: Hashable) -> str | None:
    if reason := dispatch.needs_triton(device, capability, (9, 0), (10, 0)) or dispatch.needs_dtype(
        dtype, *dispatch.FLOATS
    ):
        return reason
    if axis < -2:
        return f"quantises along one of the last two axes, not along {axis}"
    return None


@dispatch.register("mxfp8_quantize", "gluon", supports=_supports, priority=10)
def quantize(x: Tensor, axis: int, group: int, square: bool) -> MXTensor:
    """With blocks along the last axis but one, codes and scales are transposed views: they are contiguous along it."""
    from kernels.mxfp8.grouped import MATRIX
    from kernels.mxfp8.hopper.quantize import quantize_both

    along_rows = axis % x.dim() == x.dim() - 1
    if x.dim() == 1:
        matrix = x[None]
    elif along_rows and not square:
        matrix = x.flatten(0, -2)  # whole tiles of a batch of few rows, and a batch of any size
    else:
        matrix = x
    results = quantize_both(matrix, along_rows, not along_rows, group, square, MATRIX)
    if along_rows:
        codes, scales = results[:2]
        return MXTensor(codes.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1]), axis % x.dim())
    codes, scales = results[2:]
    return MXTensor(codes.mT, scales.mT, axis % x.dim())
