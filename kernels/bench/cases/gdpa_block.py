"""The block around GDPA, query + RMSNorm(gdpa(LN(query)) + LN(query)), with its norms fused in three ways.

The shape is that of Meta's description of the block (2026-07-10 blog on fusing norms with GDPA): 768 rows of queries of
uniform lengths, 128 keys each that are made elsewhere, heads of 128. Attention is the same in all contenders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.bench import Case, Problem, Runner, check_relative_error, runner_of
from kernels.gdpa import reference as specification
from kernels.gdpa.norms import add_norms, layer_norm

# Rows, longest row, keys, heads and their features.
GPU_SHAPE, CPU_SHAPE = (768, 1024, 128, 4, 128), (4, 16, 8, 2, 8)
# bfloat16 results, after the roundings of two norms and an attention.
LIMIT = 1.5e-2

Attend = Callable[..., Tensor]


def cases(device: torch.device, attend: Attend) -> list[Case]:
    """`attend` is `kernels.gdpa.gdpa`."""
    return [Case(f"block_{direction}", partial(_problem, attend, direction)) for direction in ("fwd", "bwd")]


def _problem(attend: Attend, direction: str, device: torch.device) -> Problem:
    on_gpu, backward = device.type == "cuda", direction == "bwd"
    rows, longest, hidden, heads, head_dim = GPU_SHAPE if on_gpu else CPU_SHAPE
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = torch.randint(1, longest + 1, (rows,), generator=torch.Generator().manual_seed(0))
    offsets, total, width = pad(lengths.cumsum(0), (1, 0)).to(device), int(lengths.sum()), heads * head_dim
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

    # Scores of unit variance.
    key, value = random(rows, hidden, heads, head_dim, scale=head_dim**-0.5), random(rows, hidden, heads, head_dim)
    inputs = [x.requires_grad_(backward) for x in (random(total, width), key, value)]
    cotangent = random(total, width)

    def block(before: Attend, behind: Attend, backend: str | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = attend(
            *(before(query).view(-1, heads, head_dim), key, value, offsets, None),
            max_q=longest,
            max_k=hidden,
            activation="gelu_tanh",
            score_scale=1.0,
            backend=backend,
        )
        return behind(attended.flatten(1), query)

    def runner(before: Attend, behind: Attend) -> Runner:
        return runner_of(lambda: block(before, behind, None, *inputs), inputs, cotangent, backward)

    def by(backend: str) -> Runner:
        return runner(partial(layer_norm, backend=backend), partial(add_norms, backend=backend))

    def compiled() -> Runner:
        before, behind = (torch.compile(x, dynamic=False) for x in (specification.layer_norm, specification.add_norms))
        return runner(before, behind)

    exact = [x.detach().float().requires_grad_(backward) for x in inputs]
    reference = (partial(x, backend="reference") for x in (layer_norm, add_norms))
    out = block(*reference, "reference", *exact)
    expected = torch.autograd.grad(out, exact, cotangent.float()) if backward else (out,)
    pairs = float(total) * hidden
    moved = (3 if backward else 2) * total * width + (4 if backward else 2) * key.numel()
    contenders: dict[str, Callable[[], Runner]] = {"triton norms": partial(by, "triton")} if on_gpu else {}
    contenders["norms of PyTorch"] = partial(by, "reference")
    if on_gpu:
        contenders["norms compiled"] = compiled
    return Problem(
        contenders=contenders,
        check=check_relative_error(expected, LIMIT),
        flops=4 * width * pairs * (2.5 if backward else 1.0),
        bytes=moved * dtype.itemsize,
    )
