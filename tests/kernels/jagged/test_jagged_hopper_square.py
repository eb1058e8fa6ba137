"""The products of the square layout on Hopper: compiled, what they refuse, and on a GPU held to the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernels import jagged
from kernels.core import dispatch
from kernels.core.hopper import operand_layout
from kernels.jagged.hopper.square import inner_product, outer_product
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import HOPPER
from tests.kernels.jagged.jagged_problems import offsets_of

FEW_WORDS = 64
TABLES = {"offsets": "*i64", "squares": "*i64"}


def test_compiles() -> None:
    kernel = outer_product._bmm_outer_kernel
    constants = {"D_PIECES": 4, "LEVELS": 2}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants} | TABLES | {"out": "*bf16"}
    signature |= dict.fromkeys(("x_desc", "y_desc"), descriptor("bf16", 64, 64))
    compiled = compile_ahead(
        kernel, signature, constants, target="sm_90", gluon=True, maxnreg=outer_product._MAX_REGISTERS
    )
    assert compiled.spill_bytes <= FEW_WORDS
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


INNER = [
    ("bf16", False, False),
    ("bf16", True, False),
    ("fp32", True, False),
    ("fp32", False, False),
    ("fp32", False, True),
]


@pytest.mark.parametrize(
    ("lines", "dtype", "gradients", "thrice"),
    [
        pytest.param(lines, *kind, marks=() if lines == bool(number % 2) else pytest.mark.nightly)
        for number, kind in enumerate(INNER)
        for lines in (False, True)
    ],
)
def test_inner_compiles(lines: bool, dtype: str, gradients: bool, thrice: bool) -> None:
    kernel = inner_product._bmm_inner_kernel
    single = dtype == "fp32"
    places = 32 if single else 64
    constants = {"LINES": lines, "GRADIENTS": gradients, "THRICE": thrice, "D": 256}
    constants |= inner_product._config(single, gradients)
    registers = constants.pop("maxnreg")
    constants |= {"SQUARE_LAYOUT": operand_layout(64, places, torch.float32 if single else torch.bfloat16)}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= {"schedule": "*i32", "starts": "*i64"} | dict.fromkeys(("a", "da", "out"), f"*{dtype}")
    signature |= {"stream_desc": descriptor(dtype, places, 128), "own_desc": descriptor(dtype, 64, 128)}
    compiled = compile_ahead(kernel, signature, constants, target="sm_90", gluon=True, maxnreg=registers)
    assert compiled.spill_bytes <= (3 if lines and gradients else 1) * FEW_WORDS
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


def test_what_it_serves() -> None:
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "width": 256, "short_rows": False}
    outer, inner = "jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"
    for op, facts in (
        (outer, {}),
        (outer, {"dtype": torch.float32}),
        (outer, {"width": 8, "short_rows": True}),
        (inner, {}),
        (inner, {"dtype": torch.float32}),
    ):
        assert "hopper        chosen" in dispatch.explain(op, **hopper | facts)
    for op, facts in (
        (outer, {"capability": (10, 0)}),
        (outer, {"width": 20}),
        (outer, {"dtype": torch.float64}),
        (outer, {"dtype": torch.float32, "short_rows": True}),
        (inner, {"capability": (10, 0)}),
        (inner, {"width": 128}),
        (inner, {"short_rows": True}),
    ):
        assert "refused" in dispatch.explain(op, "hopper", **hopper | facts)


LENGTHS = [[0, 5, 0, 70, 1, 0], [1], [0, 0], [], [64, 32, 96, 128], [0] * 50 + [517] + [0] * 50, [1] * 170 + [33] * 900]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "width"),
    [(lengths, 256) for lengths in LENGTHS] + [(LENGTHS[0], width) for width in (8, 40, 64, 200)],
    ids=lambda value: str(value)[:20],
)
def test_matches_the_reference(lengths: list[int], width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    offsets = offsets_of(lengths, torch.int32 if len(lengths) % 2 else torch.int64).cuda()
    squares, longest = jagged.squared_offsets(offsets), max(lengths, default=0)
    total = sum(length * length for length in lengths)
    # Rows are the ends of wider ones, at places that TMA cannot address.
    inputs = {
        name: torch.randn(sum(lengths), width + 4, device="cuda", generator=generator).to(dtype)[:, 4:] for name in "xy"
    }

    def run(backend: str, **tensors: torch.Tensor) -> torch.Tensor:
        return jagged.jagged_jagged_bmm_jagged_out(
            **tensors, offsets=offsets, squares=squares, total=total, max_length=longest, backend=backend
        )

    tolerance = Tolerance("the result rounded; sums over a row or its width", reduction=max(longest, width))
    with poisoned_empty():
        check_gradients(partial(run, "hopper"), partial(run, "reference"), inputs, tolerance)
        assert torch.equal(run("hopper", **inputs), run("hopper", **inputs))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "width"),
    [(lengths, 256) for lengths in LENGTHS] + [(LENGTHS[0], width) for width in (136, 200)],
    ids=lambda value: str(value)[:20],
)
def test_inner_matches_the_reference(lengths: list[int], width: int, dtype: torch.dtype, transpose: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    offsets = offsets_of(lengths, torch.int32 if len(lengths) % 2 else torch.int64).cuda()
    squares, longest = jagged.squared_offsets(offsets), max([128, *lengths])
    inputs = {
        "a": torch.randn(sum(length * length for length in lengths), device="cuda", generator=generator).to(dtype),
        "y": torch.randn(sum(lengths), width + 4, device="cuda", generator=generator).to(dtype)[:, 4:],
    }

    def run(backend: str, **tensors: torch.Tensor) -> torch.Tensor:
        return jagged.array_jagged_bmm_jagged_out(
            **tensors, offsets=offsets, squares=squares, max_length=longest, transpose=transpose, backend=backend
        )

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
        return torch.autograd.grad(run("hopper", **leaves), list(leaves.values()), inputs["y"])

    tolerance = Tolerance("the result rounded; sums over a row or its width", reduction=max(longest, width))
    with poisoned_empty():
        check_gradients(partial(run, "hopper"), partial(run, "reference"), inputs, tolerance)
        assert torch.equal(run("hopper", **inputs), run("hopper", **inputs))
        assert all(map(torch.equal, gradients(), gradients()))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    ("lengths", "width"),
    [(lengths, 256) for lengths in LENGTHS if lengths != [1]] + [(LENGTHS[0], width) for width in (136, 200)],
    ids=lambda value: str(value)[:20],
)
def test_float32(lengths: list[int], width: int, tf32: bool, allow_tf32: Callable[[bool], None]) -> None:
    allow_tf32(tf32)
    generator = torch.Generator("cuda").manual_seed(width)
    offsets = offsets_of(lengths).cuda()
    squares, longest, total = jagged.squared_offsets(offsets), max([128, *lengths]), sum(n * n for n in lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    x, y, grad = (random(sum(lengths), width) for _ in range(3))
    a, grad_a = random(total), random(total)

    def results(kind: torch.dtype, backend: str) -> list[torch.Tensor]:
        leaves = [tensor.to(kind).requires_grad_() for tensor in (x, y, a)]
        outer = jagged.jagged_jagged_bmm_jagged_out(*leaves[:2], offsets, squares, total, longest, backend=backend)
        made = [outer, *torch.autograd.grad(outer, leaves[:2], grad_a.to(kind))]
        for transpose in (False, True):
            inner = jagged.array_jagged_bmm_jagged_out(
                leaves[2], leaves[1], offsets, squares, longest, transpose, backend=backend
            )
            made += [inner, *torch.autograd.grad(inner, [leaves[2], leaves[1]], grad.to(kind))]
        return [tensor.detach() for tensor in made]

    if total == 0:
        assert all(tensor.numel() == 0 for tensor in results(torch.float32, "hopper"))
        return
    with poisoned_empty():
        made, again = results(torch.float32, "hopper"), results(torch.float32, "hopper")
    exact = results(torch.float64, "reference")
    assert all(map(torch.equal, made, again))
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(made, exact, strict=True)]
    assert max(errors) < (2e-3 if tf32 else 2e-6), errors
    assert not tf32 or errors[0] > 1e-5, errors


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_what_is_not_finite_stays_in_its_row() -> None:
    lengths = [3, 70, 5, 64, 1]
    offsets = offsets_of(lengths).cuda()
    squares = jagged.squared_offsets(offsets)
    x, y = (torch.randn(sum(lengths), 64, device="cuda").bfloat16() for _ in "xy")
    y[20, 3], y[74, 4], x[1, 1] = float("nan"), float("inf"), -float("inf")
    out, exact = (
        jagged.jagged_jagged_bmm_jagged_out(x.to(kind), y.to(kind), offsets, squares, int(squares[-1]), 70)
        for kind in (torch.bfloat16, torch.float64)
    )
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert torch.equal(out.isnan(), exact.isnan())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_line(
    transpose: bool, dtype: torch.dtype, tf32: bool, allow_tf32: Callable[[bool], None]
) -> None:
    allow_tf32(tf32)
    lengths = [3, 70, 5, 64, 1]
    offsets = offsets_of(lengths).cuda()
    squares = jagged.squared_offsets(offsets)
    a = torch.randn(int(squares[-1]), device="cuda").bfloat16()
    y, grad = (torch.randn(sum(lengths), 136, device="cuda").bfloat16() for _ in "yg")
    y[74, 4], grad[1, 1], a[9 + 70 * 69 + 3] = float("inf"), -float("inf"), float("nan")

    def results(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(kind).requires_grad_() for tensor in (a, y)]
        out = jagged.array_jagged_bmm_jagged_out(*leaves, offsets, squares, 128, transpose)
        return out, *torch.autograd.grad(out, leaves, grad.to(kind))

    for actual, exact in zip(results(dtype), results(torch.float64), strict=True):
        assert torch.equal(actual.isfinite(), exact.isfinite())
