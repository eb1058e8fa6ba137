"""Linear and grouped products on MXFP8 operands: each of the three products against float64 on the right operands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernels import mxfp8
from kernels.mxfp8.matmul import aligned_groups
from kernels.mxfp8.plain import torch_grouped_mm
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, sqnr_db

# Products of operands that have four significant bits are exact in float32; their sum is not.
ACCUMULATION = Tolerance("float32 accumulation of up to 256 exact products, one rounding of the result", reduction=256)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rounded(x: Tensor, axis: int, group: int = 32, square: bool = False) -> Tensor:
    """x rounded to MXFP8 with blocks along `axis`, as float64."""
    return mxfp8.dequantize(mxfp8.quantize(x, axis, block_size=group, square=square)).double()


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize(("m", "k", "n"), [(64, 96, 32), (5, 40, 7), (1, 1, 1), (33, 100, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_multiplies_quantised_operands(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, weight, bias, dy = random(m, k, dtype=dtype), random(n, k), random(n), random(m, n, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = mxfp8.linear(x, weight, bias, recipe="mxfp8")
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, torch.float32, torch.float32)
    assert_close_to_oracle(y.detach(), (rounded(x, 1) @ rounded(weight, 1).t() + bias).detach(), ACCUMULATION)
    assert_close_to_oracle(dx, rounded(dy, 1) @ rounded(weight, 0), ACCUMULATION, "dx")
    assert_close_to_oracle(dw, rounded(dy, 0).t() @ rounded(x, 0), ACCUMULATION, "dw")
    assert_close_to_oracle(db, dy.double().sum(0), ACCUMULATION, "db")


def uneven(length: int) -> Tensor:
    """Magnitudes that alternate between 2^-20 and 2^20: a block across them flushes the small ones to zero."""
    return torch.tensor([2.0**-20, 2.0**20]).repeat(-(-length // 2))[:length]


@pytest.mark.parametrize("grouped", [False, True])
def test_blocks_run_along_the_reduction_axis_of_each_product(grouped: bool) -> None:
    # Magnitudes vary along the axis that survives and are divided out of the result. Blocks along any other axis, or
    # a quantisation that is used for two products, would lose the small half: 3 dB instead of 28.5.
    m, k, n = 64, 96, 32
    x, weight, dy = random(m, k), random(n, k), random(m, n)

    def products(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
        leaves = (x.requires_grad_(), weight.requires_grad_())
        if grouped:
            y = mxfp8.grouped_mm(leaves[0], leaves[1][None], ends_of([m]), recipe="mxfp8")
        else:
            y = mxfp8.linear(*leaves, recipe="mxfp8")
        return [y, *torch.autograd.grad(y, leaves, dy)]

    rows, columns, hidden = uneven(m)[:, None], uneven(k)[None], uneven(n)
    y, _, _ = products(x * rows, weight * hidden[:, None], dy)
    assert sqnr_db(y / (rows * hidden), x @ weight.t()) > 27.5
    _, dx, _ = products(x.clone(), weight * columns, dy * rows)
    assert sqnr_db(dx / (rows * columns), dy @ weight) > 27.5
    _, _, dw = products(x * columns, weight.clone(), dy * hidden)
    assert sqnr_db(dw / (hidden[:, None] * columns), dy.t() @ x) > 27.5


def test_linear_signal_to_noise() -> None:
    x, weight, dy = random(256, 512).requires_grad_(), random(128, 512).requires_grad_(), random(256, 128)
    y = mxfp8.linear(x, weight, recipe="mxfp8")
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    # Two operands with 31.5 dB each, independent errors: 28.5 dB, whatever the length of the sum.
    for result, exact in ((y, x @ weight.t()), (dx, dy @ weight), (dw, dy.t() @ x)):
        assert 28.0 < sqnr_db(result, exact) < 29.5


@pytest.mark.parametrize("shape", [(4, 3, 40), (40,), (0, 40)])
@pytest.mark.parametrize("recipe", mxfp8.RECIPES)
def test_linear_leading_shape(shape: tuple[int, ...], recipe: str) -> None:
    x, weight = random(*shape).requires_grad_(), random(6, 40).requires_grad_()
    y = mxfp8.linear(x, weight, recipe=recipe)
    assert y.shape == (*shape[:-1], 6)
    y.sum().backward()
    assert x.grad.shape == x.shape
    if y.numel() == 0:
        assert (weight.grad == 0).all()


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    slack=st.integers(0, 3),
    features=st.sampled_from([(8, 32), (5, 40)]),
)
@settings(max_examples=25, deadline=None)
def test_grouped_mm_recipes_against_a_loop(sizes: list[int], slack: int, features: tuple[int, int]) -> None:
    n, k = features
    total, offsets = sum(sizes), ends_of(sizes)
    x, weight, dy = random(total + slack, k), random(len(sizes), n, k), random(total + slack, n)
    x = x * torch.exp2(torch.arange(k) % 10 - 5.0)  # features so far apart that a shared scale costs some of them bits
    # Rows that belong to no expert must not be read at all.
    x[total:] = math.nan
    for recipe in mxfp8.RECIPES:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = mxfp8.grouped_mm(x, weight, offsets, recipe=recipe)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        # The recipe's own rounding of its results is all that this one adds.
        rounding = torch.bfloat16 if recipe == "bf16" else torch.float32
        y, dx, dw = (result.detach().to(rounding) for result in (y, dx, dw))
        start = 0
        for expert, end in enumerate(offsets.tolist()):
            x_rows, dy_rows, matrix = x[start:end].detach(), dy[start:end], weight[expert].detach()
            operands = (x_rows, matrix, dy_rows, matrix, dy_rows, x_rows)
            if recipe in mxfp8.QUANTIZED:
                group = mxfp8.QUANTIZED[recipe]
                # Second operands of products are in squares.
                operands = [
                    rounded(t, axis, group, group == 128 and i % 2 == 1)
                    for i, (t, axis) in enumerate(zip(operands, (1, 1, 1, 0, 0, 0), strict=True))
                ]
            elif recipe == "bf16":
                operands = [t.bfloat16() for t in operands]
            fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x = (t.double() for t in operands)
            assert_close_to_oracle(y[start:end], fprop_x @ fprop_w.t(), ACCUMULATION, f"{recipe} y")
            assert_close_to_oracle(dx[start:end], dgrad_dy @ dgrad_w, ACCUMULATION, f"{recipe} dx")
            assert_close_to_oracle(dw[expert], wgrad_dy.t() @ wgrad_x, ACCUMULATION, f"{recipe} dw")
            start = end
        assert (y[total:] == 0).all()
        assert (dx[total:] == 0).all()


def test_wgrad_blocks_do_not_straddle_experts() -> None:
    # Two experts meet in the middle of 32 rows and differ by 2^40: in a shared block the small one's rows become zeros.
    sizes = [16, 16, 50]
    magnitudes = torch.tensor([2.0**-20, 2.0**20, 1.0]).repeat_interleave(torch.tensor(sizes))[:, None]
    x, weight, dy = random(82, 64) * magnitudes, random(3, 32, 64).requires_grad_(), random(82, 32)
    (dw,) = torch.autograd.grad(mxfp8.grouped_mm(x, weight, ends_of(sizes), recipe="mxfp8"), weight, dy)
    for gradient, dy_rows, x_rows in zip(dw, dy.split(sizes), x.split(sizes), strict=True):
        # 28.5 dB expected as for any product of two operands; an expert flushed to zero has 0 dB.
        assert sqnr_db(gradient, dy_rows.t() @ x_rows) > 27


@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=6), slack=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_aligned_groups(sizes: list[int], slack: int) -> None:
    target, capacity, ends = aligned_groups(ends_of(sizes), sum(sizes) + slack)
    assert capacity % 32 == 0
    assert capacity >= ends[-1]
    expected, start = [], 0
    for size in sizes:
        expected += range(start, start + size)
        start += -(-size // 32) * 32
    assert target.tolist() == expected + [capacity] * slack
    assert ends.tolist() == ends_of([-(-size // 32) * 32 for size in sizes]).tolist()


def test_aligned_groups_do_not_sync_with_the_host() -> None:
    target, capacity, ends = aligned_groups(torch.empty(5, dtype=torch.int32, device="meta"), 100)
    assert (target.shape, capacity, ends.shape) == ((100,), 256, (5,))


@pytest.mark.parametrize("sizes", [[0, 33, 7, 0, 20], [0, 0, 0, 0, 0], [64, 0, 0, 0, 0]])
def test_grouped_mm_without_a_loop_equals_the_loop(sizes: list[int]) -> None:
    # torch._grouped_mm also exists on the CPU, where it is not offered but can be held to the reference.
    x, weight, offsets = random(64, 16).bfloat16(), random(5, 24, 16).bfloat16(), ends_of(sizes)
    check_gradients(
        lambda x, weight: torch_grouped_mm(x, weight, offsets),
        lambda x, weight: mxfp8.grouped_mm(x, weight, offsets, recipe="none"),
        {"x": x, "weight": weight},
        Tolerance("bfloat16 result of float32 sums", reduction=64),
    )


def test_grouped_mm_without_rows() -> None:
    weight = random(2, 8, 16).bfloat16().requires_grad_()
    y = torch_grouped_mm(random(0, 16).bfloat16(), weight, ends_of([0, 0]))
    assert y.shape == (0, 8)
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert (gradient == 0).all()


def test_grouped_mm_takes_either_orientation_of_the_weight() -> None:
    x, offsets = random(10, 16).bfloat16(), ends_of([4, 6])
    transposed = random(2, 16, 24).bfloat16().transpose(1, 2)
    assert torch.equal(torch_grouped_mm(x, transposed, offsets), torch_grouped_mm(x, transposed.contiguous(), offsets))


@pytest.mark.parametrize("recipe", mxfp8.RECIPES)
def test_autocast_output_and_float32_master_gradients(recipe: str) -> None:
    x, weight = random(20, 32).requires_grad_(), random(2, 8, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        grouped = mxfp8.grouped_mm(x, weight, ends_of([12, 8]), recipe=recipe)
        dense = mxfp8.linear(x, weight[0], recipe=recipe)
    assert grouped.dtype is dense.dtype is torch.bfloat16
    gradients = torch.autograd.grad(grouped.sum() + dense.sum(), (x, weight))
    assert all(gradient.dtype is torch.float32 for gradient in gradients)


def test_mxfp8_weights_are_quantised_from_the_float32_master_under_autocast() -> None:
    # 17 rounds to 16 in E4M3 (ties to even) and its float32 successor to 18, but bfloat16 would make it 17 again.
    weight = torch.tensor([[448.0, 17.00001]])
    with torch.autocast("cpu", torch.bfloat16):
        y = mxfp8.linear(torch.tensor([[0.0, 1.0]]), weight, recipe="mxfp8")
    assert y.item() == 18.0


def test_nan_spoils_only_what_reads_it() -> None:
    x = random(3, 64)
    x[1, 2] = math.nan
    y = mxfp8.linear(x, random(4, 64), recipe="mxfp8")
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_second_derivative_is_an_error_and_not_that_of_some_of_its_paths(grouped: bool) -> None:
    x, weight = random(8, 32).requires_grad_(), random(16, 32).requires_grad_()
    if grouped:
        y = mxfp8.grouped_mm(x, weight[None], ends_of([8]), recipe="mxfp8")
    else:
        y = mxfp8.linear(x, weight, recipe="mxfp8")
    loss = y.square().sum() + (x**3).sum()
    with pytest.raises(RuntimeError, match="MXFP8 products have no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()


def test_compiles_into_one_graph() -> None:
    x, weight, bias = (tensor.requires_grad_() for tensor in (random(6, 40), random(8, 40), random(8)))
    compiled = torch.compile(mxfp8.linear, backend="aot_eager", fullgraph=True)
    y, again = (function(x, weight, bias, recipe="mxfp8") for function in (mxfp8.linear, compiled))
    assert torch.equal(y, again)
    for gradient, same in zip(*(torch.autograd.grad(o.sum(), (x, weight, bias)) for o in (y, again)), strict=True):
        assert torch.equal(gradient, same)


def test_compilers_see_no_type_that_some_do_not_know() -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(mxfp8.linear(x, weight, recipe="mxfp8").sum(), (x, weight))

    graph = make_fx(step)(random(4, 32).requires_grad_(), random(8, 32).requires_grad_())
    dtypes = {node.meta["tensor_meta"].dtype for node in graph.graph.nodes if "tensor_meta" in node.meta}
    assert torch.float8_e4m3fn in dtypes
    assert torch.float8_e8m0fnu not in dtypes  # Inductor for the CPU


def test_bad_inputs_are_named() -> None:
    x, weight = random(4, 8), random(2, 3, 8)
    with pytest.raises(ValueError, match="unknown recipe 'fp8'; known: none, bf16, mxfp8"):
        mxfp8.linear(x, weight[0], recipe="fp8")
    with pytest.raises(ValueError, match="x has 8 features and weight takes 9"):
        mxfp8.linear(x, random(3, 9), recipe="mxfp8")
    with pytest.raises(ValueError, match=r"ends must be \[2\], one end per expert as in offsets\[1:\], got \[3\]"):
        mxfp8.grouped_mm(x, weight, ends_of([1, 1, 2]), recipe="bf16")
    with pytest.raises(ValueError, match=r"must not decrease and must end by the number of rows 4, got \[3, 5\]"):
        mxfp8.grouped_mm(x, weight, ends_of([3, 2]), recipe="none")
    with pytest.raises(ValueError, match="one dtype, got x torch.bfloat16, weight torch.float32"):
        mxfp8.grouped_mm(x.bfloat16(), weight, ends_of([3, 1]), recipe="none")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        mxfp8.grouped_mm(x, weight, ends_of([3, 1]), recipe="bf16", backend="torch")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_grouped_mm_on_a_gpu(recipe: str) -> None:
    sizes = [0, 300, 31, 0, 129]
    x, weight, dy = random(480, 64).bfloat16(), random(5, 128, 64), random(480, 128).bfloat16()

    def run(device: str) -> list[Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        y = mxfp8.grouped_mm(*leaves, ends_of(sizes).to(device), recipe=recipe)
        return [tensor.cpu() for tensor in (y, *torch.autograd.grad(y, leaves, dy.to(device)))]

    tolerance = Tolerance("both round float32 sums of up to 300 products to bfloat16", roundings=2, reduction=300)
    for actual, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert_close_to_oracle(actual.bfloat16(), expected.double(), tolerance)


@pytest.mark.gpu
def test_mxfp8_linear_on_a_gpu_equals_the_cpu() -> None:
    x, weight, bias, dy = random(70, 96), random(64, 96), random(64), random(70, 64)

    def run(device: str) -> list[Tensor]:
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight, bias)]
        y = mxfp8.linear(*leaves, recipe="mxfp8")
        return [tensor.cpu() for tensor in (y, *torch.autograd.grad(y, leaves, dy.to(device)))]

    for actual, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert_close_to_oracle(actual, expected.double(), ACCUMULATION)
