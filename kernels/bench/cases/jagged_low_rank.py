"""Benchmark cases of `jagged_low_rank`: the personalised feed-forward layer of InterFormer on long, uneven sequences.

The peer is the same in two steps, the product with each row's matrix and a linear layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.jagged import jagged_dense_bmm, jagged_low_rank

# Rows, their mean length, width of x and of the result, rank.
GPU_SHAPES = [(2180, 425, 128, 4), (1500, 349, 512, 4), (256, 512, 1024, 4)]
CPU_SHAPES = [(8, 10, 16, 4)]
LONGEST = 1000
LIMIT = 1.5e-2  # relative, of bfloat16 results of bfloat16 products


def cases(device: torch.device) -> list[Case]:
    return [
        Case(f"low_rank_{direction}_d{shape[2]}", partial(_problem, direction, *shape))
        for shape in (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
        for direction in ("fwd", "bwd")
    ]


def uneven_lengths(rows: int, mean: float) -> Tensor:
    """[rows] int64 of a log-normal distribution that is cut at LONGEST, whose mean is about `mean`."""
    factors = torch.randn(rows, generator=torch.Generator().manual_seed(0)).exp()
    low, high = 0.0, 100.0 * mean
    for _ in range(50):
        scale = (low + high) / 2
        lengths = (scale * factors).clamp(1, LONGEST).long()
        low, high = (scale, high) if lengths.double().mean() < mean else (low, scale)
    return lengths


def _problem(direction: str, rows: int, mean: float, width: int, rank: int, device: torch.device) -> Problem:
    dtype, backward = torch.bfloat16 if device.type == "cuda" else torch.float32, direction == "bwd"
    lengths = uneven_lengths(rows, mean)
    offsets, total = F.pad(lengths.cumsum(0), (1, 0)).to(device), int(lengths.sum())
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    inputs = [random(*shape).requires_grad_(backward) for shape in ((total, width), (rows, rank, width), (width, rank))]
    cotangent = random(total, width)

    def in_two_steps(x: Tensor, left: Tensor, weight: Tensor) -> Tensor:
        return F.linear(jagged_dense_bmm(x, offsets, left.mT, LONGEST), weight)

    def prepare(backend: str) -> Runner:
        ours = partial(jagged_low_rank, backend=backend)
        return runner_of(lambda: ours(inputs[0], offsets, *inputs[1:], LONGEST), inputs, cotangent, backward)

    exact = [tensor.detach().float().requires_grad_(backward) for tensor in inputs]
    expected: tuple[Tensor, ...] = (jagged_low_rank(exact[0], offsets, *exact[1:], LONGEST, backend="reference"),)
    if backward:
        expected = torch.autograd.grad(expected[0], exact, cotangent.float())
    return Problem(
        contenders=backends_of("jagged_low_rank", prepare)
        | {"two steps": lambda: runner_of(lambda: in_two_steps(*inputs), inputs, cotangent, backward)},
        check=check_relative_error(expected, LIMIT),
        flops=4 * rank * total * width * (2 if backward else 1),
        bytes=(3 if backward else 2) * total * width * dtype.itemsize,
    )
