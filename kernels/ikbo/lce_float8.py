"""Linear compression of float8 operands, for inference: quantisation and the public function."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.checks import check_offsets
from kernels.core.dispatch import Backend
from kernels.ikbo import reference
from kernels.ikbo.lce import hopper_sizes
from kernels.ikbo.lce_torch import room

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LINE = 128  # codes, which are bytes; rows of them start at lines of a cache


class Float8(NamedTuple):
    """codes * scale: codes float8_e4m3fn, scale float32, one number or, of a weight [M, K], one a row [M]."""

    codes: Tensor
    scale: Tensor


def _quantize(x: Tensor, largest: Tensor, room_for_codes: Tensor) -> Float8:
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    values = (x.float() / scale.reshape(-1, *[1] * (x.dim() - 1))).clamp(-LARGEST, LARGEST)
    return Float8(room_for_codes.copy_(values), scale)


def float8_tokens(x: Tensor) -> Float8:
    """Tokens x [B, K, N], floating: one scale for all; codes [B, K, N] with the tokens next to each other in memory.

    That is how products of float8 on Hopper read them; who writes them so need not call this.
    """
    count, depth, width = x.shape
    codes = x.new_empty(count, width, -(-depth // LINE) * LINE, dtype=torch.float8_e4m3fn)[:, :, :depth].mT
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    return _quantize(x, largest.float(), codes)


def float8_weight(weight: Tensor) -> Float8:
    """A weight [M, K], floating: one scale a row."""
    codes = room(weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn), LINE)
    return _quantize(weight, weight.abs().amax(1).float(), codes)


def linear_compression_float8(
    candidate: Float8,
    request: Float8,
    w_candidate: Float8,
    w_request: Float8,
    candidate_offsets: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor:
    """`linear_compression` of float8 operands: [C, M, N] of `dtype`, float16 or bfloat16. It has no gradients.

    candidate [C, Kc, N] and request [R, Kr, N] with one scale each (`float8_tokens`), w_candidate [M, Kc] and
    w_request [M, Kr] with one scale a row (`float8_weight`); candidate_offsets [R + 1], int32 or int64. Both products
    are scaled and added in float32.

    ValueError for shapes or dtypes that do not fit and, on the CPU, for offsets that do not run from 0 to C.
    """
    _check(candidate, request, w_candidate, w_request, candidate_offsets)
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}")
    compress = dispatch.choose(
        "linear_compression_float8",
        backend,
        candidate.codes,
        num_out=w_candidate.codes.shape[0],
        width=candidate.codes.shape[2],
        least_depth=min(candidate.codes.shape[1], request.codes.shape[1]),
    )
    return compress(*candidate, *request, *w_candidate, *w_request, candidate_offsets, dtype)


def _check(candidate: Float8, request: Float8, w_candidate: Float8, w_request: Float8, offsets: Tensor) -> None:
    operands = {"candidate": candidate, "request": request, "w_candidate": w_candidate, "w_request": w_request}
    for name, (codes, scale) in operands.items():
        if codes.dtype != torch.float8_e4m3fn:
            raise ValueError(f"the codes of {name} must be torch.float8_e4m3fn, got {codes.dtype}")
        rank, scales = (2, codes.shape[:1]) if name.startswith("w_") else (3, ())
        if codes.dim() != rank or scale.shape != scales or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must have codes of {rank} dimensions and float32 scales {list(scales)}, got codes "
                f"{tuple(codes.shape)} and {scale.dtype} scales {tuple(scale.shape)}"
            )
    num_out = w_candidate.codes.shape[0]
    for name, x, weight in (("candidate", candidate, w_candidate), ("request", request, w_request)):
        shape = x.codes.shape
        if shape[2] != candidate.codes.shape[2] or weight.codes.shape != (num_out, shape[1]):
            raise ValueError(
                f"{name} {tuple(shape)} and w_{name} {tuple(weight.codes.shape)} do not fit; expected [., K, "
                f"{candidate.codes.shape[2]}] and [{num_out}, K]"
            )
    if offsets.shape != (request.codes.shape[0] + 1,):
        raise ValueError(
            f"candidate_offsets have shape {tuple(offsets.shape)}; {request.codes.shape[0]} requests need "
            f"[{request.codes.shape[0] + 1}]"
        )
    check_offsets(candidate.codes.shape[0], offsets)


def _hopper(
    *, device: str, capability: Hashable, dtype: torch.dtype, num_out: int, width: int, least_depth: int
) -> str | None:
    return dispatch.needs_triton(device, capability, (9, 0)) or hopper_sizes(num_out, width, least_depth)


dispatch.declare(
    "linear_compression_float8",
    Backend("hopper", "kernels.ikbo.hopper.lce_operators:linear_compression_float8", _hopper),
    Backend("reference", reference.linear_compression_float8),
)


@dispatch.flops("linear_compression_float8")
def _flops(candidate: Tensor, _: Tensor, request: Tensor, __: Tensor, w_candidate: Tensor, *rest: object) -> float:
    return 2 * w_candidate.shape[0] * (candidate.numel() + request.numel())
