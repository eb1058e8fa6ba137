"""Runs every jagged kernel once, forward and backward, on a small problem; `test_sanitized.py` runs it under a checker.

`python tests/kernels/core/run_small.py operators|attention`
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.bench.cases import jagged_operators
from kernels.core import dispatch

LENGTHS = [70, 0, 1, 129, 5]


def main(what: str) -> None:
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    if what == "operators":
        operators(offsets)
    else:
        attention(offsets)
    torch.cuda.synchronize()
    print("done")


def operators(offsets: Tensor) -> None:
    squared = sum(length * length for length in LENGTHS)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    # A width of no whole tile, a narrow one that Hopper kernels take, and one that all of them do.
    for backend, width in (("triton", 40), ("hopper", 64), ("hopper", 200)) if hopper else (("triton", 40),):
        sizes = jagged_operators.Sizes(len(LENGTHS), max(LENGTHS), width, 6, sum(LENGTHS), squared)
        for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for name in jagged_operators.OPERATORS:
                operator = jagged_operators._operator(
                    name,
                    "fp32",
                    sizes,
                    offsets,
                    lambda *shape, dtype=dtype: torch.randn(shape, device="cuda", dtype=dtype),
                )
                if backend not in dispatch.operators()[operator.op or name]:
                    continue
                inputs = [tensor.requires_grad_() for tensor in operator.inputs]
                try:
                    out = operator.ours(backend, *inputs)
                except dispatch.UnsupportedError:
                    continue
                torch.autograd.grad(out, inputs, torch.randn_like(out))
                print(backend, name, dtype, "tf32" if tf32 else "")


def attention(offsets: Tensor) -> None:
    common = {"max_q": max(LENGTHS), "max_k": max(LENGTHS)}
    masks: list[dict[str, object]] = [{}, {"causal": True}, {"window": (None, 40)}]
    biases = {
        "block_size": 64,
        "position_bias": torch.randn(4, 9, device="cuda", requires_grad=True),
        "time_bias": torch.randn(4, 7, device="cuda", requires_grad=True),
        "q_times": torch.arange(sum(LENGTHS), device="cuda") * 100,
        "k_times": torch.arange(sum(LENGTHS), device="cuda") * 90,
    }
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for backend in ("triton", "hopper") if hopper else ("triton",):
        for dim in (64, 128):
            q = torch.randn(sum(LENGTHS), 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            k, v = (torch.randn_like(q[:, :2]).requires_grad_() for _ in range(2))
            for options in [*masks, biases] if backend == "triton" else masks:
                out = jagged_attention(q, k, v, offsets, offsets, **common, **options, backend=backend)
                tables = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
                torch.autograd.grad(out, [q, k, v, *tables], torch.randn_like(out))


if __name__ == "__main__":
    main(sys.argv[1])
