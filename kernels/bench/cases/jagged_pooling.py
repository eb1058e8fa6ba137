"""Benchmark cases of attention with a few queries a row, as in pooling, over rows of unequal numbers of keys."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of

# Rows, queries of each, longest row of keys, heads, their features.
GPU_SHAPES = [(2048, 2, 800, 2, 64), (2048, 8, 800, 4, 128)]
CPU_SHAPES = [(8, 2, 20, 2, 16)]
LIMIT = 1e-2  # relative, of bfloat16 results


def cases(device: torch.device) -> list[Case]:
    return [
        Case(f"pooling_{direction}_S{shape[1]}_d{shape[4]}", partial(_problem, direction, *shape))
        for shape in (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
        for direction in ("fwd", "bwd")
    ]


def _problem(
    direction: str, rows: int, queries: int, longest: int, heads: int, dim: int, device: torch.device
) -> Problem:
    dtype, backward = torch.bfloat16 if device.type == "cuda" else torch.float32, direction == "bwd"
    lengths = torch.randint(1, longest + 1, (rows,), generator=torch.Generator().manual_seed(0))
    k_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    q_offsets, total = torch.arange(rows + 1, device=device) * queries, int(lengths.sum())
    generator = torch.Generator(device).manual_seed(0)

    def random(tokens: int) -> Tensor:
        return torch.randn(tokens, heads, dim, device=device, generator=generator).to(dtype)

    inputs = [random(tokens).requires_grad_(backward) for tokens in (rows * queries, total, total)]
    cotangent = random(rows * queries)

    def attend(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, q_offsets, k_offsets, max_q=queries, max_k=longest, backend=backend)

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: attend(backend, *inputs), inputs, cotangent, backward)

    exact = [tensor.detach().float().requires_grad_(backward) for tensor in inputs]
    expected: tuple[Tensor, ...] = (attend("reference", *exact),)
    if backward:
        expected = torch.autograd.grad(expected[0], exact, cotangent.float())
    backends = backends_of("jagged_attention", prepare)
    del backends["padded"]  # pads the queries to as many as a row has keys
    return Problem(
        contenders=backends,
        check=check_relative_error(expected, LIMIT),
        flops=4 * heads * dim * queries * total * (2.5 if backward else 1.0),
        bytes=(4 if backward else 2) * total * heads * dim * dtype.itemsize,
    )
