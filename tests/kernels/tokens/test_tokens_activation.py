"""Bias, activation and factor: the specification by its formula, the kernels interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.testing import Tolerance, check_gradients, poisoned_empty
from kernels.tokens import activate
from kernels.tokens.triton import activation
from tests.kernels.tokens.test_tokens import EXACT, HAS_TRITON, ROUNDED, interpreted

SUMMED = Tolerance("a sum of all rows in float32, results rounded", roundings=4, reduction=30_000)
ACTIVATED_SHAPES = [(5, 48), (0, 16), (1, 5), (70, 300), (3, 4, 64)]


def check_activation(
    function: Callable[..., Tensor], shape: tuple[int, ...], name: str, factor: bool, dtype: torch.dtype, device: str,
    tolerance: Tolerance,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    z, other, bias = (torch.randn(each, generator=generator).double() for each in (shape, shape, shape[-1:]))
    inputs = {"z": z.to(device, dtype), "bias": bias.to(device, dtype)}
    if factor:
        inputs["factor"] = other.to(device, dtype)

    def expected(z: Tensor, bias: Tensor, factor: Tensor | None = None) -> Tensor:
        u = z + bias
        y = u / (1 + (-u).exp()) if name == "silu" else u
        return y if factor is None else y * factor

    def ours(z: Tensor, bias: Tensor, factor: Tensor | None = None) -> Tensor:
        return function(z, bias, name, factor)

    with poisoned_empty():
        check_gradients(ours, expected, inputs, tolerance)


@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("name", ["none", "silu"])
def test_activation_reference_is_the_formula(name: str, factor: bool) -> None:
    check_activation(partial(activate, backend="reference"), (3, 4, 6), name, factor, torch.float64, "cpu", EXACT)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("name", ["none", "silu"])
@pytest.mark.parametrize("shape", ACTIVATED_SHAPES, ids=str)
def test_activation_in_the_interpreter(
    shape: tuple[int, ...], name: str, factor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    monkeypatch.setattr(activation, "processors", lambda device: 1)  # each program has several tiles of rows
    monkeypatch.setattr(activation, "_COLUMNS", 128)  # rows of 300 are split
    check_activation(activation.activate, shape, name, factor, torch.float32, "cpu", ROUNDED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("name", ["none", "silu"])
@pytest.mark.parametrize("shape", [*ACTIVATED_SHAPES, (30000, 512), (3, 2048), (3, 4100), (20000, 4096)], ids=str)
def test_activation(shape: tuple[int, ...], name: str, factor: bool, dtype: torch.dtype) -> None:
    check_activation(partial(activate, backend="triton"), shape, name, factor, dtype, "cuda", SUMMED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    last = 2**24 + 3
    z, factor, grad = (torch.randn(last + 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    grad[4:-4] = 0  # the gradient of the bias is that of both ends
    bias = torch.randn(128, device="cuda", requires_grad=True)
    leaves = [z.requires_grad_(), factor.requires_grad_()]
    result = activate(z, bias, "silu", factor, backend="triton")
    *gradients, d_bias = torch.autograd.grad(result, [*leaves, bias], grad)
    sums = torch.zeros_like(d_bias)
    for some in (slice(0, 4), slice(last - 3, last + 1)):
        ends = [leaf.detach()[some].double().requires_grad_() for leaf in leaves]
        expected = activate(ends[0], bias, "silu", ends[1], backend="reference")
        *wanted, d = torch.autograd.grad(expected, [*ends, bias], grad[some].double())
        sums += d
        for one, other in zip((result, *gradients), (expected, *wanted), strict=True):
            assert ((one[some] - other).norm() / other.norm()).item() < 1e-2
    assert ((d_bias - sums).norm() / sums.norm()).item() < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_opcheck() -> None:
    x = torch.randn(5, 2, 48, device="cuda", requires_grad=True)
    for factor in (x[:, 1], None):
        torch.library.opcheck(activation.activate.definition, (x[:, 0], x[0, 1], "silu", factor))
