"""Benchmark cases of the operators on single tokens: half a million sequence tokens of width 128.

The peers are PyTorch's operators under autocast, as modules would call them without these kernels, and the same
compiled. A backward case times the backward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.bench import Case, Problem, Runner, check_relative_error, runner_of
from kernels.tokens import EPSILON, reference, rms_norm, rotate

# Tokens, heads and their features.
GPU_SHAPE, CPU_SHAPE = (2**19, 2, 64), (64, 2, 8)
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # relative errors: one rounding of the result

Operator = Callable[[Tensor], Tensor]


def cases(device: torch.device) -> list[Case]:
    problems = {"rms_norm": _norm, "rotate": _rotation}
    return [Case(f"{name}_{end}", partial(problems[name], end == "bwd")) for name in problems for end in ("fwd", "bwd")]


def _norm(backward: bool, device: torch.device) -> Problem:
    tokens, heads, width = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    x = _random(tokens, heads * width, device=device)
    moved = (3 if backward else 2) * x.numel() * x.itemsize
    return _problem(rms_norm, lambda x: reference.rms_norm(x, x.dtype, EPSILON), x, backward, moved)


def _rotation(backward: bool, device: torch.device) -> Problem:
    tokens, heads, width = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    query = _random(tokens, 3, heads, width, device=device)[:, 0]  # of a fused projection
    angles = torch.rand(tokens, width // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    moved = 2 * query.numel() * query.itemsize + 2 * angles.nbytes
    specification = partial(reference.rotate, cos=cos, sin=sin, positions=None)
    return _problem(partial(rotate, cos=cos, sin=sin), specification, query, backward, moved)


def _random(*shape: int, device: torch.device) -> Tensor:
    x = torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(0))
    return x.bfloat16() if device.type == "cuda" else x


def _problem(ours: Operator, specification: Operator, x: Tensor, backward: bool, moved: float) -> Problem:
    x.requires_grad_(backward)
    cotangent = torch.randn(x.shape, device=x.device).to(x.dtype)

    def runner(function: Operator) -> Runner:
        def call() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
                return function(x)

        return runner_of(call, [x], cotangent, backward)

    exact = x.detach().float().requires_grad_(backward)
    out = specification(exact)
    expected = torch.autograd.grad(out, exact, cotangent.float()) if backward else (out,)
    contenders: dict[str, Callable[[], Runner]] = {"PyTorch": partial(runner, specification)}
    if x.is_cuda:
        compiled = torch.compile(specification, dynamic=False)
        contenders = {"triton": partial(runner, ours), **contenders, "PyTorch, compiled": partial(runner, compiled)}
    return Problem(contenders, check_relative_error(expected, LIMITS[x.dtype]), flops=0.0, bytes=moved)
