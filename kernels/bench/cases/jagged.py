"""Benchmark cases of the jagged operators: `python -m kernels.bench jagged`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import jagged
from kernels.attention import jagged_attention
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases import jagged_operators, jagged_pooling, jagged_sweep

# Rows, maximum length, mean over maximum, head dimension: histories of one event type up to all of them merged.
GPU_SHAPES = [
    (1024, 512, 1.0, 128),
    (1024, 512, 0.5, 128),
    (1024, 512, 0.25, 128),
    (512, 1024, 1.0, 128),
    (512, 1024, 0.5, 128),
    (256, 2048, 1.0, 128),
    (256, 2048, 0.5, 128),
    (1024, 512, 0.5, 64),
    (512, 1024, 0.5, 64),
    (1024, 512, 0.5, 32),
    (512, 1024, 0.5, 32),
]
CPU_SHAPES = [(4, 32, 1.0, 32), (8, 32, 0.5, 32)]
HEADS = 4

# bfloat16 results carry about 2^-9 of rounding and so does the softmax that enters them; a wrong mask costs 0.1 and up.
LIMIT = 1e-2


def cases(device: torch.device) -> list[Case]:
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    attention = [
        Case(
            f"attention_{direction}_B{rows}_L{length}_mean{mean}_d{dim}",
            partial(_attention, direction, rows, length, mean, dim),
        )
        for rows, length, mean, dim in shapes
        for direction in ("fwd", "bwd")
    ]
    others = (jagged_pooling, jagged_sweep, jagged_operators)
    return attention + [case for part in others for case in part.cases(device)]


def lengths_of(rows: int, maximum: int, mean: float, device: torch.device) -> Tensor:
    """[rows] lengths: all `maximum` when mean is 1, else uniform in 1..2 * mean * maximum."""
    if mean == 1.0:
        return torch.full((rows,), maximum, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, int(2 * mean * maximum) + 1, (rows,), generator=generator).to(device)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, mask)


def _attention(direction: str, rows: int, maximum: int, mean: float, dim: int, device: torch.device) -> Problem:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = lengths_of(rows, maximum, mean, device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, cotangent = (
        torch.randn(total, HEADS, dim, device=device, generator=generator).to(dtype) for _ in range(4)
    )
    backward = direction == "bwd"
    inputs = [tensor.requires_grad_(backward) for tensor in (q, k, v)]

    def attend(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, offsets, max_q=maximum, max_k=maximum, backend=backend)

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: attend(backend, q, k, v), inputs, cotangent, backward)

    def prepare_padded(attend: Callable[..., Tensor] = scaled_dot_product_attention) -> Runner:
        """SDPA on padded tensors: the padding and the mask are made outside the timing."""

        def to_padded(values: Tensor) -> Tensor:
            return jagged.jagged_to_padded(values.detach(), offsets, maximum).transpose(1, 2).contiguous()

        def to_jagged(padded: Tensor) -> Tensor:
            return jagged.padded_to_jagged(padded.transpose(1, 2), offsets, total)

        padded = [to_padded(tensor).requires_grad_(backward) for tensor in (q, k, v)]
        mask = (torch.arange(maximum, device=device) < lengths[:, None])[:, None, None] if mean < 1.0 else None
        if not backward:
            return Runner(lambda: attend(*padded, mask), lambda out: (to_jagged(out),))
        out, padded_cotangent = attend(*padded, mask), to_padded(cotangent)
        return Runner(
            lambda: torch.autograd.grad(out, padded, padded_cotangent, retain_graph=True),
            lambda gradients: tuple(to_jagged(gradient) for gradient in gradients),
        )

    exact = [tensor.detach().float().requires_grad_(backward) for tensor in (q, k, v)]
    expected: tuple[Tensor, ...] = (attend("reference", *exact),)
    if backward:
        expected = torch.autograd.grad(expected[0], exact, cotangent.float())
    pairs = lengths.double().square().sum().item()
    tensors = 8 if backward else 4  # q, k, v, out, and backward their gradients
    backends = backends_of("jagged_attention", prepare)
    del backends["padded"]  # it pads inside the timing; here that is done before it
    del backends["decode"]  # for few queries: see bench_pooling
    contenders = backends | {"sdpa on padded": prepare_padded}
    if mean == 1.0 and device.type == "cuda":  # with a mask it is another kernel; `sweep_*` has it on ragged rows
        contenders["cudnn, nothing padded"] = partial(prepare_padded, _cudnn)
    return Problem(
        contenders=contenders,
        check=check_relative_error(expected, LIMIT),
        flops=4 * HEADS * dim * pairs * (2.5 if backward else 1.0),
        bytes=tensors * total * HEADS * dim * dtype.itemsize,
    )
