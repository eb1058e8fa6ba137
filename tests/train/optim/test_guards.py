"""The gate of the finite guard: gradients pass as they are, or all of them as zeros."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from train.optim import guards


@pytest.mark.parametrize("bad", [None, 0, 1, 2, 4, 5, 6, 7], ids=str)
def test_gradients_of_any_size_pass_or_are_zeros_together(bad: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SMALL", 10)
    shapes = {(2, 3): torch.float32, (40, 3): torch.float32, (3, 2): torch.float64, (0, 4): torch.float32}
    gradients = [torch.randn(shape, dtype=dtype) for shape, dtype in shapes.items()]
    gradients.append(torch.randn(3, 2).t())  # small, and its rows lie apart
    gradients.append(torch.randn(30, 9)[:, 2:6].bfloat16())  # rows of bfloat16
    gradients.append(torch.randn(30, 9)[:, 2:6])  # columns of a wider gradient
    gradients.append(torch.randn(4, 30).t())  # neither
    if bad is not None:
        gradients[bad][0, 1] = torch.nan
    world = SimpleNamespace(device=torch.device("cpu"), size=1)
    guard = guards.FiniteGuard(nn.Identity(), world, 1, str)  # type: ignore[arg-type]
    values = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    expected = [gradient.clone() if bad is None else torch.zeros_like(gradient) for gradient in gradients]
    found = torch.autograd.grad(guards._Gate.apply(guard, [], *values), values, gradients)
    assert [each.shape for each in found] == [each.shape for each in gradients]
    assert guard.finite.dtype is torch.float32  # which optimisers want
    for each, gradient in zip(found, expected, strict=True):
        assert torch.equal(each, gradient)


@pytest.mark.parametrize("bad", [None, 0, 3, 4], ids=str)  # of a slice, of another tensor's, of single rows
def test_rows_that_are_slices_of_one_tensor_get_their_gradients_in_one(bad: int | None) -> None:
    world = SimpleNamespace(device=torch.device("cpu"), size=1)
    guard = guards.FiniteGuard(nn.Identity(), world, 1, str)  # type: ignore[arg-type]
    tables = [torch.randn(9, 4, requires_grad=True), torch.randn(6, 3, requires_grad=True)]
    first, second = (table * 2 for table in tables)
    alone = torch.randn(5, 4, requires_grad=True)
    rows = {"b": first[3:], "a": first[:3], "none": first[:0], "c": second[:4], "alone": alone, "d": second[4:]}
    weights = {name: torch.randn(each.shape) for name, each in rows.items()}
    if bad is not None:
        list(weights.values())[bad][0, 0] = torch.inf
    embedded = {
        name: JaggedTensor(each, lengths=torch.ones(len(each), dtype=torch.int64)) for name, each in rows.items()
    }
    gated, _ = guard._gate(nn.Identity(), (embedded, None))  # type: ignore[arg-type]
    assert list(gated) == list(rows)
    assert all(torch.equal(gated[name].values(), each) for name, each in rows.items())
    sum((gated[name].values() * weight).sum() for name, weight in weights.items()).backward()
    assert guard.finite.item() == (bad is None)
    wanted = {name: weight if bad is None else torch.zeros_like(weight) for name, weight in weights.items()}
    assert torch.equal(tables[0].grad, 2 * torch.cat([wanted["a"], wanted["b"]]))
    assert torch.equal(tables[1].grad, 2 * torch.cat([wanted["c"], wanted["d"]]))
    assert torch.equal(alone.grad, wanted["alone"])
    assert [len(members) for _, members in guards._wholes(list(rows.values()))] == [3, 2]
    assert not guards._wholes([first[:3], first[4:]])  # a row is nobody's
