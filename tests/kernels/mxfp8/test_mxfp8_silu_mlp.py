"""Two quantised linear layers as one operator: on the CPU with stand-ins for its kernels, compiled ahead, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import mxfp8
from kernels.mxfp8.grouped import BYTES, VALUES, Quantized, matrix_scales
from kernels.testing import Tolerance, assert_close_to_oracle, compile_ahead, poisoned_empty
from kernels.tokens import activate
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.moe.moe_cases import same_codes

pytest.importorskip("triton")
from kernels.mxfp8.hopper import linear as hopper_linear
from kernels.mxfp8.hopper import silu_mlp as hopper
from kernels.mxfp8.hopper.quantize import activation as fused
from kernels.mxfp8.hopper.quantize.pairs import WARPS
from tests.kernels.moe import moe_standins
from tests.kernels.mxfp8.test_mxfp8_linear import quantized as quantized_standin
from tests.kernels.mxfp8.test_mxfp8_linear import random

D, HIDDEN, E = 256, 384, 128
NAMES = ("x", "inner", "bias", "outer", "outer_bias", "factor")
BIASES = Tolerance("float32 sums over up to 4,096 rows, in another order", reduction=4096)
Operands = tuple[Quantized, Quantized]


def inputs(rows: int, factor: bool = True, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    tensors = [
        random(rows, D).to(dtype),
        random(HIDDEN, D) / D**0.5,
        random(HIDDEN),
        random(E, HIDDEN) / HIDDEN**0.5,
        random(E),
        *([random(rows, E, seed=1).bfloat16()] if factor else []),
    ]
    return [tensor.to(device).requires_grad_() for tensor in tensors]


def by_single_operators(
    x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor, factor: Tensor | None = None
) -> Tensor:
    """The layers for Hopper, and a pass for what stands between them."""
    hidden = activate(hopper_linear.linear(x, inner, None, torch.bfloat16, 128), bias, "silu")
    return activate(hopper_linear.linear(hidden, outer, None, torch.bfloat16, 128), outer_bias, factor=factor)


def as_one(*tensors: Tensor) -> Tensor:
    return hopper.silu_mlp(*tensors, *[None] * (6 - len(tensors)), torch.bfloat16, 128)


def grads_of(y: Tensor, leaves: list[Tensor], **options: bool) -> dict[str, Tensor]:
    needed = {name: leaf for name, leaf in zip(NAMES, leaves, strict=False) if leaf.requires_grad}
    dy = random(*y.shape, seed=9).to(y)
    return dict(zip(needed, torch.autograd.grad(y, list(needed.values()), dy, **options), strict=True))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, but for the gradients of biases, whose sums are in another order."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        if "bias" in name:
            assert_close_to_oracle(value, expected[name].double(), BIASES, name)
        else:
            assert torch.equal(value, expected[name]), name


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of kernels: PyTorch's gradients of `activate`, then a quantisation."""

    def silu_quantized(z: Tensor, bias: Tensor, columns: bool) -> Operands:
        return quantized_standin(activate(z, bias, "silu"), True, columns, VALUES)

    def gradients(name: str, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            return torch.autograd.grad(activate(*leaves[:2], name, *leaves[2:]), leaves, grad)

    def silu_gradient(grad: Tensor, z: Tensor, bias: Tensor, rows: bool, columns: bool) -> tuple[object, ...]:
        dz, d_bias = gradients("silu", grad, z, bias)
        return *quantized_standin(dz, rows, columns, BYTES), d_bias

    def factor_gradient(
        grad: Tensor, z: Tensor, bias: Tensor, factor: Tensor, rows: bool, columns: bool
    ) -> tuple[object, ...]:
        dz, d_bias, d_factor = gradients("none", grad, z, bias, factor)
        return *quantized_standin(dz, rows, columns, BYTES), d_bias, d_factor

    for module in (hopper, hopper_linear):
        monkeypatch.setattr(module, "quantized", quantized_standin)
    monkeypatch.setattr(hopper_linear.quantize, "quantize_both", moe_standins.quantize_both)
    monkeypatch.setattr(hopper, "silu_quantized", silu_quantized)
    monkeypatch.setattr(hopper, "silu_gradient_quantized", silu_gradient)
    monkeypatch.setattr(hopper, "factor_gradient_quantized", factor_gradient)
    monkeypatch.setattr(hopper, "column_sum", lambda x, dtype: x.sum(0, dtype=dtype))


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (256, torch.float32), (300, torch.bfloat16)])
def test_the_single_operators_results(standins: None, rows: int, dtype: torch.dtype, factor: bool) -> None:
    leaves = inputs(rows, factor, dtype)
    ours, theirs = as_one(*leaves), by_single_operators(*leaves)
    assert torch.equal(ours, theirs)
    assert_equal(grads_of(ours, leaves), grads_of(theirs, leaves))
    with torch.no_grad():
        assert torch.equal(as_one(*leaves), theirs)


@pytest.mark.parametrize("factor", [False, True])
def test_only_what_is_needed_is_kept_and_computed(standins: None, factor: bool) -> None:
    leaves = inputs(300, factor)
    expected = grads_of(by_single_operators(*leaves), leaves)
    for needed in [{name} for name in expected] + [{"x", "outer"}, {"inner", "outer_bias"}, {"bias", "factor"}]:
        if needed <= expected.keys():
            chosen = [leaf.detach().requires_grad_(name in needed) for name, leaf in zip(NAMES, leaves, strict=False)]
            assert_equal(
                grads_of(as_one(*chosen), chosen), {name: expected[name] for name in expected if name in needed}
            )


def saved_bytes(function: Callable[..., Tensor], leaves: list[Tensor]) -> int:
    """Of tensors that autograd keeps for the backward, parameters and inputs apart."""
    storages = {}
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage  # kept alive, so that no other one has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*leaves)
    return sum(map(len, storages.values()))


@pytest.mark.parametrize("factor", [False, True])
def test_what_is_kept(standins: None, factor: bool) -> None:
    rows, leaves = 384, inputs(384, factor)
    z, product = 2 * rows * HIDDEN, 2 * rows * E * factor
    codes = rows * (D + HIDDEN) + HIDDEN * (D + E)
    assert z + product + codes <= saved_bytes(as_one, leaves) < z + product + 1.1 * codes


def test_what_was_kept_is_freed_on_the_way_unless_the_graph_is_retained(
    standins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(130)
    y = as_one(*leaves)
    first = grads_of(y, leaves, retain_graph=True)
    alive: list[int] = []
    wgrad = hopper.wgrad

    def count(*arguments: object) -> Tensor:
        gc.collect()
        sizes = {(130, HIDDEN): "z", (130, E): "product"}
        alive.append(sum(tuple(x.shape) in sizes and x.dtype is torch.bfloat16 and not x.requires_grad
                         for x in gc.get_objects() if type(x) is Tensor))  # fmt: skip
        return wgrad(*arguments)

    monkeypatch.setattr(hopper, "wgrad", count)
    assert_equal(grads_of(y, leaves, retain_graph=True), first)
    del y
    y = as_one(*leaves)
    assert_equal(grads_of(y, leaves), first)
    outer_retained, inner_retained, outer_freed, inner_freed = alive
    assert outer_freed < outer_retained
    assert inner_freed < inner_retained
    with pytest.raises(RuntimeError, match="second time"):
        grads_of(y, leaves)


def test_no_rows_second_derivatives_and_transforms(standins: None) -> None:
    leaves = inputs(0)
    y = as_one(*leaves)
    assert y.shape == (0, E)
    assert not any(grad.any() for grad in grads_of(y, leaves).values())
    leaves = inputs(5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(as_one(*leaves).float().square().sum(), leaves, create_graph=True)


def test_the_public_function_in_compiled_code_and_bad_arguments() -> None:
    leaves = inputs(6, dtype=torch.float32)
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    x, *weights, factor = leaves

    def layers(x: Tensor, factor: Tensor) -> Tensor:
        hidden = F.silu(mxfp8.linear(x, weights[0], weights[1], recipe="mxfp8_g128"))
        return mxfp8.linear(hidden, weights[2], weights[3], recipe="mxfp8_g128") * factor

    def ours(x: Tensor, factor: Tensor) -> Tensor:
        return mxfp8.silu_mlp(x, *weights, factor, recipe="mxfp8_g128")

    wide = x.view(2, 3, D), factor.view(2, 3, E)
    expected = layers(*wide)
    for function in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(function(*wide), expected)
        torch.testing.assert_close(grads_of(function(*wide), leaves), grads_of(expected, leaves, retain_graph=True))
    # A factor of another dtype is multiplied with the result.
    half = wide[1].detach().bfloat16()
    assert torch.equal(ours(wide[0], half), mxfp8.silu_mlp(wide[0], *weights, recipe="mxfp8_g128") * half)
    with pytest.raises(ValueError, match="recipe must be one of mxfp8, mxfp8_g128, got 'bf16'"):
        mxfp8.silu_mlp(x, *weights, recipe="bf16")
    with pytest.raises(ValueError, match=r"take bias \[384\], outer \[E, 384\]"):
        mxfp8.silu_mlp(x, weights[0], weights[3], *weights[2:], recipe="mxfp8")
    with pytest.raises(ValueError, match=r"a factor \(6, 'E'\)"):
        mxfp8.silu_mlp(x, *weights, factor[:5], recipe="mxfp8")


@pytest.mark.parametrize(
    ("kernel", "registers", "column_scales", "programs"),
    [
        (fused.silu_quantized_kernel, fused.REGISTERS, "*i16", 3),
        (fused.silu_gradient_quantized_kernel, fused.REGISTERS, "*u8", 3),
        (fused.factor_gradient_quantized_kernel, fused.FACTOR_REGISTERS, "*u8", 2),
    ],
    ids=["silu", "silu gradient", "factor gradient"],
)
def test_kernels_compile_within_their_registers(
    kernel: object, registers: int, column_scales: str, programs: int
) -> None:
    types = dict.fromkeys(("grad_desc", "z_desc", "factor_desc", "d_factor_desc"), descriptor("i32", 128, 64))
    types |= dict.fromkeys(("row_desc", "column_desc"), descriptor("i16", 128, 64, swizzle=128))
    types |= {"bias": "*fp32", "row_scales": "*u8", "column_scales": column_scales, "sums": "*fp32"}
    types |= dict.fromkeys(("num_rows", "tile_rows", "num_columns"), "i32")
    compiled = compile_ahead(
        kernel,
        {name: kind for name, kind in types.items() if name in kernel.arg_names},  # type: ignore[attr-defined]
        {"ROWS": True, "COLUMNS": True},
        target="sm_90",
        gluon=True,
        divisible_by_16=["num_columns"],
        num_warps=WARPS,
        maxnreg=registers,
    )
    # Programs share the 228 KiB of a multiprocessor.
    assert programs * (compiled.shared_bytes + 1024) <= 228 * 1024
    assert compiled.spill_bytes <= 4  # with one of the two versions of Triton, one address
    # Exchanges between threads may not take a barrier's memory, which is kept by invalidating it behind them.
    before, after = compiled.ptx.split("mbarrier.inval")
    assert "cp.async.bulk.tensor.2d.global.shared" in before
    assert "st.shared" not in after


def assert_same(actual: Operands, expected: Operands, rows: int) -> None:
    """Bit for bit, but for the sign of the zeros in rows that were missing."""
    for axis, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert ours.codes.shape == theirs.codes.shape
        assert ours.scales.dtype is theirs.scales.dtype
        if ours.codes.numel():
            codes, expected_codes = (each.codes.t() if axis else each.codes for each in (ours, theirs))
            assert same_codes(codes[:rows], expected_codes[:rows].cpu())
            torch.testing.assert_close(
                codes[rows:].float(), expected_codes[rows:].float(), rtol=0, atol=0, equal_nan=True
            )
            assert torch.equal(matrix_scales(ours), matrix_scales(theirs))


def tensors_of(rows: int, columns: int, bias_dtype: torch.dtype) -> list[Tensor]:
    """The gradient, z, the bias, not contiguous, and the factor. Rows have magnitudes of 2^-9 to 2^9, those of z are
    where a sigmoid is at least 2^-126.
    """
    generator = torch.Generator().manual_seed(rows)
    scales = [torch.exp2(torch.randint(-9, 9, (rows, 1), generator=generator).float()) for _ in range(3)]
    grad, z, factor = (
        (random(rows, columns, seed=seed) * scale).bfloat16().cuda() for seed, scale in enumerate(scales)
    )
    return [grad, z.clamp(min=-80), random(2 * columns).cuda().to(bias_dtype)[::2], factor]


@on_hopper
@pytest.mark.parametrize("rows", [1, 127, 128, 300, 4096])
@pytest.mark.parametrize(("columns", "bias_dtype"), [(128, torch.bfloat16), (1024, torch.float32)])
def test_gpu_kernels_are_the_passes_that_they_replace(rows: int, columns: int, bias_dtype: torch.dtype) -> None:
    grad, z, bias, factor = tensors_of(rows, columns, bias_dtype)
    leaves = [each.detach().requires_grad_() for each in (z, bias, factor)]
    dz, _ = torch.autograd.grad(activate(*leaves[:2], "silu"), leaves[:2], grad)
    d_product, _, d_factor = torch.autograd.grad(activate(*leaves[:2], "none", leaves[2]), leaves, grad)
    u = z.double() + bias.double()
    terms = F.sigmoid(u) * (1 + u * F.sigmoid(-u)) * grad.double(), (grad.double() * factor.double())
    # Of u and of its exponential, and where terms cancel.
    errors = F.sigmoid(u) * (1 + u.abs()) ** 2 * grad.double().abs(), terms[1].abs()
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        with poisoned_empty():
            first = fused.silu_quantized(z, bias, wanted[1])
            *second, sums = fused.silu_gradient_quantized(grad, z, bias, *wanted)
            *third, more_sums, own_d_factor = fused.factor_gradient_quantized(grad, z, bias, factor, *wanted)
        assert_same(first, hopper_linear.quantized(activate(z, bias, "silu"), True, wanted[1], VALUES), rows)
        assert_same(second, hopper_linear.quantized(dz, *wanted, BYTES), rows)
        assert_same(third, hopper_linear.quantized(d_product, *wanted, BYTES), rows)
        assert torch.equal(own_d_factor, d_factor)
        for own, each, error in zip((sums, more_sums), terms, errors, strict=True):
            assert own.dtype is torch.float32
            assert ((own - each.sum(0)).abs() <= 2**-18 * error.sum(0) + 1e-30).all()


@on_hopper
def test_gpu_codes_of_extremes() -> None:
    z = torch.tensor([0.0, -0.0, 1e-30, -80.0, 3e38, -3e38, torch.inf, 5.0]).repeat(130, 16).bfloat16().cuda()
    z[3, 5], z[129, 77] = torch.nan, torch.nan
    bias = torch.zeros(128, device="cuda")
    with poisoned_empty():
        actual = fused.silu_quantized(z, bias, True)
    assert_same(actual, hopper_linear.quantized(activate(z, bias, "silu"), True, True, VALUES), 130)


@on_hopper
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("rows", [1, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_the_single_operators_results(rows: int, dtype: torch.dtype, factor: bool) -> None:
    leaves = inputs(rows, factor, dtype, "cuda")
    with poisoned_empty():
        theirs = by_single_operators(*leaves)
        expected = grads_of(theirs, leaves)
        results = [(y, grads_of(y, leaves)) for y in (as_one(*leaves) for _ in range(2))]
    for y, grads in results:
        assert torch.equal(y, theirs)
        assert_equal(grads, expected)
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in expected)


@on_hopper
def test_gpu_autocast_views_and_memory() -> None:
    leaves = inputs(20000, dtype=torch.float32, device="cuda")
    x, *weights, factor = leaves
    wide = torch.cat([x.detach(), x.detach()], 1)[:, :D].requires_grad_()
    turned = factor.detach().mT.contiguous().mT.requires_grad_()
    results, peaks = [], []
    for backend, rows, gate in (("reference", x, factor), ("hopper", x, factor), ("hopper", wide, turned)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            y = mxfp8.silu_mlp(rows, *weights, gate, recipe="mxfp8_g128", backend=backend)
        kept = torch.cuda.memory_allocated() - before
        dy = torch.ones_like(y).mT.contiguous().mT if gate is turned else torch.ones_like(y)
        grads = dict(zip(NAMES, torch.autograd.grad(y, [rows, *weights, gate], dy), strict=True))
        peaks.append((kept, torch.cuda.max_memory_allocated() - before))
        results.append((y.detach(), grads))
    for y, grads in results[1:]:
        assert torch.equal(y, results[0][0])
        assert_equal(grads, results[0][1])
    assert peaks[1][0] <= peaks[0][0] + 2**20
    assert peaks[1][1] <= peaks[0][1] + 2**20, peaks


@on_hopper
def test_gpu_graphs_quantise_the_weights_of_each_replay() -> None:
    leaves = inputs(300, device="cuda")

    def step() -> tuple[Tensor, ...]:
        y = as_one(*leaves)
        return y.detach(), *grads_of(y, leaves).values()

    step()
    graph = torch.cuda.CUDAGraph()
    dy = random(300, E, seed=9).cuda().bfloat16()

    def captured_step() -> tuple[Tensor, ...]:
        y = as_one(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    with torch.cuda.graph(graph):
        captured = captured_step()
    for scale in (1.0, -3.0):
        with torch.no_grad():
            leaves[1].mul_(scale)
        graph.replay()
        for ours, eager in zip(captured, captured_step(), strict=True):
            assert torch.equal(ours, eager)
