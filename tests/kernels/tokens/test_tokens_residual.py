"""A residual sum, its norm and chosen rows of it: the specification by its formula, kernels interpreted, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.testing import Tolerance, check_gradients, poisoned_empty
from kernels.tokens import add_rms_norm, reference, rms_norm
from kernels.tokens.triton import norm_operator, residual, tokens
from tests.kernels.core.ungraded import ungraded
from tests.kernels.tokens.test_tokens import EXACT, HAS_TRITON, ROUNDED, interpreted, joined, normalised

ADDED_SHAPES = [(5, 48), (0, 16), (1, 5), (70, 300)]
NO_CHANGE, NO_ROWS = "without a change", "without rows"
WHAT = ["all", NO_CHANGE, NO_ROWS]


def added(x: Tensor, change: Tensor, *, rows: Tensor | None) -> tuple[Tensor, ...]:
    """By appending a row of zeros, which row -1 is then."""
    total = x + change
    results = (total, normalised(total))
    return results if rows is None else (*results, torch.cat([total, torch.zeros_like(total[:1].sum(0)[None])])[rows])


def check_add(
    function: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...], what: str, twice: bool, dtype: torch.dtype,
    device: str, tolerance: Tolerance,
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
        total, normed, picked, *again = function(x, change, rows, twice=twice)
        assert rows is not None or picked.shape == (0, shape[1])
        assert len(again) == twice
        return joined((total, normed, picked, *again))

    def expected(x: Tensor, change: Tensor | None = None) -> Tensor:
        results = added(x, torch.zeros_like(x) if change is None else change, rows=rows)
        return joined((*results, results[1]) if twice else results)

    with poisoned_empty():
        check_gradients(ours, expected, inputs, tolerance)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("shape", ADDED_SHAPES, ids=str)
def test_sum_and_norm_reference_is_the_formula(shape: tuple[int, ...], what: str, twice: bool) -> None:
    check_add(partial(add_rms_norm, backend="reference"), shape, what, twice, torch.float64, "cpu", EXACT)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("shape", ADDED_SHAPES, ids=str)
def test_sum_and_norm_in_the_interpreter(
    shape: tuple[int, ...], what: str, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    check_add(residual.add_rms_norm, shape, what, twice, torch.float32, "cpu", ROUNDED)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (3,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_gradients_of_some_results(wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    rows = torch.tensor([3, -1, 0])
    for given in (None, torch.randn(4, 6, requires_grad=True)):
        x = torch.randn(4, 6, requires_grad=True)
        ours, expected = (
            torch.autograd.grad(sum(out[i].square().sum() for i in wanted), x)[0]
            for out in (residual.add_rms_norm(x, given, rows, True), reference.add_rms_norm(x, given, rows, True))
        )
        torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 6)], ids=str)
def test_several_readers_of_a_norm(
    shape: tuple[int, ...], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    given = []
    launch = tokens.rms_norm_backward
    monkeypatch.setattr(
        tokens, "rms_norm_backward", lambda grad, *others: (given.append(others[-1]), launch(grad, *others))[1]
    )
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape).mT.contiguous().mT  # gradients whose rows are of other strides
    ours, expected = (
        torch.autograd.grad(sum((out[i] * (weight + i)).square().sum() for i in wanted), x)[0]
        for out in (norm_operator.rms_norm(x, x.dtype, 0.5, True, True), (*(normalised(x, 0.5),) * 2, x))
    )
    torch.testing.assert_close(ours, expected)
    # One launch, and nothing to add for one reader.
    assert [more is not None for more in given] == ([] if wanted == (2,) else [{0, 1} <= {*wanted}])


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_two_readers_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    x = torch.randn(4, 6, requires_grad=True)
    for results in (residual.add_rms_norm(x, None, None, True)[1::2], norm_operator.rms_norm(x, x.dtype, 1.0, True)):
        assert torch.equal(*results)
        ungraded(results[0]).backward()
    assert x.grad is None or not x.grad.any()
    with torch.no_grad():
        assert not any(normed.requires_grad for normed in norm_operator.rms_norm(x, x.dtype, 1.0, True))


@pytest.mark.parametrize("wanted", [(1,), (1, 3)], ids=str)
def test_two_readers_in_compiled_code(wanted: tuple[int, ...]) -> None:
    def total(x: Tensor, change: Tensor) -> Tensor:
        results = (*add_rms_norm(x, change, twice=True), *rms_norm(x, twice=True))
        return sum((results[i] ** 3).sum() for i in (*wanted, 4, 5))

    x, change = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    ours, expected = (torch.autograd.grad(function(x, change), (x, change)) for function in (compiled, total))
    torch.testing.assert_close(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("shape", [*ADDED_SHAPES, (1000, 128), (3, 8192)], ids=str)
def test_sum_and_norm(shape: tuple[int, ...], what: str, twice: bool, dtype: torch.dtype) -> None:
    check_add(partial(add_rms_norm, backend="triton"), shape, what, twice, dtype, "cuda", ROUNDED)


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
