"""Operators on single tokens: the specifications by their formulas, the Triton kernels interpreted and compiled."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import tokens
from kernels.core import dispatch
from kernels.core.constants import EPSILON
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from kernels.tokens import (
    activate,
    add_rms_norm,
    parts,
    reference,
    rms_norm,
    rotate,
    rotate_qkv,
    unbind,
)
from kernels.tokens.triton import norm_operator, rotary_operator
from tests.kernels.core.devices import on_chips

EXACT = Tolerance("same arithmetic in another order", roundings=8, reduction=300, accumulate=torch.float64)
ROUNDED = Tolerance("sums and statistics in float32, the result rounded", roundings=4, reduction=300)
HAS_TRITON = importlib.util.find_spec("triton") is not None
NORM_SHAPES = [(5, 48), (0, 16), (1, 5), (2, 3, 300), (70, 64), (2, 3, 4, 8)]
ROTATED_SHAPES = [(5, 2, 48), (0, 1, 16), (1, 3, 6), (70, 4, 64), (9, 1, 2)]


def normalised(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + epsilon).sqrt()


def beside(result: Tensor, x: Tensor) -> Tensor:
    """The gradient of `result` is then a view whose rows lie apart."""
    return torch.cat([result, x.to(result.dtype)], -2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[2] // 2
    product = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[:, None]
    return torch.cat([product.real, product.imag], -1)


def view_of_wider(shape: tuple[int, ...]) -> Tensor:
    """Random numbers of `shape` that lie apart, as those of a query in a fused projection do."""
    wide = torch.randn(*shape[:-2], shape[-2] + 3, shape[-1], generator=torch.Generator().manual_seed(1)).double()
    return wide[..., 1 : 1 + shape[-2], :]


def angles_of(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    angles = torch.randn(shape[0], shape[2] // 2, generator=torch.Generator().manual_seed(2)).double() * 3
    return angles.cos(), angles.sin()


def joined(results: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([result.flatten() for result in results])


def angles_by_position(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of seven positions, and those of the tokens."""
    cos, sin = angles_of((7, *shape[1:]))
    return cos, sin, torch.arange(shape[0]) * 3 % 7


@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_a_fused_projection_is_rotated_like_its_parts(shape: tuple[int, ...]) -> None:
    cos, sin, positions = angles_by_position(shape)
    qkv = torch.randn(shape[0], 3, *shape[1:], dtype=torch.float64)

    def parts_turned(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        return joined((turned(q, cos[positions], sin[positions]), turned(k, cos[positions], sin[positions]), v))

    check_gradients(
        lambda qkv: joined(rotate_qkv(qkv, cos, sin, positions, backend="reference")), parts_turned, {"qkv": qkv}, EXACT
    )


def test_gradients_that_lie_together_are_not_copied() -> None:
    class Beside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Tensor) -> Tensor:
            return sum(parts, torch.zeros(()))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            made.append(torch.stack([grad, 2 * grad], 1))
            return made[0].unbind(1)

    made: list[Tensor] = []
    x = torch.randn(4, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Beside.apply(*unbind(x)).sum(), x)
    assert gradient.data_ptr() == made[0].data_ptr()
    assert torch.equal(gradient, made[0])
    both = made[0]
    for others in (
        both.unbind(1)[::-1],
        both[:, :1].unbind(1),
        torch.ones(12, 5).view(3, 4, 5).unbind(1),
        both.clone().unbind(0),
    ):
        assert parts.whole(others) is None
    assert torch.autograd.gradcheck(lambda x: unbind(x)[0] * unbind(x)[1].sin(), (x,))
    assert torch.autograd.gradgradcheck(lambda x: unbind(x)[0] * unbind(x)[1].sin(), (x[:2],))


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_reference_is_the_formula(shape: tuple[int, ...]) -> None:
    reference = partial(rms_norm, backend="reference")
    check_gradients(reference, normalised, {"x": view_of_wider(shape)}, EXACT)


@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_rotation_reference_is_complex_multiplication(shape: tuple[int, ...]) -> None:
    cos, sin = angles_of(shape)
    check_gradients(
        lambda x: rotate(x, cos, sin, backend="reference"),
        lambda x: turned(x, cos, sin),
        {"x": view_of_wider(shape)},
        EXACT,
    )


def test_angles_can_learn() -> None:
    x, (cos, sin) = torch.randn(3, 2, 4, dtype=torch.float64), angles_of((3, 2, 4))
    check_gradients(partial(rotate, x), partial(turned, x), {"cos": cos, "sin": sin}, EXACT)
    refusal = dispatch.explain(
        "rotate", device="cuda", capability=(9, 0), dtype=torch.bfloat16, width=4, angles=torch.float32,
        angles_learn=True,
    )  # fmt: skip
    assert "makes no gradient of cos and sin" in refusal


def test_a_dtype_of_ones_own() -> None:
    x = torch.randn(4, 8)
    assert torch.equal(rms_norm(x, dtype=torch.bfloat16), rms_norm(x).bfloat16())
    assert rms_norm(x.bfloat16()).dtype is torch.bfloat16


def test_bad_arguments() -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match=r"x must be of a floating type, e\.g\. torch\.bfloat16, got torch\.int64"):
        rms_norm(x.long())
    with pytest.raises(ValueError, match="dtype must be of a floating type"):
        rms_norm(x, dtype=torch.int32)
    for cos in (torch.zeros(4, 8), torch.zeros(3, 4), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"cos and sin \[N, d / 2\]"):
            rotate(x, cos, cos)
    for positions in (torch.zeros(3, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"with integer positions \[N\]"):
            rotate(x, torch.zeros(9, 4), torch.zeros(9, 4), positions)
    with pytest.raises(ValueError, match=r"qkv must be \[N, 3, H, d\], got \(4, 2, 8\)"):
        rotate_qkv(x, torch.zeros(4, 4), torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"change like it or None; got torch.float32 \(4, 2\) and \(4, 3\)"):
        add_rms_norm(torch.zeros(4, 2), torch.zeros(4, 3))
    for bias, factor in (
        (torch.zeros(3), None),
        (torch.zeros(2), torch.zeros(2)),
        (torch.zeros(2), x[:, 0, :2].half()),
    ):
        with pytest.raises(ValueError, match=r"takes a bias \[2\] and a factor like z"):
            activate(torch.zeros(4, 2), bias, "silu", factor)
    with pytest.raises(ValueError, match="activation must be one of none, silu, got 'gelu'"):
        activate(torch.zeros(4, 2), torch.zeros(2), "gelu")
    with pytest.raises(ValueError, match=r"rows must be int64, got torch.int32"):
        add_rms_norm(torch.zeros(4, 2), None, torch.zeros(4, dtype=torch.int32))


def test_compiled_code_takes_the_reference_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def choose(op: str, backend: str | None, *_: object, **__: object) -> Callable[..., Tensor]:
        asked.append(backend)
        return lambda *tensors: tensors[0]

    monkeypatch.setattr(tokens.dispatch, "choose", choose)
    x = torch.ones(2, 4)
    rms_norm(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rms_norm(x)
    rms_norm(x, backend="triton")
    rotate(x[:, None], x[:, :2], x[:, :2])
    rotate_qkv(torch.ones(2, 3, 1, 4), x[:, :2], x[:, :2])
    add_rms_norm(x, None)
    activate(x, x[0])
    assert asked == [None, "reference", "triton", *["reference"] * 4]


def test_autocast_leaves_the_dtype_alone() -> None:
    # That of CUDA widens norms, that of the CPU does not. A fake tensor goes through it without a GPU.
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            assert reference.rms_norm(x, torch.bfloat16, EPSILON).dtype is torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", False)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_in_the_interpreter(
    shape: tuple[int, ...], out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    with poisoned_empty():
        for epsilon in (EPSILON, 0.5):
            check_gradients(
                lambda x, epsilon=epsilon: beside(norm_operator.rms_norm(x, out_dtype, epsilon), x),
                lambda x, epsilon=epsilon: beside(normalised(x, epsilon), x),
                {"x": view_of_wider(shape).float()},
                ROUNDED,
            )


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_rotation_in_the_interpreter(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    cos, sin = (angle.float() for angle in angles_of(shape))
    with poisoned_empty():
        check_gradients(
            lambda x: rotary_operator._rotate(x, cos, sin, None, False),
            lambda x: turned(x, cos.to(x), sin.to(x)),
            {"x": view_of_wider(shape).float()},
            ROUNDED,
        )


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_rotation_of_a_projection_in_the_interpreter(
    shape: tuple[int, ...], table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted(monkeypatch)
    check_qkv(rotary_operator.rotate_qkv, shape, table, torch.float32, "cpu")


def check_qkv(
    function: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...], table: bool, dtype: torch.dtype, device: str
) -> None:
    cos, sin, positions = (x.to(device) for x in angles_by_position(shape))
    cos, sin = cos.float(), sin.float()
    given = (cos, sin, positions) if table else (cos[positions], sin[positions], None)
    qkv = torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(5)).to(device, dtype)
    for twice in (False, True):
        with poisoned_empty():
            check_gradients(
                lambda qkv, twice=twice: joined(function(qkv, *given, twice)),
                lambda qkv, twice=twice: joined(reference.rotate_qkv(qkv, cos.to(qkv), sin.to(qkv), positions, twice)),
                {"qkv": qkv},
                ROUNDED,
            )


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_gradient_whose_elements_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    shape = (5, 2, 48)
    cos, sin = (angle.float() for angle in angles_of(shape))
    x = torch.randn(shape, requires_grad=True)
    for served, formula in (
        (rotary_operator._rotate(x, cos, sin, None, False), turned(x, cos, sin)),
        (norm_operator.rms_norm(x, x.dtype, EPSILON), normalised(x)),
    ):
        ours, expected = (torch.autograd.grad(out.sum(), x)[0] for out in (served, formula))
        torch.testing.assert_close(ours, expected)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.tokens.triton import activation, bias, residual
    from kernels.tokens.triton import tokens as triton_tokens
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_tokens, residual, activation, bias)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("module", "name", "target"),
    on_chips(
        [
            ("tokens", "rms_norm"),
            ("tokens", "rms_norm_backward"),
            ("tokens", "rotate"),
            ("tokens", "copy_heads"),
            ("residual", "add_rms_norm"),
            ("residual", "add_rms_norm_backward"),
            ("residual", "pick_rows"),
            ("activation", "activate"),
            ("activation", "activate_backward"),
            ("bias", "column_sum"),
        ]
    ),
)
def test_kernels_compile_without_spills(module: str, name: str, target: str) -> None:
    from kernels.tokens.triton import tokens as triton_tokens

    kernel = getattr(importlib.import_module(f"kernels.tokens.triton.{module}"), f"{name}_kernel")
    flags = (
        "INVERSE",
        "TABLE",
        "ADD",
        "BESIDE",
        "HAS_CHANGE",
        "HAS_TOTAL",
        "HAS_MORE",
        "GIVE_BACK",
        "SILU",
        "HAS_FACTOR",
    )
    constants = triton_tokens.tiling(128)
    num_warps = constants.pop("num_warps")
    constants |= {"HEADS": 4, "EPSILON": 1e-5} | dict.fromkeys(flags, True)
    constants = {option: value for option, value in constants.items() if option in kernel.arg_names}
    strides = [argument for argument in kernel.arg_names if argument.endswith(("_token", "_head"))]
    types = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64", "rows": "*i64", "bias": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys([*strides, "num_heads", "num_rows", "num_picked"], "i32")
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names if argument not in constants}
    compiled = compile_ahead(kernel, signature, constants, target=target, num_warps=num_warps, divisible_by_16=strides)
    assert compiled.spill_bytes == 0
    assert compiled.contains("ld.global.v4.b32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
class TestOnAGPU:
    @pytest.mark.parametrize("shape", [*NORM_SHAPES, (3, 8192), (1000, 512)], ids=str)
    def test_norm(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = view_of_wider(shape).to("cuda", dtype)
        for out_dtype in (dtype, torch.float32):
            with poisoned_empty():
                check_gradients(
                    lambda x, out_dtype=out_dtype: beside(rms_norm(x, dtype=out_dtype, backend="triton"), x),
                    lambda x: beside(normalised(x), x),
                    {"x": x},
                    ROUNDED,
                )

    @pytest.mark.parametrize("shape", [*ROTATED_SHAPES, (1000, 2, 128)], ids=str)
    def test_rotation(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        cos, sin = (angle.to("cuda", torch.float32) for angle in angles_of(shape))
        with poisoned_empty():
            check_gradients(
                lambda x: rotate(x, cos, sin, backend="triton"),
                lambda x: turned(x, cos.to(x), sin.to(x)),
                {"x": view_of_wider(shape).to("cuda", dtype)},
                ROUNDED,
            )

    @pytest.mark.parametrize("table", [True, False])
    @pytest.mark.parametrize("shape", [*ROTATED_SHAPES, (1000, 2, 128)], ids=str)
    def test_rotation_of_a_projection(self, shape: tuple[int, ...], table: bool, dtype: torch.dtype) -> None:
        def on_a_gpu(*tensors: Any) -> tuple[Tensor, ...]:
            return rotate_qkv(*tensors[:-1], twice=tensors[-1], backend="triton")

        check_qkv(on_a_gpu, shape, table, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.full((2**24 + 1, 2, 64), 3.0, dtype=torch.bfloat16, device="cuda")
    assert bool((rms_norm(x)[-1] == 1).all())
    quarter = torch.zeros(len(x), 32, device="cuda")
    assert bool((rotate(x, quarter, quarter + 1)[-1, :, 32:] == 3).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_opcheck() -> None:
    x = torch.randn(5, 2, 48, device="cuda", requires_grad=True)
    torch.library.opcheck(norm_operator._rms_norm.definition, (x, torch.bfloat16, EPSILON))
    cos, sin = (angle.to("cuda", torch.float32) for angle in angles_of((5, 2, 48)))
    torch.library.opcheck(rotary_operator._rotate.definition, (x, cos, sin, None, False))
    torch.library.opcheck(rotary_operator._rotate_qkv_backward.definition, (*[x.detach()] * 5, cos, sin, None))
