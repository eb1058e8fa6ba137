"""The linear layer of quantised operands for Hopper: on the CPU with stand-ins for its kernels, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import mxfp8
from kernels.mxfp8.grouped import BYTES, VALUES, Quantized, matrix_scales
from kernels.testing import Tolerance, assert_close_to_oracle, poisoned_empty
from tests.kernels.core.devices import on_hopper

pytest.importorskip("triton")
from kernels.mxfp8.hopper import linear as hopper
from tests.kernels.moe import moe_standins
from tests.kernels.moe.moe_cases import same_codes
from tests.kernels.moe.test_moe_operands import in_form
from tests.kernels.mxfp8.test_grouped_gemm import FP8_SUMS

N, K = 384, 256
ROUNDED = Tolerance("float32 sums of up to 300 products, a result rounded before its bias and after", roundings=2)
GPU_SUMS = Tolerance(f"{FP8_SUMS.reason}, and of a sum with the bias", roundings=FP8_SUMS.roundings + 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rounded(x: Tensor, axis: int, square: bool = False) -> Tensor:
    """x rounded to MXFP8 in groups of 128 along `axis`, as float64."""
    quantized = mxfp8.quantize(x.cpu(), axis, block_size=128, square=square, backend="reference")
    return mxfp8.dequantize(quantized, backend="reference").double().to(x.device)


def quantized(x: Tensor, rows: bool, columns: bool, column_form: int) -> tuple[Quantized, Quantized]:
    padded = pad(x, (0, 0, 0, -len(x) % 128))

    def operand(axis: int, form: int, wanted: bool) -> Quantized:
        operand = Quantized(*moe_standins.quantized(padded, axis, 128, square=form == VALUES), 128)
        result = in_form(operand, form)._replace(differ=None)
        codes, scales = (each if wanted else each.new_empty(0, 0) for each in result[:2])
        return Quantized(codes, scales, 128)

    return operand(1, BYTES, rows), operand(0, column_form, columns)


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "quantized", quantized)
    monkeypatch.setattr(hopper.quantize, "quantize_both", moe_standins.quantize_both)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, tolerance: Tolerance) -> list[Tensor]:
    """Result and gradients, each against float64 products of the operands that it should have."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
    y = hopper.linear(leaves[0], leaves[1], None if bias is None else leaves[2], torch.bfloat16, 128)
    dy = random(*y.shape, seed=9).to(y)
    dx, dw, *db = torch.autograd.grad(y, leaves, dy)
    assert [g.dtype for g in (y, dx, dw, *db)] == [torch.bfloat16, *(leaf.dtype for leaf in leaves)]
    exact = rounded(x.bfloat16(), 1) @ rounded(weight, 1, square=True).t()
    assert_close_to_oracle(y.detach(), exact if bias is None else exact + bias.double(), tolerance, "y")
    assert_close_to_oracle(dx.bfloat16(), rounded(dy, 1) @ rounded(weight, 0, square=True), tolerance, "dx")
    exact = rounded(dy, 0).t() @ rounded(x.bfloat16(), 0, square=True)
    assert_close_to_oracle(dw.bfloat16(), exact, tolerance, "dw")
    if db:
        assert_close_to_oracle(db[0].bfloat16(), dy.double().sum(0), tolerance, "db")
    return [y.detach(), dx, dw, *db]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_products_of_quantised_operands(standins: None, rows: int, dtype: torch.dtype) -> None:
    check(random(rows, K).to(dtype), random(N, K), random(N) if dtype is torch.float32 else None, ROUNDED)


def test_only_what_is_needed_is_kept_and_computed(standins: None) -> None:
    x, weight = random(300, K).bfloat16(), random(N, K)
    expected = hopper.linear(x, weight, None, torch.bfloat16, 128)
    dy = random(300, N).bfloat16()
    grads = {}
    for needs in ((True, True), (True, False), (False, True)):
        leaves = [each.detach().requires_grad_(needed) for each, needed in zip((x, weight), needs, strict=True)]
        y = hopper.linear(*leaves, None, torch.bfloat16, 128)
        assert torch.equal(y, expected)
        kept = [tensor.numel() * tensor.element_size() for tensor in y.grad_fn.saved_tensors]
        # A byte for each element of x [384 rows] and of the weight, and scales.
        assert sum(kept) < 1.1 * (384 * K * needs[1] + N * K * needs[0])
        y.backward(dy)
        for name, leaf, needed in zip("xw", leaves, needs, strict=True):
            assert (leaf.grad is not None) == needed
            if needed:
                assert torch.equal(grads.setdefault(name, leaf.grad), leaf.grad)


def test_no_rows_and_second_derivatives(standins: None) -> None:
    x, weight = torch.empty(0, K).bfloat16().requires_grad_(), random(N, K).requires_grad_()
    y = hopper.linear(x, weight, None, torch.bfloat16, 128)
    assert y.shape == (0, N)
    assert not torch.autograd.grad(y.sum(), weight)[0].any()
    y = hopper.linear(random(5, K).requires_grad_(), weight, None, torch.bfloat16, 128)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.float().square().sum(), weight, create_graph=True)


def test_operators_are_well_formed(standins: None) -> None:
    x, weight = random(130, K).bfloat16().requires_grad_(), random(N, K).requires_grad_()
    checks = ("test_schema", "test_faketensor")
    for keep in ((True, True), (False, True), (False, False)):
        torch.library.opcheck(hopper._forward.definition, (x, weight, None, *keep), test_utils=checks)
    kept = list(hopper._forward(x.detach(), weight.detach(), None, True, True)[1:])
    dy = random(130, N).bfloat16()
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(hopper._backward.definition, (dy, kept, needs, torch.float32), test_utils=checks[1:])


@on_hopper
@pytest.mark.parametrize("rows", [1, 128, 300, 1000])
def test_gpu_codes_bit_for_bit(rows: int) -> None:
    x = (random(rows, K) * torch.exp2(torch.randint(-9, 9, (rows, 1)).float())).bfloat16()
    for column_form in (VALUES, BYTES):
        with poisoned_empty():
            results = hopper.quantized(x.cuda(), True, True, column_form)
        for result, expected in zip(results, quantized(x, True, True, column_form), strict=True):
            assert same_codes(result.codes, expected.codes)
            assert torch.equal(matrix_scales(result).cpu(), matrix_scales(expected))


@on_hopper
@pytest.mark.parametrize(("n", "k"), [(N, K), (1024, 1024), (3072, 512)])
@pytest.mark.parametrize("rows", [1, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_products(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(rows, k).cuda().to(dtype), random(n, k).cuda().to(dtype), random(n).cuda()
    with poisoned_empty():
        first, again = (check(x, weight, bias, GPU_SUMS) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@on_hopper
def test_gpu_graphs_quantise_the_weights_of_each_replay() -> None:
    x, weight = (random(*shape).cuda().requires_grad_() for shape in ((300, K), (N, K)))
    dy = random(300, N).cuda().bfloat16()

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            y = mxfp8.linear(x, weight, recipe="mxfp8_g128", backend="hopper")
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, -3.0):
        with torch.no_grad():
            weight.mul_(scale)
        graph.replay()
        for ours, eager in zip(captured, step(), strict=True):
            assert torch.equal(ours, eager)
