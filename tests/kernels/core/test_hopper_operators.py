"""What all Hopper operators have in common: how compilers see them, that nothing waits, that memory is linear."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels.attention import jagged_attention
from kernels.gdpa import gdpa as activated_attention
from tests.kernels.core.devices import on_hopper
from tests.kernels.core.on_gpu import memory_of, without_waiting
from tests.kernels.core.ungraded import ungraded
from tests.kernels.jagged.jagged_problems import offsets_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
LENGTHS = [5, 0, 70]
TOTAL, LONGEST = sum(LENGTHS), 70


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def attention() -> tuple[Any, ...]:
    offsets = offsets_of(LENGTHS)
    rest = (LONGEST, LONGEST, 0.1, False, -1, 3)
    return leaf(TOTAL, 2, 64), leaf(TOTAL, 1, 64), leaf(TOTAL, 1, 64), offsets, offsets, *rest


def gdpa() -> tuple[Any, ...]:
    offsets = offsets_of(LENGTHS)
    rest = (LONGEST, LONGEST, [3, 0], 0.3, 1.0, -1, 3)
    return leaf(TOTAL, 2, 64), leaf(TOTAL, 1, 64), leaf(TOTAL, 1, 64), offsets, offsets, *rest


def joint() -> tuple[Any, ...]:
    offsets, candidates = offsets_of(LENGTHS), offsets_of([2, 1, 0]) * 64
    q, k, v = leaf(TOTAL + 3 * 64, 2, 64), leaf(TOTAL, 2, 64), leaf(TOTAL, 2, 64)
    return q, k, v, [offsets, candidates], offsets, [LONGEST, 128], LONGEST, 0.1


def tree() -> tuple[Any, ...]:
    users, vendors = offsets_of(LENGTHS), offsets_of([9, 3])
    keys = [leaf(TOTAL, 2, 64), leaf(12, 2, 64)]
    queries = [offsets_of([64, 0, 128]), offsets_of([64, 128])]
    return leaf(192, 2, 64), keys, [leaf(*x.shape) for x in keys], queries, [users, vendors], [128, 128], [70, 9], 0.1


def compression() -> tuple[Any, ...]:
    return leaf(2, 9, 128), leaf(130, 9), offsets_of([1, 3]), leaf(4, 6, 128), leaf(130, 6)


# Operator, its arguments, the shapes of its results.
OPERATORS: dict[str, tuple[str, Callable[[], tuple[Any, ...]], list[list[int]]]] = {
    "attention": ("jagged_attention_hopper", attention, [[TOTAL, 2, 64], [2, TOTAL]]),
    "gdpa": ("gdpa_hopper", gdpa, [[TOTAL, 2, 64]]),
    "joint": ("joint_attention_hopper", joint, [[TOTAL + 192, 2, 64], [2, TOTAL + 192]]),
    "tree": ("tree_attention_hopper", tree, [[192, 2, 64], [2, 192]]),
    "compression": ("lce_hopper_1", compression, [[4, 130, 128]]),
}
MODULES = (
    "attention.hopper.operators",
    "gdpa.hopper.operators",
    "ikbo.hopper.attention",
    "ikbo.hopper.lce_operators",
    "ikbo.hopper.tree",
)  # are imported when they are first needed


def operator_of(name: str) -> Any:
    for module in MODULES:
        importlib.import_module(f"kernels.{module}")
    return getattr(torch.ops.gemsmith, OPERATORS[name][0]).default


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results(name: str) -> None:
    with torch.device("meta"):
        results = operator_of(name)(*OPERATORS[name][1]())
    tensors = [results] if isinstance(results, Tensor) else list(results)
    assert [list(tensor.shape) for tensor in tensors] == OPERATORS[name][2]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_without_a_gradient_is_no_error(name: str) -> None:
    with torch.device("meta"):
        arguments = OPERATORS[name][1]()
        results = operator_of(name)(*arguments)
        alone = isinstance(results, Tensor)
        ungraded(results if alone else results[0]).backward()
    # Statistics beside a result never have a gradient, so that there are not to be zeros in place of one.
    assert alone or all(x.grad is None for x in tree_leaves(arguments) if isinstance(x, Tensor))


@on_hopper
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    with torch.device("cuda"):
        arguments = OPERATORS[name][1]()
    torch.library.opcheck(operator_of(name), arguments)


@on_hopper
@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_waits_for_the_device(name: str) -> None:
    operator = operator_of(name)
    with torch.device("cuda"):
        arguments = OPERATORS[name][1]()
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]

    def step() -> None:
        results = operator(*arguments)
        out = results if isinstance(results, Tensor) else results[0]
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    without_waiting(step)


@on_hopper
@pytest.mark.parametrize("name", ["softmax", "activation"])
def test_memory_is_linear_in_the_number_of_values(name: str) -> None:
    with torch.device("cuda"):
        offsets = offsets_of([0] * 999 + [2000])
        leaves = [leaf(2000, 2, 64) for _ in range(3)]
    fixed: dict[str, Any] = {"max_q": 4000, "max_k": 4000, "backend": "hopper"}

    def step() -> None:
        if name == "softmax":
            out = jagged_attention(*leaves, offsets, offsets, **fixed)
        else:
            out = activated_attention(*leaves, offsets, offsets, score_scale=0.1, **fixed)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    # A score for every pair of padded positions would be 64 GB. Gradients of queries are added up in rows of whole
    # tiles of 64: 34 MB here, where most rows are empty.
    assert memory_of(step) < 60e6
