"""Benchmark cases of GDPA: `python -m kernels.bench gdpa`.

The shapes are those of the published benchmark of ads_model_kernel_library (B=1152, 4 heads of 128, tanh GELU): queries
and keys equally long; queries of uniform lengths against full keys; 256 keys. Two are harder: keys as jagged as the
queries, with uniform and with heavy-tailed lengths. `block_*` puts the norms of a block around it; `hstu_*`
have SiLU and the masks of HSTU.

On a GPU there are more at one length: `gelu_*`, the three forms of GELU in heads of 128 and of 64, which have half the
products for each activation.

Every call computes its own list of tiles, although layers with the same offsets would share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases import gdpa_block, gdpa_hstu
from kernels.bench.cases.gdpa_peer import load_peer
from kernels.core import dispatch
from kernels.gdpa import gdpa
from kernels.jagged import jagged_to_padded, padded_to_jagged

HEADS, HEAD_DIM = 4, 128
ROWS, LENGTHS = {"cuda": 1152, "cpu": 6}, {"cuda": (256, 512, 1024, 2048), "cpu": (16, 32)}
ONE_LENGTH = 1024
SHORT_KEYS = {"cuda": 256, "cpu": 8}
# The first one's values are the check for all: they differ by less than the rounding of bfloat16.
GELU_FORMS = ("gelu_tanh", "gelu_poly", "gelu")

# bfloat16 results carry about 2^-9 of rounding and so do the activations in them; a wrong mask costs 0.1 and up.
LIMIT = 1e-2
SCRATCH_BYTES = 2e9


def cases(device: torch.device) -> list[Case]:
    shapes = [
        Case(f"{kind}_{direction}_L{length}", partial(_problem, kind, direction, length))
        for kind in LENGTHS_OF
        for length in LENGTHS[device.type]
        for direction in ("fwd", "bwd")
    ]
    shapes += gdpa_block.cases(device, gdpa) + gdpa_hstu.cases(device)
    if device.type == "cpu":
        return shapes

    return shapes + [
        Case(
            f"gelu_d{dim}_{direction}_L{ONE_LENGTH}",
            partial(_problem, "self_dense", direction, ONE_LENGTH, head_dim=dim, forms=GELU_FORMS),
        )
        for dim in (HEAD_DIM, HEAD_DIM // 2)
        for direction in ("fwd", "bwd")
    ]


def full(rows: int, maximum: int) -> Tensor:
    return torch.full((rows,), maximum)


def uniform(rows: int, maximum: int) -> Tensor:
    """Uniform in 1..maximum: half of it on average."""
    return torch.randint(1, maximum + 1, (rows,), generator=torch.Generator().manual_seed(0))


def heavy_tailed(rows: int, maximum: int) -> Tensor:
    """Pareto with exponent 1.1 from maximum / 32 on, cut at the maximum: many short rows, few long ones."""
    chance = torch.rand(rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (max(maximum / 32, 1) * chance ** (-1 / 1.1)).long().clamp(1, maximum)


# How many queries and how many keys the rows have.
LENGTHS_OF: dict[str, tuple[Callable[[int, int], Tensor], Callable[[int, int], Tensor] | None]] = {
    "self_dense": (full, full),
    "self_ragged_queries": (uniform, full),
    "cross_short_keys": (full, None),
    "self_jagged": (uniform, uniform),
    "self_heavy_tailed": (heavy_tailed, heavy_tailed),
}


def _problem(
    kind: str,
    direction: str,
    max_q: int,
    device: torch.device,
    head_dim: int = HEAD_DIM,
    forms: tuple[str, ...] = (),
) -> Problem:
    rows = ROWS[device.type]
    query_lengths, key_lengths = LENGTHS_OF[kind]
    q_lengths = query_lengths(rows, max_q)
    max_k = max_q if key_lengths else SHORT_KEYS[device.type]
    k_lengths = (key_lengths or full)(rows, max_k)
    q_offsets, k_offsets = (pad(lengths.cumsum(0), (1, 0)).to(device) for lengths in (q_lengths, k_lengths))
    total_q, total_k = int(q_lengths.sum()), int(k_lengths.sum())
    pairs = (q_lengths.double() * k_lengths).sum().item()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backward = direction == "bwd"
    generator = torch.Generator(device).manual_seed(0)

    def random(total: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(total, HEADS, head_dim, device=device, generator=generator) * scale).to(dtype)

    # Scores of unit variance, as after a QK norm: the peer has no scale before the activation.
    q, k, v, cotangent = random(total_q, head_dim**-0.5), random(total_k), random(total_k), random(total_q)
    inputs = [tensor.requires_grad_(backward) for tensor in (q, k, v)]

    def runner(attend: Callable[[], Tensor]) -> Runner:
        return runner_of(attend, inputs, cotangent, backward)

    def prepare(backend: str, activation: str = "gelu_tanh") -> Runner:
        if backend == "reference":
            _refuse_large_scratch(rows * HEADS * max_q * max_k * 16, device)
        return runner(
            lambda: gdpa(
                *(q, k, v, q_offsets[:], k_offsets[:]),  # views: calls with the same tensors share a list of tiles
                max_q=max_q,
                max_k=max_k,
                activation=activation,
                score_scale=1.0,
                backend=backend,
            )
        )

    def prepare_peer() -> Runner:
        """Its fast_gelu is the tanh form through the hardware's tanh; it takes keys as full or jagged."""
        peer, offsets = load_peer(), (q_offsets.int(), k_offsets.int())
        return runner(lambda: peer(q, k, v, *offsets, max_q, max_k, activation="fast_gelu"))

    def prepare_padded() -> Runner:
        """Batched products of padded tensors with all scores in memory; the padding is made outside the timing."""
        _refuse_large_scratch(rows * HEADS * max_q * max_k * (8 if backward else 4), device)
        sides = ((q, q_offsets, max_q), (k, k_offsets, max_k), (v, k_offsets, max_k))
        padded = [
            jagged_to_padded(values.detach(), offsets, maximum).transpose(1, 2).contiguous().requires_grad_(backward)
            for values, offsets, maximum in sides
        ]

        def attend() -> Tensor:
            return gelu(padded[0] @ padded[1].mT, approximate="tanh") @ padded[2]

        def to_jagged(values: Tensor, offsets: Tensor, total: int) -> Tensor:
            return padded_to_jagged(values.transpose(1, 2), offsets, total)

        if not backward:
            return Runner(attend, lambda out: (to_jagged(out, q_offsets, total_q),))
        out = attend()
        grad = jagged_to_padded(cotangent, q_offsets, max_q).transpose(1, 2).contiguous()
        return Runner(
            lambda: torch.autograd.grad(out, padded, grad, retain_graph=True),
            lambda gradients: tuple(
                to_jagged(gradient, offsets, values.shape[0])
                for gradient, (values, offsets, _) in zip(gradients, sides, strict=True)
            ),
        )

    contenders: dict[str, Callable[[], Runner]] = {form: partial(prepare, "hopper", form) for form in forms}
    if not forms:
        peers = {"ads_model_kernel_library": prepare_peer, "torch on padded": prepare_padded}
        contenders = backends_of("gdpa", prepare) | peers
    width = HEADS * head_dim * dtype.itemsize
    return Problem(
        contenders=contenders,
        check=check_relative_error(_expected(q, k, v, cotangent, q_lengths, k_lengths, backward), LIMIT),
        flops=4 * HEADS * head_dim * pairs * (2.5 if backward else 1.0),
        bytes=(3 * total_q + 4 * total_k if backward else 2 * total_q + 2 * total_k) * width,
    )


def _refuse_large_scratch(size: float, device: torch.device) -> None:
    if device.type == "cuda" and size > 0.8 * torch.cuda.mem_get_info(device)[0]:
        raise dispatch.UnsupportedError(f"needs {size / 1e9:.0f} GB for the scores of padded rows")


def _expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cotangent: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    backward: bool,
) -> tuple[Tensor, ...]:
    """Output or gradients in float32 from the reference, a few rows at a time to bound its scratch memory."""
    max_q, max_k = int(q_lengths.max()), int(k_lengths.max())
    step = max(1, int(SCRATCH_BYTES / (HEADS * max_q * max_k * 4)))
    q_parts, k_parts = ([int(part.sum()) for part in lengths.split(step)] for lengths in (q_lengths, k_lengths))
    parts = zip(
        q.detach().split(q_parts),
        k.detach().split(k_parts),
        v.detach().split(k_parts),
        cotangent.split(q_parts),
        q_lengths.split(step),
        k_lengths.split(step),
        strict=True,
    )
    results = []
    for *tensors, grad, q_part, k_part in parts:
        leaves = [tensor.float().requires_grad_(backward) for tensor in tensors]
        offsets = (pad(lengths.cumsum(0), (1, 0)).to(q.device) for lengths in (q_part, k_part))
        out = gdpa(
            *leaves,
            *offsets,
            max_q=max_q,
            max_k=max_k,
            activation="gelu_tanh",
            score_scale=1.0,
            backend="reference",
        )
        results.append(torch.autograd.grad(out, leaves, grad.float()) if backward else (out,))
    return tuple(torch.cat(pieces) for pieces in zip(*results, strict=True))
