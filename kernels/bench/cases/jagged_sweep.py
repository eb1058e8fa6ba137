"""Attention over the maximum length: latency and memory of dense, padded flash and jagged attention (paper, Figure 2).

The sparsity is the jagged flash attention paper's: lengths uniform in 1..L, half of a padded tensor. The padded peers
get their inputs padded before the timing starts. So that flash kernels without a mask give the right answer, the last
feature of every query is a constant and that of every key 0, or hugely negative in padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import jagged
from kernels.attention import jagged_attention
from kernels.bench import Case, Problem, Runner, check_relative_error

# Rows, heads, features, lengths. A dense attention keeps matrices of rows * heads * L^2.
GPU_SHAPE, GPU_LENGTHS = (128, 4, 128), (256, 512, 1024, 2048, 4096)
CPU_SHAPE, CPU_LENGTHS = (4, 2, 16), (16,)
PEERS = {
    "padded flash (FlashAttention 2)": SDPBackend.FLASH_ATTENTION,
    "padded flash (cuDNN)": SDPBackend.CUDNN_ATTENTION,
}
LIMIT = 1e-2  # of relative error: bfloat16 results and probabilities


def cases(device: torch.device) -> list[Case]:
    shape, lengths = (GPU_SHAPE, GPU_LENGTHS) if device.type == "cuda" else (CPU_SHAPE, CPU_LENGTHS)
    return [
        Case(f"sweep_{direction}_L{length}", partial(_sweep, direction, length, shape))
        for direction in ("fwd", "train")
        for length in lengths
    ]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, L, d] each, through the matrix of all scores."""
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).softmax(-1) @ v


def _flash(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def _sweep(direction: str, maximum: int, shape: tuple[int, int, int], device: torch.device) -> Problem:
    rows, heads, dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = torch.randint(1, maximum + 1, (rows,), generator=torch.Generator().manual_seed(0))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    total = int(lengths.sum())
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, cotangent = (
        torch.randn(total, heads, dim, device=device, generator=generator).to(dtype) for _ in range(4)
    )
    q[..., -1], k[..., -1] = 8.0, 0.0
    training = direction == "train"

    def runner(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, to_jagged: Callable) -> Runner:
        inputs = [tensor.detach().requires_grad_(training) for tensor in inputs]
        if not training:
            return Runner(lambda: attend(*inputs), lambda out: (to_jagged(out),), inputs)
        return Runner(
            lambda: torch.autograd.grad(attend(*inputs), inputs, grad),
            lambda gradients: tuple(to_jagged(gradient) for gradient in gradients),
            [*inputs, grad],
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, offsets, max_q=maximum, max_k=maximum)

    def padded(function: Callable[..., Tensor]) -> Runner:
        inputs = [
            jagged.jagged_to_padded(x, offsets, maximum).transpose(1, 2).contiguous() for x in (q, k, v, cotangent)
        ]
        behind = torch.arange(maximum, device=device) >= offsets.diff()[:, None]
        inputs[1][..., -1].masked_fill_(behind[:, None], -1e4)
        return runner(
            function, inputs[:3], inputs[3], lambda out: jagged.padded_to_jagged(out.transpose(1, 2), offsets, total)
        )

    exact = [tensor.float().requires_grad_(training) for tensor in (q, k, v)]
    out = jagged_attention(*exact, offsets, offsets, max_q=maximum, max_k=maximum, backend="reference")
    expected = torch.autograd.grad(out, exact, cotangent.float()) if training else (out,)
    peers = PEERS if device.type == "cuda" else {}
    return Problem(
        contenders={
            "jagged": lambda: runner(attend, [q, k, v], cotangent, lambda out: out),
            **{name: lambda backend=backend: padded(partial(_flash, backend)) for name, backend in peers.items()},
            "dense": lambda: padded(_dense),
        },
        check=check_relative_error(expected, LIMIT),
        flops=4 * heads * dim * lengths.double().square().sum().item() * (3.5 if training else 1.0),
        bytes=(12 if training else 4) * total * heads * dim * dtype.itemsize,
    )
