"""Benchmark cases of the MXFP8 operators: `python -m kernels.bench mxfp8`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import mxfp8, tokens
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error
from kernels.bench.cases import mxfp8_grouped

# Routed rows M, output features N, features K, experts.
GPU_GROUPED, CPU_GROUPED = [(131072, 2048, 7168, 8), (32768, 4096, 2048, 16)], [(256, 64, 96, 4)]

# Rows M, features K, output features N.
GPU_LINEAR = [
    (65536, 2048, 4096),
    (131072, 1024, 3072),
    (131072, 1024, 2048),
    # Too small to be quantised by default, or of too few rows to gain.
    (131072, 1024, 1024),
    (131072, 512, 2048),
    (131072, 512, 1536),
    (1450, 1024, 1024),
]
CPU_LINEAR = [(64, 96, 32)]
# Rows M, features D before and behind two layers, F between them.
GPU_MLP, CPU_MLP = [(262144, 1024, 2048), (65536, 2048, 4096)], [(64, 32, 96)]

# bfloat16 operands are exact here, so only the rounding of the result remains; two MXFP8 operands of Gaussian data
# leave 3.8e-2 in the product.
BF16_LIMIT, MXFP8_LIMIT = 1e-2, 6e-2


def cases(device: torch.device) -> list[Case]:
    on_gpu = device.type == "cuda"
    grouped = GPU_GROUPED if on_gpu else CPU_GROUPED
    return [
        *(
            Case(f"grouped_mm_{recipe}_M{m}_N{n}_K{k}_E{experts}", partial(_grouped_mm, recipe, m, n, k, experts))
            for m, n, k, experts in grouped
            for recipe in ("bf16", "mxfp8")
        ),
        *(
            Case(f"linear_fwd_bwd_M{m}_K{k}_N{n}", partial(_linear, m, k, n))
            for m, k, n in (GPU_LINEAR if on_gpu else CPU_LINEAR)
        ),
        *(
            Case(f"silu_mlp_fwd_bwd_M{m}_D{d}_F{f}", partial(_silu_mlp, m, d, f))
            for m, d, f in (GPU_MLP if on_gpu else CPU_MLP)
        ),
        *mxfp8_grouped.cases(device),
    ]


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(len(shape))).bfloat16()


def _grouped_mm(recipe: str, m: int, n: int, k: int, experts: int, device: torch.device) -> Problem:
    x, weight = _random(device, m, k), _random(device, experts, n, k)
    # Uneven on purpose: the first expert gets nothing, the others growing shares.
    parts = torch.arange(experts, device=device)
    offsets = (parts.cumsum(0) * m // parts.sum()).int()

    def prepare(product: str, backend: str) -> Runner:
        return Runner(lambda: mxfp8.grouped_mm(x, weight, offsets, recipe=product, backend=backend))

    contenders = backends_of("grouped_mm", partial(prepare, "bf16"))
    if recipe == "mxfp8":
        bf16 = {f"bf16 {name}": contender for name, contender in contenders.items()}
        contenders = backends_of("mxfp8_grouped_mm", partial(prepare, "mxfp8")) | bf16
    expected = mxfp8.grouped_mm(x.float(), weight.float(), offsets, recipe="none", backend="reference")
    return Problem(
        contenders=contenders,
        check=check_relative_error((expected,), MXFP8_LIMIT if recipe == "mxfp8" else BF16_LIMIT),
        flops=2 * m * n * k,
        bytes=(m * k + experts * n * k + m * n) * 2,
    )


def _linear(m: int, k: int, n: int, device: torch.device) -> Problem:
    """Forward and backward of a layer with float32 weights under autocast, quantised in groups of 128 and in BF16."""
    x, dy = _random(device, m, k).requires_grad_(), _random(device, m, n)
    weight = _random(device, n, k, 1)[..., 0].float().requires_grad_()

    def step(recipe: str, backend: str | None) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16):
            y = mxfp8.linear(x, weight, recipe=recipe, backend=backend)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    def prepare(recipe: str, backend: str | None) -> Runner:
        return Runner(partial(step, recipe, backend), tuple)

    with torch.no_grad():
        wide = [tensor.float() for tensor in (x, weight, dy)]
        expected = wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]
    return Problem(
        contenders=backends_of("mxfp8_linear", partial(prepare, "mxfp8_g128"))
        | {"bf16": partial(prepare, "none", None)},
        check=check_relative_error(expected, MXFP8_LIMIT),
        flops=6 * m * n * k,
        bytes=(3 * m * k + 2 * m * n) * 2 + 8 * n * k,
    )


def _silu_mlp(m: int, d: int, f: int, device: torch.device) -> Problem:
    """Forward and backward of two layers times a factor, with float32 weights under autocast: in groups of 128 as one
    operator or one after the other (`reference`), and in BF16."""
    random = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    x, factor, dy = (random(m, d).bfloat16() for _ in range(3))
    weights = [random(f, d) / d**0.5, random(f), random(d, f) / f**0.5, random(d)]
    leaves = [leaf.requires_grad_() for leaf in (x, *weights, factor)]

    def bf16() -> Tensor:
        return tokens.activate(tokens.silu_mlp(x, *weights[:3]), weights[3], factor=factor)

    def step(function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16):
            y = function()
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    def prepare(backend: str) -> Runner:
        function = partial(mxfp8.silu_mlp, x, *weights, factor, recipe="mxfp8_g128", backend=backend)
        return Runner(partial(step, function), tuple)

    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    exact = tokens.activate(tokens.silu_mlp(*wide[:4]), wide[4], factor=wide[5])
    expected = exact.detach(), *torch.autograd.grad(exact, wide, dy.float())
    return Problem(
        contenders=backends_of("mxfp8_silu_mlp", prepare) | {"bf16": lambda: Runner(partial(step, bf16), tuple)},
        # Errors of up to three products.
        check=check_relative_error(expected, 2 * MXFP8_LIMIT),
        flops=12 * m * d * f,
        # In BF16: x, factor, dy, result, gradients of x and of factor; between the layers, twice each way and again.
        bytes=6 * m * d * 2 + 6 * m * f * 2,
    )
