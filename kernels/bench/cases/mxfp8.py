"""Benchmark cases of the MXFP8 operators: `python -m kernels.bench mxfp8`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import mxfp8
from kernels.bench import Case, Problem, Runner, backends_of, check_equal, check_relative_error
from kernels.bench.cases import mxfp8_grouped

# Routed rows M, features K; and M, output features N, K, experts.
GPU_QUANTIZE, CPU_QUANTIZE = [(131072, 7168), (131072, 2048)], [(256, 512)]
GPU_GROUPED, CPU_GROUPED = [(131072, 2048, 7168, 8), (32768, 4096, 2048, 16)], [(256, 64, 96, 4)]

# bfloat16 operands are exact here, so only the rounding of the result remains; two MXFP8 operands of Gaussian data
# leave 3.8e-2 in the product.
BF16_LIMIT, MXFP8_LIMIT = 1e-2, 6e-2


def cases(device: torch.device) -> list[Case]:
    on_gpu = device.type == "cuda"
    quantize = GPU_QUANTIZE if on_gpu else CPU_QUANTIZE
    grouped = GPU_GROUPED if on_gpu else CPU_GROUPED
    return [
        *(
            Case(f"quantize_{name}_{rows}x{features}", partial(_quantize, axis, rows, features))
            for rows, features in quantize
            for name, axis in (("rows", 1), ("columns", 0))
        ),
        *(
            Case(f"grouped_mm_{recipe}_M{m}_N{n}_K{k}_E{experts}", partial(_grouped_mm, recipe, m, n, k, experts))
            for m, n, k, experts in grouped
            for recipe in ("bf16", "mxfp8")
        ),
        *mxfp8_grouped.cases(device),
    ]


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(len(shape))).bfloat16()


def _quantize(axis: int, rows: int, features: int, device: torch.device) -> Problem:
    x = _random(device, rows, features)

    def prepare(backend: str) -> Runner:
        return Runner(lambda: mxfp8.quantize(x, axis, backend=backend), lambda quantized: quantized[:2])

    codes, scales, _ = mxfp8.quantize(x, axis, backend="reference")
    return Problem(
        contenders=backends_of("mxfp8_quantize", prepare),
        check=check_equal((codes, scales)),
        flops=0,
        bytes=x.nbytes + codes.nbytes + scales.nbytes,
    )


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
