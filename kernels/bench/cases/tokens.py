"""Benchmark cases of the operators on single tokens: half a million tokens of width 128, or of three such fields.

The peers are PyTorch's operators under autocast, as modules would call them without these kernels, and the same
compiled. A backward case times the backward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.bench import Case, Problem, Runner, check_relative_error, runner_of
from kernels.tokens import EPSILON, project_qkv, reference, rms_norm, rotate, silu_mlp

# Tokens, heads and their features.
GPU_SHAPE, CPU_SHAPE = (2**19, 2, 64), (64, 2, 8)
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # relative errors: one rounding of the result

Operator = Callable[[Tensor], Tensor]


def cases(device: torch.device) -> list[Case]:
    problems = {"rms_norm": _norm, "rotate": _rotation, "silu_mlp": _two_layers, "project_qkv": _rotated_projection}
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


def _two_layers(backward: bool, device: torch.device) -> Problem:
    """MaskNet's of three fields: 384 values, 768 between the layers. Gradients are those of all operands."""
    tokens, width = (2**19, 384) if device.type == "cuda" else (64, 24)
    shapes = (tokens, width), (2 * width, width), (2 * width,), (width, 2 * width)
    operands = [_random(*shape, device=device) / (shape[-1] ** 0.5 if at else 1) for at, shape in enumerate(shapes)]
    for operand in operands:
        operand.requires_grad_(backward)
    cotangent = torch.randn(tokens, width, device=device).to(operands[0].dtype)
    specification = partial(reference.silu_mlp, outer_bias=None)

    def plain(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, inner, bias)), outer)

    def runner(function: Callable[..., Tensor]) -> Runner:
        return runner_of(lambda: function(*operands), operands, cotangent, backward)

    exact = [operand.detach().float().requires_grad_(backward) for operand in operands]
    out = specification(*exact)
    expected = torch.autograd.grad(out, exact, cotangent.float()) if backward else (out,)
    contenders: dict[str, Callable[[], Runner]] = {"PyTorch": partial(runner, plain)}
    if device.type == "cuda":
        ours = {name: partial(runner, partial(silu_mlp, backend=name)) for name in ("hopper", "triton")}
        contenders = ours | contenders | {"PyTorch, compiled": partial(runner, torch.compile(plain, dynamic=False))}
    products = 2.0 * tokens * 2 * (2 * width * width)
    # Read and written: x, both tensors between the layers, of which the second is read again, and the result; in the
    # backward these, their gradients and the result's.
    moved = tokens * width * (8 if not backward else 14) * operands[0].itemsize
    # Gradients of weights are sums over half a million products of rounded operands.
    check = check_relative_error(expected, 2e-2 if operands[0].dtype is torch.bfloat16 else 1e-4)
    return Problem(contenders, check, flops=products * (2 if backward else 1), bytes=moved)


def _rotated_projection(backward: bool, device: torch.device) -> Problem:
    """To two heads of 64, rotated by a table of 1,000 positions. Gradients are those of x and the weight."""
    tokens, heads, width = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    dim = heads * width
    x, weight = _random(tokens, dim, device=device), _random(3 * dim, dim, device=device) / dim**0.5
    angles = torch.rand(1000, width // 2, device=device) * 6
    positions = torch.randint(0, 1000, (tokens,), device=device)
    operands = [x.requires_grad_(backward), weight.requires_grad_(backward)]
    cotangent = torch.randn(tokens, 3 * dim, device=device).to(x.dtype)
    settings: dict[str, Any] = {"positions": positions, "heads": heads, "twice": False}

    def runner(function: Callable[..., tuple[Tensor, ...]]) -> Runner:
        turned = partial(function, cos=angles.cos(), sin=angles.sin(), **settings)
        if not backward:
            return Runner(lambda: turned(*operands), tuple)
        out = turned(*operands)
        gradients = cotangent.view(tokens, 3, heads, width).unbind(1)
        return Runner(lambda: torch.autograd.grad(out, operands, gradients, retain_graph=True), tuple)

    exact = [operand.detach().float().requires_grad_(backward) for operand in operands]
    expected = reference.project_qkv(*exact, angles.cos(), angles.sin(), **settings)
    if backward:
        gradients = cotangent.float().view(tokens, 3, heads, width).unbind(1)
        expected = torch.autograd.grad(expected, exact, gradients)
    contenders: dict[str, Callable[[], Runner]] = {"PyTorch": partial(runner, reference.project_qkv)}
    if device.type == "cuda":
        names = ("hopper", "triton")
        contenders = {name: partial(runner, partial(project_qkv, backend=name)) for name in names} | contenders
    # x and the three parts, once each; in the backward x, its gradient and those of the parts.
    moved = tokens * dim * (4 if not backward else 5) * x.itemsize
    check = check_relative_error(expected, 2e-2 if x.dtype is torch.bfloat16 else 1e-4)
    return Problem(contenders, check, flops=2.0 * tokens * 3 * dim**2 * (2 if backward else 1), bytes=moved)


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
