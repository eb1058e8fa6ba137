"""The Hopper kernel of `jagged_linear`: compiled, refused where it cannot serve, and on a GPU held to the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernels import jagged
from kernels.core import dispatch
from kernels.jagged.hopper.linear import backward, backward_fp32, forward
from kernels.jagged.hopper.linear import weight as linear_weight
from kernels.jagged.pointwise import ACTIVATIONS
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import HOPPER
from tests.kernels.jagged.jagged_problems import offsets_of

# Bytes of addresses and the like in the two consumers; one operand more in memory would be 64 bytes or more of each.
FEW_WORDS = 64


# In float32 what is kept takes registers beside all that others take.
@pytest.mark.parametrize(("precision", "keep"), [("bf16", False), ("bf16", True), ("tf32", True), ("tf32x3", True)])
def test_compiles(precision: str, keep: bool) -> None:
    kernel = forward._linear_kernel
    half, thrice = precision == "bf16", precision == "tf32x3"
    dtype, line = ("bf16", 64) if half else ("fp32", 32)
    columns = 4 if thrice else 1 if half else 2
    constants = {"SHARED": half, "COLUMNS": columns, "D_PIECES": 256 // line, "TRANSPOSED": False, "THRICE": thrice}
    constants["SLOPE"] = precision == "tf32"
    constants |= {"ACTIVATION": "gelu", "BIAS": True, "ROW_BIAS": True, "KEEP": keep, "EVEN": True}
    constants["LEVELS"] = 2
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(("out", "for_backward", "bias", "row_bias"), f"*{dtype}") | {"offsets": "*i64"}
    signature |= dict.fromkeys(("x_desc", "out_desc", "kept_desc"), descriptor(dtype, 64, line))
    signature["weight_desc"] = descriptor(dtype, 64 if thrice else 128, line)
    signature["row_bias_desc"] = descriptor(dtype, 8, line)
    compiled = compile_ahead(
        kernel,
        signature,
        constants,
        target="sm_90",
        divisible_by_16=("row_bias_stride", "E"),
        gluon=True,
        maxnreg=forward._MAX_REGISTERS,
    )
    assert compiled.spill_bytes <= (6 * FEW_WORDS if thrice else FEW_WORDS)  # which three products find beside sums
    # The next product runs while this one is finished.
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


def test_gradients_compile() -> None:
    kernel = backward._linear_gradients_kernel
    constants = {"KIND": "given", "SUMS": True, "LEVELS": 2}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(("partials", "sums"), "*fp32") | {"offsets": "*i64"}
    signature |= dict.fromkeys(("grad_desc", "point_desc", "weight_desc", "dx_desc"), descriptor("bf16", 64, 64))
    signature["x_desc"] = descriptor("bf16", 64, 128)
    compiled = compile_ahead(
        kernel,
        signature,
        constants,
        target="sm_90",
        divisible_by_16=("E",),
        gluon=True,
        maxnreg=backward._MAX_REGISTERS,
    )
    assert compiled.spill_bytes <= FEW_WORDS
    assert compiled.contains("wgmma.mma_async")
    assert compiled.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("kind", ["none", "given"])
def test_gradients_of_float32_compile(kind: str) -> None:
    kernel = backward_fp32._linear_gradients_single_kernel
    constants = {"D": 256, "KIND": kind, "SUMS": True, "LEVELS": 2}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(("partials", "sums", "dx"), "*fp32") | {"offsets": "*i64"}
    signature |= dict.fromkeys(("grad_desc", "point_desc"), descriptor("fp32", 32, 64))
    signature |= {"weight_desc": descriptor("fp32", 64, 64), "x_desc": descriptor("fp32", 32, 128)}
    compiled = compile_ahead(
        kernel,
        signature,
        constants,
        target="sm_90",
        divisible_by_16=("E",),
        gluon=True,
        maxnreg=backward_fp32._MAX_REGISTERS,
    )
    assert compiled.spill_bytes <= 2 * FEW_WORDS
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


def test_weight_gradient_compiles() -> None:
    kernel = linear_weight._linear_weight_kernel
    constants = {"GROUPS": 4}
    signature = {"total": "i32", "partials": "*fp32"}
    signature |= {"grad_desc": descriptor("fp32", 32, 128), "x_desc": descriptor("fp32", 32, 64)}
    compiled = compile_ahead(
        kernel, signature, constants, target="sm_90", gluon=True, maxnreg=linear_weight._MAX_REGISTERS
    )
    assert compiled.spill_bytes == 0
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


def test_what_it_serves() -> None:
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "inner": 256, "width": 256}

    def chosen(**change: object) -> str:
        lines = dispatch.explain("jagged_linear", **hopper | change).splitlines()
        return next(line.split()[0] for line in lines if line.endswith("chosen"))

    for change in ({}, {"dtype": torch.float16}, {"dtype": torch.float32}, {"inner": 8, "width": 8}):
        assert chosen(**change) == "hopper"
    for change in ({"capability": (10, 0)}, {"width": 12}, {"inner": 264}, {"width": 0}):
        assert chosen(**change) == "triton"
        assert "refused" in dispatch.explain("jagged_linear", "hopper", **hopper | change)
    assert chosen(dtype=torch.float64) == "reference"


def hopper(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


LENGTHS = [[0, 5, 0, 70, 1, 0], [1], [0, 0], [], [64, 32, 32, 64], [0] * 50 + [517] + [0] * 50, [1] * 170 + [33] * 900]
LENGTHS += [[10000], [3] + [0] * 20 + [9] + [0] * 10 + [200]]
WIDTHS = [(64, 200), (200, 72), (40, 8), (128, 128), (8, 256), (136, 248)]
CASES = [(lengths, 256, 256) for lengths in LENGTHS] + [(LENGTHS[0], *widths) for widths in WIDTHS]
# The hardware's tanh is as exact as a rounding or two of a half-precision result.
ROUNDED = Tolerance("z, the tanh and the result rounded; sums of 256 products", roundings=4, reduction=256)
GRADIENTS = Tolerance("z, dz and the result rounded; sums over 30 thousand places", roundings=6, reduction=30000)


def problem(lengths: list[int], inner: int, width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    # Rows of x and of the row bias are the ends of wider ones, some of strides that TMA cannot address.
    before = 14 if width == 256 else 8
    return {
        "x": random(sum(lengths), inner + before).to(dtype)[:, before:],
        "weight": (random(inner, width).mT / inner**0.5).to(dtype),
        "bias": random(width).to(dtype),
        "row_bias": random(len(lengths), width + 8).to(dtype)[:, 8:],
    }


def check(lengths: list[int], inputs: dict[str, torch.Tensor], activation: str) -> None:
    offsets = offsets_of(lengths, torch.int32 if len(lengths) % 2 else torch.int64).cuda()

    def run(backend: str, **tensors: torch.Tensor) -> torch.Tensor:
        return jagged.jagged_linear(offsets=offsets, activation=activation, backend=backend, **tensors)

    with poisoned_empty():
        check_gradients(partial(run, "hopper"), partial(run, "reference"), inputs, ROUNDED, GRADIENTS)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lengths", "inner", "width"), CASES, ids=lambda value: str(value)[:20])
def test_matches_the_reference(lengths: list[int], inner: int, width: int, dtype: torch.dtype) -> None:
    inputs = problem(lengths, inner, width, dtype)
    check(lengths, inputs, "gelu")
    with torch.no_grad():  # what the activation was applied to is not kept then
        given = {"offsets": offsets_of(lengths).cuda(), "activation": "gelu"}
        out = jagged.jagged_linear(**inputs, **given, backend="hopper")
        exact = jagged.jagged_linear(**{name: tensor.double() for name, tensor in inputs.items()}, **given)
        assert_close_to_oracle(out, exact, ROUNDED)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_not_finite_stays_in_its_row(
    dtype: torch.dtype, tf32: bool, allow_tf32: Callable[[bool], None]
) -> None:
    allow_tf32(tf32)
    lengths = [0, 5, 0, 70, 1, 0, 3, 2, 2, 1, 1, 4, 300]
    offsets, inputs = offsets_of(lengths).cuda(), problem(lengths, 256, 256, dtype)
    for row, value in ((1, float("inf")), (2, float("nan")), (6, -float("inf")), (11, float("nan"))):
        inputs["row_bias"][row, 7 * row] = value
    inputs["x"][20, 3], inputs["x"][50, 4] = float("nan"), float("inf")
    out = jagged.jagged_linear(**inputs, offsets=offsets, backend="hopper")
    exact = jagged.jagged_linear(**{k: v.double() for k, v in inputs.items()}, offsets=offsets, backend="reference")
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert torch.allclose(out.double(), exact, rtol=1e-2, atol=1e-1, equal_nan=True)


@hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("without", [(), ("bias",), ("row_bias",), ("bias", "row_bias")], ids=str)
def test_every_activation_and_bias(activation: str, without: tuple[str, ...]) -> None:
    lengths = [0, 5, 0, 70, 1, 0, 300]
    tensors = problem(lengths, 256, 256, torch.bfloat16)
    tensors["weight"] = torch.randn(256, 256, device="cuda").bfloat16() / 16
    check(lengths, {name: tensor for name, tensor in tensors.items() if name not in without}, activation)


@hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("inner", "width"), [(256, 256), *WIDTHS])
@pytest.mark.parametrize("tf32", [False, True])
def test_float32(inner: int, width: int, activation: str, tf32: bool, allow_tf32: Callable[[bool], None]) -> None:
    lengths = [0, 5, 0, 70, 1, 0, 300] + [150] * 120  # several tiles for each consumer
    offsets, inputs = offsets_of(lengths).cuda(), problem(lengths, inner, width, torch.float32)
    # At relu's corner a rounding of z decides about a whole gradient.
    checked = inputs if activation != "relu" else {}

    def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
        out = jagged.jagged_linear(**leaves, offsets=offsets, activation=activation, backend=backend)
        weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64, device="cuda").view_as(out).to(dtype)
        gradients = torch.autograd.grad(out, [leaves[name] for name in checked], weights) if checked else ()
        return [out, *gradients]

    with poisoned_empty():
        allow_tf32(not tf32)  # which is asked for in every call
        results("hopper", torch.float32)
        allow_tf32(tf32)
        served = results("hopper", torch.float32)
    exact = results("reference", torch.float64)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(served, exact, strict=True)]
    assert errors[0] > 1e-5 if tf32 else errors[0] < 1e-6, errors
    assert max(errors) < (2e-3 if tf32 else 2e-6), errors


@hopper
@pytest.mark.parametrize("shape", [(100000, 256, 256), (31, 8, 256), (1, 256, 8), (5000, 136, 72)])
def test_weight_gradient_of_float32(shape: tuple[int, int, int]) -> None:
    total, width, inner = shape
    # Sums of products of one sign show a rounding that is always towards zero.
    grad, x = torch.rand(total, width, device="cuda"), torch.rand(total, inner, device="cuda")
    with poisoned_empty():
        dw = linear_weight.weight_gradient(grad, x)
    exact = grad.double().mT @ x.double()
    assert float((dw - exact).norm() / exact.norm()) < 1e-6
    assert torch.equal(dw, linear_weight.weight_gradient(grad, x))


@hopper
@pytest.mark.parametrize("kind", ["none", "given", "relu"])
@pytest.mark.parametrize("lengths", [lengths for lengths in LENGTHS if sum(lengths)], ids=lambda value: str(value)[:20])
def test_gradients_of_tf32(lengths: list[int], kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    offsets = offsets_of(lengths).cuda()
    row = torch.arange(len(lengths), device="cuda").repeat_interleave(offsets.diff())
    for width, inner in ((256, 256), (136, 248)):
        grad, point, x, weight = (
            torch.randn(shape, device="cuda", generator=generator)
            for shape in ((len(row), width), (len(row), width), (len(row), inner), (width, inner))
        )
        arguments = (grad, point, x, offsets, weight, kind, True)
        with poisoned_empty():
            served = backward_fp32.gradients_single(*arguments)
        dz = grad.double()
        if kind != "none":
            dz = dz * (point if kind == "given" else point > 0)
        exact = (dz @ weight.double(), dz.mT @ x.double(), dz.new_zeros(len(lengths), width).index_add_(0, row, dz))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(served, exact, strict=True)]
        assert max(errors[:2]) < 2e-3, errors
        assert errors[2] < 1e-6, errors
        again = backward_fp32.gradients_single(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(served, again, strict=True))
        # What is not finite stays in its row.
        grad[0, 3] = float("nan")
        point[0, 3] = 1.0
        sums = backward_fp32.gradients_single(*arguments)[2]
        assert sums.isnan().nonzero().tolist() == [[int(row[0]), 3]]


@hopper
@pytest.mark.parametrize("before", [False, True])
def test_tf32_is_asked_for_again_before_the_backward(before: bool, allow_tf32: Callable[[bool], None]) -> None:
    """What a forward kept tells its backward how to go on."""
    offsets, inputs = offsets_of([0, 5, 300]).cuda(), problem([0, 5, 300], 256, 256, torch.float32)

    def gradients(backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
        allow_tf32(before)
        out = jagged.jagged_linear(**leaves, offsets=offsets, activation="gelu", backend=backend)
        allow_tf32(not before)
        return torch.autograd.grad(out.square().sum(), list(leaves.values()))

    served, exact = gradients("hopper", torch.float32), gradients("reference", torch.float64)
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(served, exact, strict=True)) < 2e-3
