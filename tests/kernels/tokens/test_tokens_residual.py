"""A residual sum, its norm and chosen rows of it: the specification by its formula, kernels interpreted, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.testing import Tolerance, check_gradients, poisoned_empty
from kernels.tokens import add_rms_norm, reference
from kernels.tokens.triton import residual
from tests.kernels.tokens.test_tokens import EXACT, HAS_TRITON, ROUNDED, interpreted, joined, normalised

ADDED_SHAPES = [(5, 48), (0, 16), (1, 5), (70, 300)]
NO_CHANGE, NO_ROWS = "without a change", "without rows"


def added(x: Tensor, change: Tensor, *, rows: Tensor | None) -> tuple[Tensor, ...]:
    """By appending a row of zeros, which row -1 is then."""
    total = x + change
    results = (total, normalised(total))
    return results if rows is None else (*results, torch.cat([total, torch.zeros_like(total[:1].sum(0)[None])])[rows])


def check_add(
    function: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...], what: str, dtype: torch.dtype, device: str,
    tolerance: Tolerance,
) -> None:  # fmt: skip
    """Of `add_rms_norm`; both halves of what is added are whole numbers of 1 / 16, so that the sum is exact."""
    generator = torch.Generator().manual_seed(4)
    x, change = (torch.randint(-40, 40, shape, generator=generator).to(device, dtype) / 16 for _ in range(2))
    rows = None
    if what != NO_ROWS:
        order = torch.randperm(shape[0], generator=generator)[: shape[0] // 2 * 2]
        rows = torch.cat([order, torch.full((4,), -1)]).view(2, -1).to(device)
    inputs = {"x": x} if what == NO_CHANGE else {"x": x, "change": change}

    def ours(x: Tensor, change: Tensor | None = None) -> Tensor:
        total, normed, picked = function(x, change, rows)
        assert rows is not None or picked.shape == (0, shape[1])
        return joined((total, normed, picked))

    def expected(x: Tensor, change: Tensor | None = None) -> Tensor:
        return joined(added(x, torch.zeros_like(x) if change is None else change, rows=rows))

    with poisoned_empty():
        check_gradients(ours, expected, inputs, tolerance)


@pytest.mark.parametrize("what", ["all", NO_CHANGE, NO_ROWS])
@pytest.mark.parametrize("shape", ADDED_SHAPES, ids=str)
def test_sum_and_norm_reference_is_the_formula(shape: tuple[int, ...], what: str) -> None:
    check_add(partial(add_rms_norm, backend="reference"), shape, what, torch.float64, "cpu", EXACT)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("what", ["all", NO_CHANGE, NO_ROWS])
@pytest.mark.parametrize("shape", ADDED_SHAPES, ids=str)
def test_sum_and_norm_in_the_interpreter(shape: tuple[int, ...], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    check_add(residual.add_rms_norm, shape, what, torch.float32, "cpu", ROUNDED)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_results(wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    rows = torch.tensor([3, -1, 0])
    for given in (None, torch.randn(4, 6, requires_grad=True)):
        x = torch.randn(4, 6, requires_grad=True)
        ours, expected = (
            torch.autograd.grad(sum(out[i].square().sum() for i in wanted), x)[0]
            for out in (residual.add_rms_norm(x, given, rows), reference.add_rms_norm(x, given, rows))
        )
        torch.testing.assert_close(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("what", ["all", NO_CHANGE, NO_ROWS])
@pytest.mark.parametrize("shape", [*ADDED_SHAPES, (1000, 128), (3, 8192)], ids=str)
def test_sum_and_norm(shape: tuple[int, ...], what: str, dtype: torch.dtype) -> None:
    check_add(partial(add_rms_norm, backend="triton"), shape, what, dtype, "cuda", ROUNDED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    last = 2**24 + 3
    # The sum and the norm have gradients of their own.
    x, change, *grads = (torch.randn(last + 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    rows = torch.tensor([-1, last, 2], device="cuda")
    leaves = [x.requires_grad_(), change.requires_grad_()]
    results = add_rms_norm(x, change, rows, backend="triton")
    gradient = torch.autograd.grad(results, leaves, [*grads, torch.ones_like(results[2])])[0]
    for first, there in ((0, [-1, -1, 2]), (last - 3, [-1, 3, -1])):
        some = slice(first, first + 4)
        ends = [leaf.detach()[some].double().requires_grad_() for leaf in leaves]
        expected = add_rms_norm(*ends, torch.tensor(there, device="cuda"), backend="reference")
        given = [*(grad[some].double() for grad in grads), torch.ones_like(expected[2])]
        wanted = (*expected[:2], torch.autograd.grad(expected, ends, given)[0])
        for one, other in zip((*results[:2], gradient), wanted, strict=True):
            assert ((one[some] - other).norm() / other.norm()).item() < 1e-2
    assert bool((results[2] == torch.stack([torch.zeros_like(x[0]), *results[0][[last, 2]]])).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_opcheck() -> None:
    x = torch.randn(5, 2, 48, device="cuda", requires_grad=True)
    rows = torch.tensor([[3, -1], [0, 1]], device="cuda")
    for change, places in ((x[:, 0], rows), (None, rows), (x[:, 0], None)):
        torch.library.opcheck(residual._add_rms_norm.definition, (x[:, 1], change, places))
