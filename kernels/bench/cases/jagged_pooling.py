"""Benchmark cases of attention with a few queries a row, as in pooling, over rows of unequal numbers of keys.

`absorbed` has the projections as well: of the rows to keys and values or, absorbed, of the queries and of what they
have pooled. Both are the same function of the same tensors.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.attention import attention_pool, jagged_attention
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.tokens import unbind

# Rows, queries of each, longest row of keys, heads, their features.
GPU_SHAPES = [(2048, 2, 800, 2, 64), (2048, 8, 800, 4, 128)]
CPU_SHAPES = [(8, 2, 20, 2, 16)]
# Rows, mean of log(length), heads, features; queries are 2. InterFormer of widths 128, 512 and 1024.
ABSORBED = {"cuda": [(2180, 5.8, 2, 128), (1500, 5.5, 4, 512), (256, 6.1, 8, 1024)], "cpu": [(8, 3.0, 2, 16)]}
LONGEST = 1000
LIMIT = 1e-2  # relative, of bfloat16 results


def cases(device: torch.device) -> list[Case]:
    attention = [
        Case(f"pooling_{direction}_S{shape[1]}_d{shape[4]}", partial(_problem, direction, *shape))
        for shape in (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
        for direction in ("fwd", "bwd")
    ]
    layers = [
        Case(f"absorbed_{direction}_d{shape[3]}", partial(_layer, direction, *shape))
        for shape in ABSORBED[device.type]
        for direction in ("fwd", "bwd")
    ]
    return attention + layers


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


def _layer(direction: str, rows: int, mean: float, heads: int, dim: int, device: torch.device) -> Problem:
    dtype, backward, queries = torch.bfloat16 if device.type == "cuda" else torch.float32, direction == "bwd", 2
    logarithms = torch.randn(rows, generator=torch.Generator().manual_seed(0)) * 0.9 + mean
    lengths = logarithms.exp().clamp(1, LONGEST).long()
    k_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    q_offsets, total = torch.arange(rows + 1, device=device) * queries, int(lengths.sum())
    limits = {"max_q": queries, "max_k": LONGEST, "scale": (dim // heads) ** -0.5}
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)

    tensors = random(rows * queries, heads, dim // heads), random(total, dim), random(2 * dim, dim, scale=dim**-0.5)
    inputs = [tensor.requires_grad_(backward) for tensor in tensors]
    cotangent = random(rows * queries, heads, dim // heads)

    def projected(q: Tensor, values: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
        key, value = unbind(torch.nn.functional.linear(values, weight).view(total, 2, heads, dim // heads))
        return jagged_attention(q, key, value, q_offsets, k_offsets, **limits, backend=backend)

    def absorbed(q: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        of_keys, of_values = weight.view(2, heads, dim // heads, dim).unbind()
        pooled = attention_pool((q.transpose(0, 1) @ of_keys).transpose(0, 1), values, q_offsets, k_offsets, **limits)
        return (pooled.transpose(0, 1) @ of_values.mT).transpose(0, 1)

    exact = [tensor.detach().float().requires_grad_(backward) for tensor in inputs]
    expected: tuple[Tensor, ...] = (projected(*exact, backend="reference"),)
    if backward:
        expected = torch.autograd.grad(expected[0], exact, cotangent.float())
    return Problem(
        contenders={
            "absorbed": lambda: runner_of(lambda: absorbed(*inputs), inputs, cotangent, backward),
            "projected": lambda: runner_of(lambda: projected(*inputs), inputs, cotangent, backward),
        },
        check=check_relative_error(expected, LIMIT),
        flops=4 * dim * queries * (heads * total + dim * rows) * (2.5 if backward else 1.0),
        bytes=(2 if backward else 1) * total * dim * dtype.itemsize,
    )
