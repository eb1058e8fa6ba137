"""Benchmark cases of the grouped products, at the shapes of the expert layers that `kernels.bench.cases.moe` times.

Operands are quantised beforehand, with scales in the form in which the fused experts' quantiser writes them, and rows
are padded to groups of multiples of 128, for every contender. MXFP8 results are compared with the product of the
bfloat16 operands that were quantised. The peer in FP8 is PyTorch's product with one scale a row, which is coarser.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import mxfp8
from kernels.bench import Case, Problem, Runner, check_relative_error
from kernels.bench.cases import cute_peers
from kernels.core import dispatch
from kernels.mxfp8.grouped import Operand, Quantized, form_of, swaps
from kernels.mxfp8.plain import grouped_mm, grouped_wgrad

# Routed rows, model width D, hidden width F, experts.
GPU_LAYERS = [
    (65536, 1024, 2048, 32),
    (131072, 7168, 2048, 8),
    (131072, 512, 1024, 16),
    # Fine-grained experts: 8,192 tokens with 8 of 64, and of 128, and 16,384 with 8 of 256.
    (65536, 1024, 512, 64),
    (65536, 1024, 256, 128),
    (131072, 1024, 256, 256),
]
CPU_LAYERS = [(256, 64, 32, 4)]
RECIPES = {"bf16": 0, **mxfp8.QUANTIZED}
# One rounding of bfloat16; and 27 dB, where two operands of four significant bits have 28.5.
BF16_LIMIT, MXFP8_LIMIT = 1e-2, 10 ** (-27 / 20)


def cases(device: torch.device) -> list[Case]:
    layers = GPU_LAYERS if device.type == "cuda" else CPU_LAYERS
    found = []
    for rows, width, hidden, experts in layers:
        # Output features, features that are summed over. Gate and up are one matrix.
        products = {
            "up": (_product, 2 * hidden, width, False),
            "down": (_product, width, hidden, False),
            "dgrad_up": (_product, width, 2 * hidden, True),
            "dgrad_down": (_product, hidden, width, True),
            "wgrad_up": (_weight_gradient, 2 * hidden, width),
            "wgrad_down": (_weight_gradient, width, hidden),
        }
        for name, (make, *sizes) in products.items():
            shape = f"T{rows}_D{width}_F{hidden}_E{experts}"
            found += [
                Case(f"grouped_{recipe}_{name}_{shape}", partial(make, recipe, rows, experts, *sizes))
                for recipe in RECIPES
            ]
    return found


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(sum(shape))).bfloat16()


def _ends(rows: int, experts: int, device: torch.device) -> Tensor:
    """Groups of multiples of 128 rows that differ by up to 40 % from their mean."""
    weights = 1 + 0.2 * torch.randn(experts, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    ends = (weights.cumsum(0) / weights.sum() * rows / 128).round().int() * 128
    ends[-1] = rows
    return ends.to(device)


def _edges(ends: Tensor) -> Tensor:
    """[E + 1] int32: where each group begins and the last one ends."""
    return torch.nn.functional.pad(ends, (1, 0))


def _quack(recipe: str, prepare: Callable[[], Runner]) -> dict[str, Callable[[], Runner]]:
    """The contender, beside our products in bfloat16 only."""
    return {"quack bf16": partial(cute_peers.where_it_runs, prepare)} if recipe == "bf16" else {}


def _by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 codes of x [..., rows, K], float32 scales [..., rows])."""
    scales = x.abs().amax(-1).float() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scales[..., None]).to(torch.float8_e4m3fn).contiguous(), scales


def _operand(x: Tensor, recipe: str, *, second: bool = False) -> Operand:
    """x as the recipe multiplies it, blocks along its last axis."""
    group = RECIPES[recipe]
    if not group:
        return x
    square = second and group == 128
    if x.device.type != "cuda" or _block_scaled(x.device):
        codes, scales, _ = mxfp8.quantize(x, -1, block_size=group, square=square)
        return Quantized(codes.contiguous(), scales.contiguous(), group)
    from kernels.mxfp8.hopper.quantize import operators as quantize
    from kernels.mxfp8.hopper.quantize import weights

    if square and x.dim() == 3:
        return weights.operand(x, False, group)
    codes, scales, *_ = quantize.quantize_both(x, True, False, group, square, form_of(group, second))
    return Quantized(codes, scales, group)


def _block_scaled(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (10, 0)


def _backend(op: str, like: Operand, recipe: str, device: torch.device, n: int, k: int, **facts: int):
    """Our kernel, or the reference where there are none."""
    on_gpu = "hopper_strict" if recipe == "mxfp8" else "hopper"
    name = on_gpu if device.type == "cuda" else "reference"
    if recipe == "bf16":
        return dispatch.choose(op, name, like, in_features=k, out_features=n, **facts)
    name = "torch" if _block_scaled(device) else name
    op = {"grouped_mm": "mxfp8_grouped_fprop", "grouped_wgrad": "mxfp8_grouped_wgrad"}[op]
    return dispatch.choose(op, name, like.codes, group=RECIPES[recipe], in_features=k, out_features=n)


def _product(recipe: str, rows: int, experts: int, n: int, k: int, transposed: bool, device: torch.device) -> Problem:
    ends = _ends(rows, experts, device)
    a = _random(device, rows, k)
    weight = _random(device, experts, k, n).mT if transposed else _random(device, experts, n, k)
    matrices = weight if recipe == "bf16" else weight.contiguous()

    def ours() -> Runner:
        a_operand, b_operand = _operand(a, recipe), _operand(matrices, recipe, second=True)
        function = _backend("grouped_mm", a_operand, recipe, device, n, k)
        return Runner(lambda: function(a_operand, b_operand, ends))

    def peer() -> Runner:
        if device.type != "cuda":
            raise dispatch.UnsupportedError("is a loop on the CPU")
        return Runner(lambda: torch._grouped_mm(a, weight.mT, offs=ends))

    def quack() -> Runner:
        function, edges = cute_peers.quack_gemm(), _edges(ends)
        return Runner(lambda: function(a, weight.mT, cu_seqlens_m=edges))

    def fp8_peer() -> Runner:
        if device.type != "cuda":
            raise dispatch.UnsupportedError("is not there on the CPU")
        (codes, scales), (weight_codes, weight_scales) = _by_rows(a), _by_rows(matrices)
        return Runner(
            lambda: torch._scaled_grouped_mm(
                codes, weight_codes.mT, scales, weight_scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )

    expected = grouped_mm(a.float(), weight.float(), ends)
    contenders = {f"grouped_mm {recipe}": ours, "torch._grouped_mm bf16": peer} | _quack(recipe, quack)
    if recipe != "bf16":
        contenders["torch._scaled_grouped_mm fp8"] = partial(cute_peers.where_it_runs, fp8_peer)
    return Problem(
        contenders=contenders,
        check=check_relative_error((expected,), MXFP8_LIMIT if RECIPES[recipe] else BF16_LIMIT),
        flops=2 * rows * n * k,
        bytes=(rows * k + experts * n * k) * (1 if RECIPES[recipe] else 2) + 2 * rows * n,
    )


def _weight_gradient(recipe: str, rows: int, experts: int, n: int, k: int, device: torch.device) -> Problem:
    ends = _ends(rows, experts, device)
    dy, x = _random(device, rows, n), _random(device, rows, k)

    def ours() -> Runner:
        if recipe == "bf16":
            function = _backend("grouped_wgrad", x, recipe, device, n, k, multiple=128)
            return Runner(lambda: function(dy, x, ends))
        x_first = swaps(RECIPES[recipe], n, k)
        dy_operand = _operand(dy.t().contiguous(), recipe, second=x_first)
        x_operand = _operand(x.t().contiguous(), recipe, second=not x_first)
        function = _backend("grouped_wgrad", dy_operand, recipe, device, n, k)
        return Runner(lambda: function(dy_operand, x_operand, ends, torch.bfloat16))

    def peer() -> Runner:
        if device.type != "cuda":
            raise dispatch.UnsupportedError("is a loop on the CPU")
        return Runner(lambda: torch._grouped_mm(dy.t(), x, offs=ends))

    def quack() -> Runner:
        function, edges = cute_peers.quack_gemm(), _edges(ends)
        return Runner(lambda: function(dy.t(), x, cu_seqlens_k=edges))

    expected = grouped_wgrad(dy.float(), x.float(), ends)
    return Problem(
        contenders={f"grouped_wgrad {recipe}": ours, "torch._grouped_mm bf16": peer} | _quack(recipe, quack),
        check=check_relative_error((expected,), MXFP8_LIMIT if RECIPES[recipe] else BF16_LIMIT),
        flops=2 * rows * n * k,
        bytes=rows * (n + k) * (1 if RECIPES[recipe] else 2) + 2 * experts * n * k,
    )
