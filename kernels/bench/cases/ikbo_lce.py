"""Benchmark cases of linear compression.

The shapes are those of the published benchmark of IKBO: M = 433, N = 256, 1184 tokens of a request and 872 of a
candidate, both padded to multiples of 8 outside the timing, float16; candidates over several numbers of candidates per
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases import ikbo_peer
from kernels.bench.cases.cute_peers import where_it_runs
from kernels.core.rows import row_of
from kernels.ikbo import linear_compression
from kernels.ikbo.lce_torch import aligned_rows
from kernels.jagged import segment_sum


@dataclass(frozen=True)
class Shape:
    num_candidates: int
    ratio: int  # candidates of a request; the last request may have fewer
    request_tokens: int = 1184
    candidate_tokens: int = 872
    num_out: int = 433
    width: int = 256


GPU_SIZES = [(512, 70), (1024, 70), (2048, 70), (3072, 70), *((1024, ratio) for ratio in (1, 2, 10, 100, 1000))]
CPU_SIZES = [(6, 3)]
BACKWARD = {(1024, 70), (1024, 10), (6, 3)}

# Results of half precision carry 2^-11 of rounding, and with some backends so does the requests' part.
LIMIT = 2e-3


def cases(device: torch.device) -> list[Case]:
    gpu = device.type == "cuda"
    sizes = GPU_SIZES if gpu else CPU_SIZES
    small = {} if gpu else {"request_tokens": 9, "candidate_tokens": 7, "num_out": 5, "width": 8}
    return [
        Case(f"lce_{direction}_B{count}_ratio{ratio}", partial(_problem, direction, Shape(count, ratio, **small)))
        for count, ratio in sizes
        for direction in ("fwd", "bwd")
        if direction == "fwd" or (count, ratio) in BACKWARD
    ]


@dataclass(frozen=True)
class _Inputs:
    candidate: Tensor
    request: Tensor
    w_candidate: Tensor
    w_request: Tensor
    offsets: Tensor
    cotangent: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.candidate, self.request, self.w_candidate, self.w_request

    def compress(self, backend: str, *leaves: Tensor) -> Tensor:
        return linear_compression(*(leaves or self.leaves), self.offsets, backend=backend)


def _inputs(shape: Shape, device: torch.device, backward: bool) -> _Inputs:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(sizes, device=device, generator=generator, dtype=dtype) * scale
        return values.requires_grad_(backward)

    count, tokens, width = shape.num_candidates, (shape.candidate_tokens, shape.request_tokens), shape.width
    num_requests = -(-count // shape.ratio)
    return _Inputs(
        random(count, tokens[0], width),
        random(num_requests, tokens[1], width),
        random(shape.num_out, tokens[0], scale=sum(tokens) ** -0.5),
        random(shape.num_out, tokens[1], scale=sum(tokens) ** -0.5),
        (torch.arange(num_requests + 1, device=device) * shape.ratio).clamp(max=count),
        random(count, shape.num_out, width).detach(),
    )


def _work(shape: Shape, itemsize: int) -> tuple[float, float]:
    """(operations, bytes) of the forward."""
    count, requests = shape.num_candidates, -(-shape.num_candidates // shape.ratio)
    tokens = count * shape.candidate_tokens + requests * shape.request_tokens
    return 2.0 * shape.num_out * shape.width * tokens, itemsize * shape.width * (tokens + count * shape.num_out)


def _problem(direction: str, shape: Shape, device: torch.device) -> Problem:
    backward = direction == "bwd"
    inputs = _inputs(shape, device, backward)
    owners = row_of(inputs.offsets, shape.num_candidates).int()

    def runner(step: Callable[[], Tensor]) -> Runner:
        return runner_of(step, inputs.leaves, inputs.cotangent, backward)

    def prepare(backend: str) -> Runner:
        return runner(lambda: inputs.compress(backend))

    def prepare_add() -> Runner:
        """Two products, and their sum in memory."""
        candidate, request, w_candidate, w_request = inputs.leaves
        return runner(lambda: w_candidate @ candidate + (w_request @ request).index_select(0, owners))

    def prepare_peer() -> Runner:
        peer = ikbo_peer.load_peer()
        candidate, request, w_candidate, w_request = inputs.leaves
        return Runner(lambda: peer(w_candidate, w_request, candidate, request, owners))

    def prepare_tlx() -> Runner:
        """Its flags are made outside the timing, and reset in it."""
        peer, flags_of = ikbo_peer.load_tlx_compression()
        candidate, request, w_candidate, w_request = inputs.leaves
        flags = flags_of(w_request, request)
        return Runner(lambda: peer(w_candidate, w_request, candidate, request, owners, flags))

    def prepare_sum() -> Runner:
        """Gradients of weights from one small product a candidate, which are then summed up."""
        candidate, request, w_candidate, w_request = (leaf.detach() for leaf in inputs.leaves)
        transposed = [aligned_rows(weight.mT) for weight in (w_candidate, w_request)]

        def step() -> tuple[Tensor, ...]:
            rows = segment_sum(inputs.cotangent, inputs.offsets)
            sides = zip((inputs.cotangent, rows), (candidate, request), transposed, strict=True)
            results = []
            for grad, x, weight in sides:
                results.append(torch.bmm(weight.expand(x.shape[0], -1, -1), grad))
                results.append(torch.bmm(grad, x.mT).sum(0))
            return results[0], results[2], results[1], results[3]

        return Runner(step, tuple)

    contenders = backends_of("linear_compression", prepare) | {"torch, @ and index": prepare_add}
    if backward:
        contenders["torch, bmm and sum"] = prepare_sum
    else:
        contenders["FBGEMM Triton"] = prepare_peer
        contenders["FBGEMM TLX"] = partial(where_it_runs, prepare_tlx)
    flops, size = _work(shape, inputs.candidate.itemsize)
    return Problem(
        contenders=contenders,
        check=check_relative_error(_expected(inputs, backward), LIMIT * (5 if backward else 1)),
        flops=flops * (2 if backward else 1),
        bytes=size * (2 if backward else 1),
    )


def _expected(inputs: _Inputs, backward: bool) -> tuple[Tensor, ...]:
    """Output or gradients from the reference, in float32."""
    leaves = [leaf.detach().float().requires_grad_(backward) for leaf in inputs.leaves]
    out = inputs.compress("reference", *leaves)
    return torch.autograd.grad(out, leaves, inputs.cotangent.float()) if backward else (out,)
