"""Linear compression of embeddings of requests and their candidates: the public function."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.checks import check_offsets
from kernels.core.dispatch import Backend, triton_floats
from kernels.ikbo import lce_torch, reference
from kernels.ikbo.lce_operator import MAX_LEVELS

MIN_ROWS = 128  # outputs of the Hopper kernels are tiles of more


def linear_compression(
    candidate: Tensor,
    request: Tensor | Sequence[Tensor],
    w_candidate: Tensor,
    w_request: Tensor | Sequence[Tensor],
    candidate_offsets: Tensor | Sequence[Tensor],
    *,
    backend: str | None = None,
) -> Tensor:
    """out[c] = w_candidate candidate[c] + w_request request[r] for the candidates c of each request r: [C, M, N].

    candidate [C, Kc, N], request [R, Kr, N], w_candidate [M, Kc], w_request [M, Kr], floating tensors of one dtype and
    any strides. The candidates of request r are offsets[r]:offsets[r + 1] of candidate_offsets [R + 1], int32 or int64;
    a request may have none. The product of each request is computed once and added in at least float32; backends
    other than `hopper` may round it to the dtype before.

    A tree of more levels, such as user, vendor, ad, gives `request`, `w_request` and `candidate_offsets` as sequences
    of equal length, at most 3, in the order of `nested_offsets`, outermost first, here [user, vendor]: offsets[i] say
    which rows of request[i + 1] belong to each row of request[i], and the last ones which candidates. Empty sequences
    leave only the product of the candidates.

    Differentiable in all four (groups of) operands; the gradient of a row is a sum over the rows below it, accumulated
    in at least float32 in a fixed order. Under autocast operands are cast as autocast would cast those of a matmul.

    ValueError for shapes or dtypes that do not fit and, on the CPU, for offsets that do not run from 0 to the number
    of rows below.
    """
    requests = [request] if isinstance(request, Tensor) else list(request)
    w_requests = [w_request] if isinstance(w_request, Tensor) else list(w_request)
    offsets = [candidate_offsets] if isinstance(candidate_offsets, Tensor) else list(candidate_offsets)
    _check(candidate, w_candidate, requests, w_requests, offsets)
    above = (("request", requests), ("w_request", w_requests))
    named = {f"{name}[{level}]": x for name, xs in above for level, x in enumerate(xs)}
    candidate, w_candidate, *rest = dispatch.autocast_operands(candidate=candidate, w_candidate=w_candidate, **named)
    compress = dispatch.choose(
        "linear_compression",
        backend,
        candidate,
        num_out=w_candidate.shape[0],
        width=candidate.shape[2],
        num_levels=len(requests),
        least_depth=min(x.shape[1] for x in (candidate, *requests)),
    )
    return compress(candidate, w_candidate, rest[: len(requests)], rest[len(requests) :], offsets)


def _check(
    candidate: Tensor, w_candidate: Tensor, requests: list[Tensor], w_requests: list[Tensor], offsets: list[Tensor]
) -> None:
    if not len(requests) == len(w_requests) == len(offsets):
        raise ValueError(
            "request, w_request and candidate_offsets must have one entry a level, got "
            f"{len(requests)}, {len(w_requests)} and {len(offsets)}"
        )
    if len(requests) > MAX_LEVELS:
        raise ValueError(f"got {len(requests)} levels above the candidates; at most {MAX_LEVELS} are supported")
    if w_candidate.dim() != 2 or candidate.dim() != 3 or candidate.shape[1] != w_candidate.shape[1]:
        raise ValueError(
            f"candidate {tuple(candidate.shape)} and w_candidate {tuple(w_candidate.shape)} do not fit; "
            "expected [C, Kc, N] and [M, Kc]"
        )
    num_out, width = w_candidate.shape[0], candidate.shape[2]
    for level, (x, weight, level_offsets) in enumerate(zip(requests, w_requests, offsets, strict=True)):
        if x.dim() != 3 or x.shape[2] != width or weight.shape != (num_out, x.shape[1]):
            raise ValueError(
                f"request {tuple(x.shape)} and w_request {tuple(weight.shape)} of level {level} do not fit; expected "
                f"[R, Kr, {width}] and [{num_out}, Kr], with N and M those of candidate and w_candidate"
            )
        if level_offsets.dim() != 1 or level_offsets.shape[0] != x.shape[0] + 1:
            raise ValueError(
                f"candidate_offsets of level {level} have shape {tuple(level_offsets.shape)}; its {x.shape[0]} rows "
                f"need [{x.shape[0] + 1}]"
            )
    for level, (below, level_offsets) in enumerate(zip([*requests, candidate][1:], offsets, strict=True)):
        try:
            check_offsets(below.shape[0], level_offsets)
        except ValueError as error:
            order = "; levels come outermost first, e.g. [user, vendor]" if len(requests) > 1 else ""
            raise ValueError(f"candidate_offsets of level {level}: {error}{order}") from None


def hopper_sizes(num_out: int, width: int, least_depth: int) -> str | None:
    """Why the Hopper kernels cannot multiply a weight [num_out, K] by entries [K, width], K at least `least_depth`."""
    if num_out <= MIN_ROWS:
        return f"needs more than {MIN_ROWS} outputs, got {num_out}: tiles have 192 or 256"
    if width % 128:
        return f"needs a width that is a multiple of 128, got {width}"
    return None if least_depth else "needs a token at every level: TMA does not describe empty tensors"


def _hopper(
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


dispatch.declare(
    "linear_compression",
    Backend("hopper", "kernels.ikbo.hopper.lce_operators:linear_compression", _hopper),
    Backend("triton", "kernels.ikbo.triton.operators:linear_compression", triton_floats),
    Backend("torch", lce_torch.linear_compression),
    Backend("reference", reference.linear_compression),
)


@dispatch.flops("linear_compression")
def _flops(
    candidate: Tensor, w_candidate: Tensor, requests: list[Tensor], w_requests: list[Tensor], offsets: list[Tensor]
) -> float:
    return 2 * w_candidate.shape[0] * sum(x.numel() for x in (candidate, *requests))
