"""The gate of the finite guard: gradients pass as they are, or all of them as zeros."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
    found = torch.autograd.grad(guards._Gate.apply(guard, *values), values, gradients)
    assert [each.shape for each in found] == [each.shape for each in gradients]
    assert guard.finite.dtype is torch.float32  # which optimisers want
    for each, gradient in zip(found, expected, strict=True):
        assert torch.equal(each, gradient)
