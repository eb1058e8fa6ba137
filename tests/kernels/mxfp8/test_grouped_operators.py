"""The operators around the grouped products' kernels, on the CPU with the reference in the kernels' place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import mxfp8
from kernels.core import dispatch
from kernels.mxfp8 import plain
from kernels.mxfp8.hopper import operators
from kernels.mxfp8.hopper.grouped import bf16
from kernels.testing import Tolerance, check_gradients

SIZES = [40, 0, 70, 1]
ROUNDED = Tolerance("one rounding of float32 sums", reduction=128)


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        assert a.is_contiguous()
        assert b.is_contiguous() or b.mT.is_contiguous()
        out = plain.grouped_mm(a.float(), b.float(), ends).bfloat16()
        out[ends[-1] :] = 0
        return out

    def grouped_wgrad(dy: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        assert dy.is_contiguous()
        assert x.is_contiguous()
        return plain.grouped_wgrad(dy.float(), x.float(), ends).to(dtype)

    monkeypatch.setattr(bf16, "grouped_mm", grouped_mm)
    monkeypatch.setattr(bf16, "grouped_wgrad", grouped_wgrad)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("view", [False, True])
def test_products_and_gradients(view: bool) -> None:
    ends = ends_of(SIZES)
    x = random(130, 192)[:, ::2] if view else random(130, 96)
    weight = random(4, 96, 64).mT if view else random(4, 64, 96)
    check_gradients(
        lambda x, weight: operators.grouped_mm(x, weight, ends),
        lambda x, weight: mxfp8.grouped_mm(x, weight, ends, recipe="none", backend="reference"),
        {"x": x, "weight": weight},
        ROUNDED,
    )


def test_the_gradient_of_a_sum() -> None:
    x, weight = random(130, 96).requires_grad_(), random(4, 64, 96).requires_grad_()
    dx, dw = torch.autograd.grad(operators.grouped_mm(x, weight, ends_of(SIZES)).sum(), (x, weight))
    assert torch.equal(dx[111:], torch.zeros(19, 96))
    assert (dw[1] == 0).all()
    assert dw[0].isfinite().all()


def test_weight_gradients_have_gradients() -> None:
    ends = ends_of(SIZES)
    check_gradients(
        lambda dy, x: operators.grouped_wgrad(dy, x, ends),
        lambda dy, x: plain.grouped_wgrad(dy, x, ends),
        {"dy": random(111, 64), "x": random(111, 96)},
        ROUNDED,
    )


@pytest.mark.parametrize("shape", [(0, 4), (130, 0)], ids=str)
def test_nothing_to_multiply(shape: tuple[int, int]) -> None:
    rows, experts = shape
    x, weight, ends = random(rows, 96), random(experts, 64, 96), torch.zeros(experts, dtype=torch.int32)
    assert torch.equal(operators.grouped_mm(x, weight, ends), torch.zeros(rows, 64, dtype=torch.bfloat16))
    gradient = operators.grouped_wgrad(random(rows, 64), x, ends)
    assert torch.equal(gradient, torch.zeros(experts, 64, 96, dtype=torch.bfloat16))


def test_a_weight_gradient_that_cannot_be_served_is_refused_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16}
    monkeypatch.setattr(dispatch, "facts_of", lambda tensor: hopper)
    x, weight, ends = random(130, 128).requires_grad_(), random(4, 64, 128), ends_of(SIZES)
    dispatch.force("grouped_mm=hopper,grouped_wgrad=hopper")
    try:
        mxfp8.grouped_mm(x, weight, ends, recipe="bf16").sum().backward()
        with pytest.raises(dispatch.UnsupportedError, match=r"'hopper' of grouped_wgrad.*only known as multiples of 1"):
            mxfp8.grouped_mm(x, weight.requires_grad_(), ends, recipe="bf16")
        with torch.no_grad():
            mxfp8.grouped_mm(x, weight, ends, recipe="bf16")
    finally:
        dispatch.force("")


def test_operators_are_well_formed() -> None:
    x, dy, weight = (random(*shape).requires_grad_() for shape in ((130, 96), (130, 64), (4, 64, 96)))
    # Its backward has the weight gradient from another backend, on the CPU from one that asks for the sizes.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (x, weight, ends_of(SIZES))
    torch.library.opcheck(operators._grouped_mm.definition, arguments, test_utils=checks)
    torch.library.opcheck(operators._grouped_wgrad.definition, (dy, x, ends_of(SIZES)))
