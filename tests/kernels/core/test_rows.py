"""Scratch memory of the specifications follows the rows that are there, not the bound of their length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kernels import attention, gdpa, ikbo, jagged
from kernels.core.rows import padded_length

OFFSETS = torch.tensor([0, 3, 3, 4, 9])
LONGEST, HUGE = 5, 1 << 40  # of which a padded row would take terabytes


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(), dtype=torch.float64)


def square(product: Callable[..., Tensor], bound: int) -> Tensor:
    squares = jagged.squared_offsets(OFFSETS)
    total = int(squares[-1])
    scores = jagged.jagged_jagged_bmm_jagged_out(values(9, 4), values(9, 4), OFFSETS, squares, total, bound)
    return product(scores, values(9, 4), OFFSETS, squares, bound)


def attend(operator: Callable[..., Tensor], bound: int) -> Tensor:
    q, k, v = values(9, 2, 4), values(9, 2, 4), values(9, 2, 4)
    return operator(q, k, v, OFFSETS, OFFSETS, max_q=bound, max_k=bound)


OPERATORS: dict[str, Callable[[int], Tensor]] = {
    "dense": lambda bound: jagged.jagged_dense_bmm(values(9, 4), OFFSETS, values(4, 4, 3), bound),
    "low rank": lambda bound: jagged.jagged_low_rank(values(9, 4), OFFSETS, values(4, 2, 4), values(5, 2), bound),
    "gram": lambda bound: jagged.jagged_jagged_bmm(values(9, 4), values(9, 3), OFFSETS, bound),
    "scores": partial(square, jagged.array_jagged_bmm_jagged_out),
    "attention": partial(attend, attention.jagged_attention),
    "window": partial(attend, partial(attention.jagged_attention, window=2)),
    "position bias": partial(attend, partial(attention.jagged_attention, position_bias=values(2, 5).float())),
    "gdpa": partial(attend, partial(gdpa.gdpa, score_scale=0.5)),
    "tree": lambda bound: ikbo.tree_attention(
        values(9, 1, 2, 4),
        [values(9, 2, 4)],
        [values(9, 2, 4)],
        [OFFSETS],
        [OFFSETS],
        max_candidates=[bound],
        max_k=[bound],
    ),
    "pool": lambda bound: attention.attention_pool(
        values(9, 2, 4), values(9, 4), OFFSETS, OFFSETS, max_q=bound, max_k=bound, scale=0.5
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_bound_of_rows_costs_nothing_on_a_cpu(name: str) -> None:
    assert torch.equal(OPERATORS[name](HUGE), OPERATORS[name](LONGEST))


def test_what_the_host_cannot_see_is_padded_to_the_bound() -> None:
    assert padded_length(OFFSETS, 7) == LONGEST
    assert padded_length(OFFSETS, 4) == 4  # the check of lengths says so
    assert padded_length(OFFSETS * 0, 7) == 1
    assert padded_length(OFFSETS[:1], 7) == 7
    assert padded_length(OFFSETS.to("meta"), 7) == 7
    with FakeTensorMode() as mode:
        assert padded_length(mode.from_tensor(OFFSETS), 7) == 7
    compiled = torch.compile(lambda offsets: torch.zeros(padded_length(offsets, 7)), backend="eager", fullgraph=True)
    assert compiled(OFFSETS).shape == (7,)
    traced = make_fx(lambda offsets: offsets.new_zeros(padded_length(offsets, 7)))(OFFSETS)
    assert traced(OFFSETS * 2).shape == (7,)
