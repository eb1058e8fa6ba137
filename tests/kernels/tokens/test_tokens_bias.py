"""A linear layer whose bias's gradient a kernel makes: interpreted, in compiled code, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.testing import Tolerance, check_gradients, poisoned_empty
from kernels.tokens import biased_linear
from kernels.tokens.triton import activation, bias
from tests.kernels.tokens.test_tokens import HAS_TRITON, interpreted

SHAPES = [(70, 6, 48), (0, 4, 16), (1, 3, 5), (3, 2, 300)]
SUMMED = Tolerance("sums over up to 20,000 rows in float32, the result rounded", roundings=2, reduction=20000)


def check(function: Callable[..., Tensor], shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    rows, inner, width = shape
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (rows, 2, inner), "weight": (width, inner), "bias": (width,)}
    inputs = {name: torch.randn(size, generator=generator).to(device, dtype) for name, size in sizes.items()}
    with poisoned_empty():
        check_gradients(function, F.linear, inputs, SUMMED)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_the_interpreter(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    monkeypatch.setattr(bias, "processors", lambda device: 1)  # each program has several tiles of rows
    monkeypatch.setattr(activation, "_COLUMNS", 128)  # rows of 300 are split
    check(bias.biased_linear, shape, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_only_a_bias_that_learns_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Tensor] = []
    monkeypatch.setattr(bias, "column_sum", lambda x, dtype: (summed.append(x), x.sum((0, 1)).to(dtype))[1])
    x, weight, offset = torch.randn(3, 2, 4, requires_grad=True), torch.randn(5, 4), torch.randn(5)
    expected = torch.autograd.grad(F.linear(x, weight, offset).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(bias.biased_linear(x, weight, offset).sum(), x)[0], expected)
    with torch.no_grad():
        assert torch.equal(bias.biased_linear(x, weight, offset.requires_grad_()), F.linear(x, weight, offset))
    assert not summed
    # A bias wider than what is multiplied gets a gradient of its own dtype.
    with torch.autocast("cpu", torch.bfloat16):
        out = bias.biased_linear(x, weight, offset)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert offset.grad is not None
    assert offset.grad.tolist() == [6.0] * 5
    assert len(summed) == 1


def test_in_compiled_code_and_bad_shapes() -> None:
    tensors = [torch.randn(size, requires_grad=True) for size in ((3, 4), (5, 4), (5,))]
    compiled = torch.compile(biased_linear, backend="aot_eager", fullgraph=True)
    ours, expected = (torch.autograd.grad(function(*tensors).sum(), tensors) for function in (compiled, F.linear))
    torch.testing.assert_close(ours, expected)
    with pytest.raises(ValueError, match=r"bias must be \[5\] for weight \(5, 4\), got \(4,\)"):
        biased_linear(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (10000, 64, 128), (300, 8, 4100)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(partial(biased_linear, backend="triton"), shape, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_opcheck() -> None:
    torch.library.opcheck(bias.column_sum.definition, (torch.randn(5, 48, device="cuda"), torch.bfloat16))
