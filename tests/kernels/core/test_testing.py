from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, compile_ahead, poisoned_empty, sqnr_db

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

ONE_ROUNDING = Tolerance("one rounding")


def test_poisoned_empty_reaches_every_way_to_allocate_and_ends() -> None:
    x = torch.zeros(2, 3)
    originals = {(torch, "empty"): torch.empty, (torch.Tensor, "new_empty"): torch.Tensor.new_empty}
    with poisoned_empty():
        allocated = [
            torch.empty(4),
            torch.empty(2, 2, dtype=torch.bfloat16),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (2, 1)),
            x.new_empty(3),
            x.new_empty_strided((2,), (1,)),
            torch.empty(3, dtype=torch.float8_e4m3fn).float(),
        ]
        assert all(tensor.isnan().all() for tensor in allocated)
        assert (torch.empty(3, dtype=torch.uint8) == 255).all()
        assert torch.zeros(3).isfinite().all()
        assert torch.empty(2, dtype=torch.int64).shape == (2,)
    assert all(getattr(owner, name) is original for (owner, name), original in originals.items())


def test_poisoned_empty_finds_an_unwritten_element() -> None:
    def forgetful_double(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    x = torch.randn(5, dtype=torch.float64)
    with poisoned_empty(), pytest.raises(AssertionError, match=r"1 of 5 elements are off; worst at \(4,\): got nan"):
        assert_close_to_oracle(forgetful_double(x), 2 * x, ONE_ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tolerance_admits_correct_sums_and_refuses_wrong_ones(dtype: torch.dtype) -> None:
    x = torch.randn(500, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    tolerance = Tolerance("sum of 300 in float32, one rounding", reduction=300)
    oracle = x.double().sum(1)
    assert_close_to_oracle(x.float().sum(1).to(dtype), oracle, tolerance)
    with pytest.raises(AssertionError, match="tolerance: sum of 300 in float32, one rounding"):
        assert_close_to_oracle(x[:, :-1].float().sum(1).to(dtype), oracle, tolerance)


def test_a_sum_accumulated_in_bfloat16_is_refused() -> None:
    x = torch.rand(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = x[:, 0].clone()
    for column in x[:, 1:].t():
        narrow = narrow + column
    with pytest.raises(AssertionError):
        assert_close_to_oracle(narrow, x.double().sum(1), Tolerance("float32 accumulation", reduction=1000))


def test_comparison_message_names_the_worst_element() -> None:
    oracle = torch.ones(2, 3, dtype=torch.float64)
    actual = torch.ones(2, 3)
    actual[1, 2] = 1.5
    with pytest.raises(AssertionError) as failure:
        assert_close_to_oracle(actual, oracle, ONE_ROUNDING, "gradient of q")
    text = str(failure.value)
    assert "gradient of q (torch.float32): 1 of 6 elements are off; worst at (1, 2): got 1.5, expected 1" in text
    assert "maximum absolute error 0.5, relative 0.5" in text


def test_zero_oracle_demands_zeros_and_shapes_must_agree() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    assert_close_to_oracle(torch.zeros(3), zeros, ONE_ROUNDING)
    assert_close_to_oracle(torch.zeros(0), torch.zeros(0, dtype=torch.float64), ONE_ROUNDING)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close_to_oracle(torch.full((3,), 1e-30), zeros, ONE_ROUNDING)
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), expected \(3,\)"):
        assert_close_to_oracle(torch.zeros(1, 3), zeros, ONE_ROUNDING)


def test_sqnr_db() -> None:
    oracle = torch.tensor([3.0, 4.0])
    assert sqnr_db(oracle, oracle) == math.inf
    assert sqnr_db(torch.tensor([3.0, 4.5]), oracle) == pytest.approx(20.0)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x * 1.001


def test_check_gradients_names_the_wrong_one() -> None:
    inputs = {"x": torch.randn(4, 3).t(), "y": torch.randn(3, 4)}
    check_gradients(lambda x, y: x * y, lambda x, y: x * y, inputs, ONE_ROUNDING)
    with pytest.raises(AssertionError, match="gradient of y"):
        check_gradients(lambda x, y: WrongGradient.apply(x, y), lambda x, y: x * y, inputs, ONE_ROUNDING)
    with pytest.raises(AssertionError, match="output"):
        check_gradients(lambda x, y: x * y * 1.001, lambda x, y: x * y, inputs, ONE_ROUNDING)


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    tl.store(out + index, tl.load(x + index, inside) + tl.load(y + index, inside), inside)


@triton.jit
def dot_kernel(x, y, out, k, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, BLOCK):
        a = tl.load(x + row * k + start + column)
        b = tl.load(y + (start + row) * BLOCK + column)
        total = tl.dot(a, b, total)
    tl.store(out + row * BLOCK + column, total)


@pytest.mark.parametrize(
    ("target", "present", "absent"),
    [("sm_90", "wgmma.mma_async", "tcgen05.mma"), ("sm_100", "tcgen05.mma", "wgmma.mma_async")],
)
def test_compile_ahead_of_a_dot(target: str, present: str, absent: str) -> None:
    signature = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "k": "i32"}
    built = compile_ahead(dot_kernel, signature, {"BLOCK": 128}, target=target, num_warps=4, divisible_by_16=["k"])
    assert built.contains(present)
    assert not built.contains(absent)
    assert built.cubin[:4] == b"\x7fELF"
    assert built.shared_bytes >= 2 * 128 * 128 * 2  # two bfloat16 operand tiles
    assert 32 < built.registers <= 255
    assert built.spill_bytes == 0


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compile_ahead_of_an_addition_vectorises(target: str) -> None:
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    built = compile_ahead(add_kernel, signature, {"BLOCK": 1024}, target=target, divisible_by_16=["n"])
    assert built.contains("ld.global.v4.b32")
    assert built.shared_bytes == 0
    scalar = compile_ahead(add_kernel, signature, {"BLOCK": 1024}, target=target)
    assert not scalar.contains("ld.global.v4.b32")


def test_compile_ahead_reports_spills() -> None:
    # 128 x 128 float32 sums over 4 warps are 128 registers a thread, more than what is allowed here.
    signature = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "k": "i32"}
    built = compile_ahead(dot_kernel, signature, {"BLOCK": 128}, target="sm_90", divisible_by_16=["k"], maxnreg=96)
    assert built.registers <= 96
    assert built.spill_bytes > 0
