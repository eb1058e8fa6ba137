"""What the tests of `gdpa` share: an oracle by rows and pairs, generated inputs, and the tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.gdpa import gdpa, reference
from kernels.testing import Tolerance, check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import sees
from tests.kernels.jagged.jagged_problems import offsets_of

# float64 against float64: only the order of additions differs.
EXACT = Tolerance("same arithmetic in another order", roundings=4, reduction=64, accumulate=torch.float64)
# Near its limit the derivative of the polynomial GELU is the small rest of large terms, with errors of their size.
EXACT_POLYNOMIAL = Tolerance(
    "the terms of a derivative are some hundred times as large as it is", roundings=2**18, accumulate=torch.float64
)

# Written from the definitions, not from `kernels.core.activations`.
DEFINITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu_squared": lambda x: torch.where(x > 0, x * x, 0.0),
    "hardswish": lambda x: torch.where(x < -3, 0.0, torch.where(x > 3, x, x * (x + 3) / 6)),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "identity": lambda x: x,
}


def _poly(x: Tensor) -> Tensor:
    coefficients = [0.396311275, -0.0623936251, 0.00777617247, -0.000605931268, 2.60650563e-05, -4.6846057e-07]
    c = x.clamp(-3.7, 3.7)
    return x * (0.5 + sum(factor * c ** (2 * power + 1) for power, factor in enumerate(coefficients)))


DEFINITIONS["gelu_poly"] = _poly


def outputs(keys: int) -> Tolerance:
    return Tolerance(
        "scores, two steps of a polynomial of them, its tanh, the activations and the result are rounded; sums over "
        f"{keys} keys",
        roundings=6,
        reduction=keys,
    )


def gradients(rows: int) -> Tolerance:
    return Tolerance(
        "a derivative made of the hardware's tanh in three steps, its product with the gradient of an activation, and "
        f"the result are rounded; sums over up to {rows} rows",
        roundings=8,
        reduction=rows,
    )


def table_gradients(dtype: torch.dtype, pairs: int) -> Tolerance:
    """Of entries of a bias table, which are float32 whatever the dtype of the operands."""
    if dtype is torch.float32:
        return gradients(pairs)
    return Tolerance(
        f"each of up to {pairs} terms has a slope made of the hardware's tanh, which is off by 2^-11: 2^13 roundings "
        "of float32, which an entry is",
        roundings=2**26,
        reduction=pairs,
    )


def inputs_of(
    q_offsets: Tensor,
    k_offsets: Tensor,
    heads: tuple[int, int] = (1, 1),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k and v as keyword arguments of `gdpa`, of unit variance."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(q_offsets.device, dtype)

    total_q, total_k = int(q_offsets[-1]), int(k_offsets[-1])
    return {
        "q": random(total_q, heads[0], widths[0]),
        "k": random(total_k, heads[1], widths[0]),
        "v": random(total_k, heads[1], widths[1]),
    }


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_offsets: Tensor,
    k_offsets: Tensor,
    activation: str | Sequence[str] = "gelu",
    score_scale: float,
    out_scale: float = 1.0,
    num_targets: Tensor | None = None,
    **masks: Any,
) -> Tensor:
    """One query and one head at a time, over an explicit list of the keys it sees."""
    names = [activation] * q.shape[1] if isinstance(activation, str) else list(activation)
    out = []
    for row in range(len(q_offsets) - 1):
        q_first, k_first = int(q_offsets[row]), int(k_offsets[row])
        counts = int(q_offsets[row + 1]) - q_first, int(k_offsets[row + 1]) - k_first
        own = masks if num_targets is None else masks | {"targets": int(num_targets[row])}
        for i in range(counts[0]):
            where = [k_first + j for j in range(counts[1]) if sees(i, j, *counts, **own)[0]]
            heads = []
            for head, query in enumerate(q[q_first + i]):
                shared = head * k.shape[1] // q.shape[1]
                weights = DEFINITIONS[names[head]](score_scale * (k[where, shared] @ query)) * out_scale
                heads.append(weights @ v[where, shared] if where else v.new_zeros(v.shape[2]))
            out.append(torch.stack(heads))
    return torch.stack(out) if out else v.new_zeros(0, q.shape[1], v.shape[2])


Case = tuple[tuple[list[int], list[int]], dict[str, Any]]
"""Lengths of rows of queries and keys, and what is not as usual."""


def problem(case: Case) -> tuple[list[Tensor], list[Any]]:
    """(q, k, v) on a GPU, and the other arguments of a backend."""
    (q_lengths, k_lengths), options = case
    heads = options.get("heads", (4, 4))
    width = options.get("width", 128)
    offsets = offsets_of(q_lengths).cuda(), offsets_of(k_lengths, torch.int32).cuda()
    inputs = inputs_of(*offsets, heads, (width, width), options.get("dtype", torch.bfloat16))
    names = options.get("names", ("gelu_tanh",) * heads[0])
    scales = options.get("scales", (1.3 * width**-0.5, 0.1))
    rows = [Rows(own, max(lengths)) for own, lengths in zip(offsets, (q_lengths, k_lengths), strict=True)]
    return list(inputs.values()), [*rows, names, *scales, Mask(False, *options.get("window", (-1, -1)))]


def check_problem(case: Case) -> None:
    """Output and gradients of the Hopper operator against the reference in float64, with poisoned memory."""
    from kernels.gdpa.hopper import operators

    (q, k, v), rest = problem(case)
    names = ("queries", "keys", "activations", "score_scale", "out_scale", "mask")
    call = dict(zip(names, rest, strict=True))
    with poisoned_empty():
        check_gradients(
            partial(operators.gdpa, **call),
            partial(reference.gdpa, **call),
            {"q": q, "k": k, "v": v},
            outputs(call["keys"].max_length),
            gradients(max(call["queries"].max_length, call["keys"].max_length)),
        )


def check_shared(backend: str, length: int, width: int) -> None:
    """Queries that all rows share, dense keys, and an index, on a GPU."""
    q_offsets, index = offsets_of([30, 0, 100, 7]).cuda(), torch.tensor([0, 0, 2, 2], device="cuda")
    k_offsets = torch.tensor([0, 3 * length], device="cuda")
    inputs = inputs_of(q_offsets, k_offsets, (2, 2), (width, width), torch.bfloat16)
    dense = {name: inputs[name].view(3, length, 2, width) for name in ("k", "v")}
    for call in (
        {"q_offsets": q_offsets, "kv_index": index},
        {"q_offsets": None},
        {"q_offsets": None, "kv_index": index},
    ):
        fixed = {"k_offsets": None, "max_q": 2 * 137, "max_k": length, "score_scale": 0.1, **call}
        check_gradients(
            partial(gdpa, **fixed, backend=backend),
            partial(gdpa, **fixed, backend="reference"),
            {"q": inputs["q"], **dense},
            outputs(length),
            gradients(3 * 137),
        )
