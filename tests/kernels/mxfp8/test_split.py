"""float32 layers on bfloat16 tensor cores: as exact as float32, with x and its gradient in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import mxfp8
from kernels.mxfp8 import split
from kernels.testing import Tolerance, assert_close_to_oracle

SUMS = Tolerance("three float32 sums of up to 1024 exact products, which tensor cores truncate", reduction=4 * 3 * 1024)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def check(function, m: int, k: int, n: int, device: str, bias: bool = False) -> None:
    x, weight = random(m, k).bfloat16().to(device).requires_grad_(), random(n, k).to(device).requires_grad_()
    b = random(n).to(device).requires_grad_() if bias else None
    leaves = [x, weight, *([b] if bias else [])]
    with torch.autocast(device, torch.bfloat16):
        y = function(x, weight, b)
    dy = random(m, n, scale=1e-3).to(device)
    dx, dw, *db = torch.autograd.grad(y, leaves, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = x.double() @ weight.double().t() + (b.double() if bias else 0)
    assert_close_to_oracle(y.detach(), exact.detach(), SUMS, "y")
    assert_close_to_oracle(dx, (dy.double() @ weight.double()).detach(), SUMS, "dx")
    assert_close_to_oracle(dw, (dy.double().t() @ x.double()).detach(), SUMS, "dw")
    if bias:
        assert_close_to_oracle(db[0], dy.double().sum(0), SUMS, "db")


SIZES = [(300, 256, 8), (1, 1, 1), (33, 100, 5), (0, 64, 8)]


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_as_exact_as_float32(m: int, k: int, n: int, bias: bool) -> None:
    check(split.linear, m, k, n, "cpu", bias)


def test_three_parts_are_the_number() -> None:
    x = random(1000) * torch.exp2(torch.arange(1000) % 200 - 100.0)
    parts = split.split(x)
    assert all(part.dtype is torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), x.double())


def test_bfloat16_weights_would_not_do() -> None:
    # One rounding of the weights to bfloat16 errs 2^-9; here the product errs as float32 does.
    x, weight = random(50, 512).bfloat16(), random(8, 512)
    exact = x.double() @ weight.double().t()
    error = (split.linear(x, weight, None) - exact).abs().max()
    assert error < 1e-3 * (x.float() @ weight.bfloat16().float().t() - exact).abs().max()


def test_gradients_that_are_not_needed_and_second_ones() -> None:
    x, weight = random(6, 16).bfloat16(), random(4, 16)
    for leaf, other in ((x, weight), (weight, x)):
        leaf.requires_grad_()
        other.requires_grad_(False)
        (gradient,) = torch.autograd.grad(split.linear(x, weight, None).square().sum(), leaf, create_graph=True)
        (expected,) = torch.autograd.grad(split.reference(x, weight, None).square().sum(), leaf, create_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)
        seconds = (torch.autograd.grad(each.sum(), leaf)[0] for each in (gradient, expected))
        torch.testing.assert_close(*seconds, rtol=2e-2, atol=2e-2)


def test_float64_is_multiplied_as_it_is() -> None:
    y = mxfp8.float32_linear(random(2, 3, 16).double(), random(4, 16).double(), random(4))
    assert (y.shape, y.dtype) == ((2, 3, 4), torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("m", "k", "n"), [*SIZES, (5000, 1024, 8), (1000, 512, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_gpu_as_exact_as_float32(m: int, k: int, n: int, bias: bool) -> None:
    check(split.linear, m, k, n, "cuda", bias)
