"""Benchmark cases of the routed experts: `python -m kernels.bench moe`.

A layer is a router and its experts. Ours is compared with the same layer in BF16 made of PyTorch's parts, compiled:
sort, `torch._grouped_mm`, SwiGLU, `index_add_`. Both score with the same compiled router, except for the choice of the
largest scores, which is part of ours. The choice follows a random bias that outweighs the scores, so that contenders
with other roundings choose alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels import moe, mxfp8
from kernels.bench import Case, Problem, Runner, backends_of, check_equal, check_relative_error
from kernels.core import dispatch
from kernels.mxfp8.grouped import BYTES, MATRIX, TILES, WORDS, Quantized, matrix_scales

# Tokens, width, hidden width, experts, experts of a token.
GPU_LAYERS = [(32768, 1024, 2048, 32, 2), (16384, 7168, 2048, 8, 8), (65536, 512, 1024, 16, 2)]
CPU_LAYERS = [(64, 32, 128, 4, 2)]
# Tokens, each of which has two experts, width, hidden width, experts.
GPU_HIDDEN = [(530000, 512, 2048, 8), (132000, 1024, 4096, 8), (32768, 1024, 2048, 32)]
GPU_QUANTIZE, CPU_QUANTIZE = [(131072, 7168), (131072, 2048)], [(256, 512)]

PHASES = ("fwd", "fwd_bwd")

# Three quantised products in a row leave 22 dB. One limit for all; the tests have a closer one for bfloat16.
LIMIT = 8e-2

Layer = Callable[..., Tensor]


def cases(device: torch.device) -> list[Case]:
    on_gpu = device.type == "cuda"
    layers = GPU_LAYERS if on_gpu else CPU_LAYERS
    quantize = GPU_QUANTIZE if on_gpu else CPU_QUANTIZE
    return [
        *(
            Case(f"quantize_both_{recipe}_{rows}x{features}", partial(_quantize, group, rows, features))
            for rows, features in quantize
            for recipe, group in mxfp8.QUANTIZED.items()
        ),
        *(
            Case(f"hidden_{recipe}_N{n}_D{d}_F{f}_E{e}", partial(_hidden, group, n, d, f, e))
            for n, d, f, e in (GPU_HIDDEN if on_gpu else [])  # between kernels that a CPU does not have
            for recipe, group in (("bf16", 0), ("mxfp8_g128", 128))
        ),
        *(
            Case(f"layer_{phase}_N{n}_D{d}_F{f}_E{e}_k{k}", partial(_layer, phase, n, d, f, e, k))
            for n, d, f, e, k in layers
            for phase in PHASES
        ),
    ]


def _random(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def _quantize(group: int, rows: int, features: int, device: torch.device) -> Problem:
    x = _random(device, rows, features).bfloat16()

    def one_pass(form: int) -> Runner:
        """Quantise with scales as Hopper's products read them, as matrices, or in the tiles of tcgen05 instructions."""
        dispatch.choose("mxfp8_quantize", "hopper", x, axis=-1)  # otherwise the reason
        from kernels.mxfp8.hopper.quantize.operators import quantize_both

        def matrix(codes: Tensor, scales: Tensor) -> Tensor:
            if form == TILES:
                return mxfp8.unswizzle_scales(scales, len(codes), codes.shape[1] // 32)
            return matrix_scales(Quantized(codes, scales, group))

        def outputs(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            along, across = results[:2], results[2:]
            return along[0], matrix(*along), across[0], matrix(*across)

        return Runner(lambda: quantize_both(x, True, True, group, False, form), outputs)

    def two_passes() -> Runner:
        def step() -> tuple[Tensor, ...]:
            along, across = (mxfp8.quantize(x, axis, block_size=group, backend="reference") for axis in (1, 0))
            return along.codes, along.scales, across.codes.t().contiguous(), across.scales.t().contiguous()

        return Runner(step, lambda outputs: outputs)

    expected = two_passes().step()
    return Problem(
        contenders={
            "hopper": partial(one_pass, WORDS if group == 32 else BYTES),
            "hopper, scales in tiles": partial(one_pass, TILES),
            "hopper, matrices of scales": partial(one_pass, MATRIX),
            "reference": two_passes,
        },
        check=check_equal(expected),
        flops=0,
        bytes=x.nbytes + sum(tensor.nbytes for tensor in expected),
    )


def _hidden(group: int, n: int, d: int, f: int, e: int, device: torch.device) -> Problem:
    """The first product and SwiGLU, quantised if `group`, with what the backward needs: in one kernel or in passes."""
    from kernels.moe.hopper.gather import gather
    from kernels.moe.triton.route import permutation
    from kernels.mxfp8.hopper.quantize import weights

    places = permutation(_random(device, n, e).topk(2).indices, e)
    gate_up = (_random(device, e, 2 * f, d, seed=1) / d**0.5).bfloat16()
    rows, scales, *_ = gather(_random(device, n, d, seed=2).bfloat16(), places, group, None)
    operands = (Quantized(rows, scales, group), weights.operand(gate_up, False, group)) if group else (rows, gate_up)
    end = int(places.ends[-1])

    def outputs(hidden: tuple[Tensor | Quantized, Tensor, Tensor]) -> tuple[Tensor, ...]:
        result, kept, kept_scales = hidden
        codes = result.codes if isinstance(result, Quantized) else result
        tensors = codes[:end], kept[:end], kept_scales[:, :end]
        return tuple(tensor.float() for tensor in tensors if tensor.numel())  # bfloat16 has no scales

    def prepare(backend: str) -> Runner:
        facts = {"group": group, "in_features": d, "out_features": f}
        function = dispatch.choose("moe_hidden", backend, rows, **facts)
        return Runner(lambda: function(*operands, places.ends, True), outputs)

    reference = prepare("reference")
    return Problem(
        contenders=backends_of("moe_hidden", prepare),
        # The same bits but for the exponential and the quotient in bfloat16.
        check=check_relative_error(reference.outputs(reference.step()), 2**-8),
        flops=4 * end * d * f,
        bytes=end * (d + 3 * f) * (1 if group else 2),
    )


def _torch_top_k(scores: Tensor, k: int) -> Tensor:
    return scores.topk(k).indices


def route(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, choose: Callable[[Tensor, int], Tensor] = _torch_top_k
) -> tuple[Tensor, Tensor]:
    """(selected_experts [N, k], weights [N, k] float32): softmax scores, by score + bias [N, E], normalised."""
    scores = functional.linear(x, gate).float().softmax(-1)
    selected_experts = choose(scores.detach() + bias, top_k)
    weights = scores.gather(1, selected_experts)
    return selected_experts, weights / weights.sum(-1, keepdim=True)


def torch_layer(x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, *, bias: Tensor, top_k: int) -> Tensor:
    """The layer in bfloat16, made of PyTorch's parts."""
    selected_experts, weights = route(x, gate, bias, top_k)
    flat = selected_experts.flatten()
    order = flat.argsort(stable=True)
    ends = flat.new_zeros(len(gate_up)).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
    token = order // top_k
    halves = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(functional.silu(halves[0]) * halves[1], down.transpose(1, 2), offs=ends)
    weighted = rows * weights.flatten()[order, None].to(rows.dtype)
    return torch.zeros_like(x).index_add_(0, token, weighted)


def exact_layer(x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, *, bias: Tensor, top_k: int) -> Tensor:
    """The layer one expert at a time, in the operands' dtype."""
    selected_experts, weights = route(x, gate, bias, top_k)
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        token, slot = (selected_experts == expert).nonzero(as_tuple=True)
        halves = (x[token] @ first.t()).chunk(2, 1)
        rows = (functional.silu(halves[0]) * halves[1]) @ second.t()
        out = out.index_add(0, token, rows * weights[token, slot, None])
    return out


@functools.cache
def _compiled(function: Layer) -> Layer:
    """Compiled once for all cases of a shape, and for that shape only."""
    return torch.compile(function, dynamic=False)


def _layer(phase: str, n: int, d: int, f: int, e: int, top_k: int, device: torch.device) -> Problem:
    leaves = {
        "x": _random(device, n, d),
        "gate": _random(device, e, d, seed=1) / d**0.5,
        "gate_up": _random(device, e, 2 * f, d, seed=2) / d**0.5,
        "down": _random(device, e, d, f, seed=3) / f**0.5,
    }
    leaves = {name: value.bfloat16() for name, value in leaves.items()}
    bias = 2 * torch.rand(n, e, device=device, generator=torch.Generator(device).manual_seed(4)).argsort(1).float()
    upstream = _random(device, n, d, seed=5).bfloat16()
    on_gpu = device.type == "cuda"

    def ours(recipe: str, x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        selected_experts, weights = (_compiled(route) if on_gpu else route)(x, gate, bias, top_k, moe.top_k)
        backend = "hopper" if on_gpu else None
        return moe.experts(x, selected_experts, weights, gate_up, down, recipe=recipe, backend=backend)

    def runner(layer: Layer, dtype: torch.dtype | None = None) -> Runner:
        own = {
            name: value.to(dtype or value.dtype).requires_grad_(phase == "fwd_bwd") for name, value in leaves.items()
        }

        def step() -> tuple[Tensor, ...]:
            y = layer(**own)
            if phase == "fwd":
                return (y,)
            return y.detach(), *torch.autograd.grad(y, list(own.values()), upstream.to(y.dtype))

        return Runner(step, lambda outputs: outputs)

    def fused(recipe: str) -> Runner:
        return runner(partial(ours, recipe))

    def compiled_torch() -> Runner:
        if not on_gpu:
            raise dispatch.UnsupportedError("torch._grouped_mm is a loop on the CPU")
        return runner(partial(_compiled(torch_layer), bias=bias, top_k=top_k))

    def judged(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Without the gate's gradient: with weights that sum to 1 it is a remainder in which errors do not cancel."""
        return tuple(tensor for index, tensor in enumerate(outputs) if index != 2)

    expected = judged(runner(partial(exact_layer, bias=bias, top_k=top_k), torch.float32).step())
    products = 3 if phase == "fwd_bwd" else 1
    return Problem(
        contenders={
            **{recipe: partial(fused, recipe) for recipe in ("mxfp8_g128", "mxfp8", "bf16")},
            "torch bf16": compiled_torch,
        },
        check=lambda outputs: check_relative_error(expected, LIMIT)(judged(outputs)),
        flops=products * 2 * n * top_k * 3 * d * f,
        bytes=products * 2 * (2 * n * d + 3 * e * d * f),
    )
