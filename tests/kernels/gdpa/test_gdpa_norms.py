"""The norms around GDPA: the specifications by their formulas, the Triton kernels interpreted and compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.core.constants import EPSILON
from kernels.gdpa import add_norms, layer_norm, norms, reference
from kernels.gdpa.triton import norm_operators
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.core.devices import SHARED_LIMITS
from tests.kernels.tokens.test_tokens import joined

EXACT = Tolerance("same arithmetic in another order", roundings=8, reduction=300, accumulate=torch.float64)
# The reference rounds LN(query), the sum with x and its norm; the kernels round their results only.
ROUNDED = Tolerance("sums and statistics in float32, the result rounded", roundings=4, reduction=300)
SHAPES = [(5, 48), (0, 16), (1, 5), (2, 3, 300), (70, 64)]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def normalised(query: Tensor) -> Tensor:
    centred = query - query.sum(-1, keepdim=True) / query.shape[-1]
    return centred / (centred.square().sum(-1, keepdim=True) / query.shape[-1] + EPSILON).sqrt()


def added(x: Tensor, query: Tensor) -> Tensor:
    z = x + normalised(query)
    return query + z / (z.square().sum(-1, keepdim=True) / z.shape[-1] + EPSILON).sqrt()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPSILON).sqrt()


def heads_of(query: Tensor) -> int:
    """As many as there may be of 4 or 8 features, which kernels take; none for the narrowest rows."""
    width = query.shape[-1]
    return 0 if width % 4 else width // min(8, width & -width)


def of_heads(query: Tensor) -> Tensor:
    heads, normed = heads_of(query), normalised(query)
    return joined((rms(normed.unflatten(-1, (heads, -1))).flatten(-2) if heads else normed, query))


def added_and_normed(x: Tensor, query: Tensor) -> Tensor:
    out = added(x, query)
    return joined((out, rms(out), rms(out)))


# Function of its tensors and options, its formula, the names of its tensors.
OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[str, ...]]] = {
    "layer_norm": (layer_norm, normalised, ("query",)),
    "layer_norm of heads": (
        lambda query, **given: joined(layer_norm(query, heads=heads_of(query), beside=True, **given)),
        of_heads,
        ("query",),
    ),
    "add_norms": (add_norms, added, ("x", "query")),
    "add_norms and norm": (
        lambda x, query, **given: joined(add_norms(x, query, norm=True, **given)),
        added_and_normed,
        ("x", "query"),
    ),
}
# The kernels, as the functions call them.
SERVED: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda query: norm_operators.layer_norm(query)[0],
    "layer_norm of heads": lambda query: joined(norm_operators.layer_norm(query, heads_of(query))),
    "add_norms": lambda x, query: norm_operators.add_norms(x, query)[0],
    "add_norms and norm": lambda x, query: joined(norm_operators.add_norms(x, query, True)),
}


def inputs_of(names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict:
    # Not the seed of the cotangent: of one along the query, little is left.
    generator = torch.Generator().manual_seed(1)
    # Off centre, so that a mean over more than the width would show.
    wide = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5 for name in names}
    if len(shape) == 3:  # not contiguous
        wide["query"] = wide["query"].transpose(0, 1).contiguous().transpose(0, 1)
    return {name: value.to(device, dtype) for name, value in wide.items()}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(name: str, shape: tuple[int, ...]) -> None:
    function, formula, names = OPERATORS[name]
    reference = partial(function, backend="reference")
    check_gradients(reference, formula, inputs_of(names, shape, torch.float64), EXACT)


def test_compiled_code_takes_the_reference_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def choose(op: str, backend: str | None, *_: object, **__: object) -> Callable[..., Tensor]:
        asked.append(backend)
        return lambda *tensors: tensors[:2]

    monkeypatch.setattr(norms.dispatch, "choose", choose)
    x = torch.ones(2, 4)
    layer_norm(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer_norm(x)
    layer_norm(x, backend="triton")
    monkeypatch.setenv(norms.dispatch.ENVIRONMENT_VARIABLE, "gdpa_layer_norm=triton")
    layer_norm(x)  # None is for the dispatcher, which reads the variable
    add_norms(x, x)
    assert asked == [None, "reference", "triton", None, "reference"]


def test_zeros_stay_with_finite_gradients() -> None:
    x, query = (torch.zeros(2, 8, requires_grad=True) for _ in range(2))
    out = add_norms(x, query)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in (x, query))


def test_autocast_leaves_the_dtype_alone() -> None:
    # That of CUDA widens norms, that of the CPU does not. A fake tensor goes through it without a GPU.
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            results = *reference.layer_norm(x, 2), *reference.add_norms(x, x, True)
            assert {result.dtype for result in results} == {torch.bfloat16}
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_shapes_and_dtypes_must_agree() -> None:
    x = torch.zeros(2, 8)
    for other in (torch.zeros(2, 4), torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one shape and dtype"):
            add_norms(x, other)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_in_the_interpreter(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.gdpa.triton import norms as triton_norms
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_norms)
    _, formula, names = OPERATORS[name]
    with poisoned_empty():
        check_gradients(SERVED[name], formula, inputs_of(names, shape, torch.float32), ROUNDED)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [("layer_norm", (0,)), ("layer_norm", (1,)), *(("add_norms", each) for each in ((0,), (1,), (2,), (0, 2), (1, 2)))],
)
def test_gradients_of_some_results(name: str, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.gdpa.triton import norms as triton_norms
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_norms)
    leaves = [value.requires_grad_() for value in inputs_of(("x", "query"), (3, 8), torch.float32).values()]
    given = (*leaves, True) if name == "add_norms" else (leaves[1], 2)
    ours, expected = (
        torch.autograd.grad(sum(results[i].square().sum() for i in wanted), leaves, allow_unused=True)
        for results in (getattr(module, name)(*given) for module in (norm_operators, reference))
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_kernels_compile_without_spills(target: str) -> None:
    from kernels.gdpa.triton import norms as triton_norms

    tiles = triton_norms.tiling(512)
    num_warps = tiles.pop("num_warps")
    options: dict[str, dict[str, int]] = {
        "layer_norm": {"HEAD": 64},
        "layer_norm_backward": {"HEAD": 64, "HAS_MORE": True},
        "add_norms": {"NORM": True},
        "add_norms_backward": {"HAS_GRAD": True, "NORM": True, "HAS_MORE": True},
    }
    for name, own in options.items():
        kernel, constants = getattr(triton_norms, f"{name}_kernel"), tiles | own
        *pointers, rows = (argument for argument in kernel.arg_names if argument not in constants)
        signature = dict.fromkeys(pointers, "*bf16") | {rows: "i32"}
        compiled = compile_ahead(kernel, signature, constants, target=target, num_warps=num_warps)
        assert compiled.spill_bytes == 0
        assert compiled.contains("ld.global.v4.b32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 8192), (1000, 512)], ids=str)
def test_kernels_on_a_gpu(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    function, formula, names = OPERATORS[name]
    with poisoned_empty():
        check_gradients(partial(function, backend="triton"), formula, inputs_of(names, shape, dtype, "cuda"), ROUNDED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    operators = {
        "layer_norm": (norm_operators._layer_norm, (0,)),
        "layer_norm of heads": (norm_operators._layer_norm, (8,)),
        "add_norms": (norm_operators._add_norms, ()),
        "add_norms and norm": (norm_operators._add_norms_normed, ()),
    }
    operator, options = operators[name]
    inputs = inputs_of(OPERATORS[name][2], (5, 48), torch.float32, "cuda")
    torch.library.opcheck(operator.definition, (*(value.requires_grad_() for value in inputs.values()), *options))
