"""Operators that skip the dispatcher where nobody watches it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import jagged
from kernels.core.caches import cached
from kernels.core.operator import custom_op, intercepted, on_its_device

calls: list[tuple[int, bool]] = []


@custom_op("gemsmith_tests::scale")
def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    calls.append((torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()))
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor = inputs[1]


scale.register_autograd(lambda ctx, grad: (scale(grad, ctx.factor), None), setup_context=_save)


@custom_op("gemsmith_tests::halve")
def halve(x: Tensor) -> Tensor:
    """An operator without a gradient."""
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("gemsmith_tests::numbers")
def numbers(x: Tensor, count: int, factor: float, dtype: torch.dtype) -> Tensor:
    """What a kernel would be compiled for."""
    assert (type(count), type(factor)) == (int, float)
    return torch.full_like(x, count * factor, dtype=dtype)


@custom_op("gemsmith_tests::table")
def table(offsets: Tensor) -> Tensor:
    """A copy of what is cached of offsets."""
    return cached(offsets.clone, "key", offsets, offsets).clone()


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def leaf() -> Tensor:
    return torch.arange(3.0).requires_grad_()


def test_first_and_second_derivatives() -> None:
    x = leaf()
    out = scale(x, 3.0)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    torch.testing.assert_close(first, 18 * x)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full((3,), 18.0))


def test_nothing_is_recorded_without_need() -> None:
    calls.clear()
    assert not scale(torch.ones(2), 2.0).requires_grad
    with torch.no_grad():
        assert not scale(leaf(), 2.0).requires_grad
    assert scale(leaf(), 2.0).requires_grad
    assert calls == [(0, True), (0, False), (0, False)]


def test_a_missing_gradient_is_an_error() -> None:
    torch.testing.assert_close(halve(torch.ones(2)), torch.full((2,), 0.5))
    with pytest.raises(RuntimeError, match="halve has no gradient"):
        halve(leaf()).sum().backward()


def test_forward_mode_is_an_error_and_not_zero() -> None:
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        scale(forward_ad.make_dual(torch.ones(2), torch.ones(2)), 2.0)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: scale(x, 2.0), (torch.ones(2),), (torch.ones(2),))


def test_an_operator_runs_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device."""
    current = [0]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    with torch._subclasses.FakeTensorMode():
        tensors = [torch.empty(2, device=place) for place in ("cuda:0", "cuda:1", "cpu")]
    here = on_its_device(lambda *_: current[-1])
    assert [here(2.0, tensor) for tensor in tensors] == [0, 1, 0]
    assert here(2.0) == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_runs_where_its_tensors_are() -> None:
    values, offsets = torch.arange(6.0, device="cuda:1").view(3, 2), torch.tensor([0, 1, 3], device="cuda:1")
    for sums in (
        jagged.segment_sum(values, offsets),
        torch.ops.gemsmith.segment_reduce(values, offsets, "sum", torch.float32),
    ):
        assert sums.tolist() == [[0.0, 1.0], [6.0, 8.0]]


def test_modes_and_subclasses_see_the_operator() -> None:
    with Record() as record:
        scale(torch.ones(2), 2.0)
    assert "gemsmith_tests.scale.default" in record.names
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    calls.clear()
    assert scale(fake, 2.0).shape == (2,)
    assert scale(torch.empty(2, device="meta"), 2.0).is_meta
    assert not calls
    torch.testing.assert_close(scale(torch._neg_view(torch.ones(2)), 2.0), torch.full((2,), -2.0))


def test_a_wrapper_that_outlived_its_transform_is_seen() -> None:
    wrappers: list[Tensor] = []
    torch.func.grad(lambda x: (wrappers.append(x), x.sum())[1])(torch.ones(3))
    assert intercepted((2.0, *wrappers))
    assert not intercepted((2.0, torch.ones(3), torch.nn.Parameter(torch.ones(3)), None, "a"))
    torch.testing.assert_close(scale(*wrappers, 2.0), torch.full((3,), 2.0))


def test_numbers_are_what_the_dispatcher_would_make_of_them() -> None:
    for count, factor in ((2, 3), (np.int64(2), np.float32(3)), (torch.tensor(2), torch.tensor(3.0))):
        assert numbers(torch.ones(1), count, factor, torch.int64).item() == 6
    with pytest.raises(TypeError):
        numbers(torch.ones(1), 2.5, 3.0, torch.int64)


def test_tables_are_not_remembered_below_the_dispatcher() -> None:
    """Inductor puts another tensor into the memory and the Python object of one that is no longer read."""
    offsets = torch.tensor([0, 3])
    for definition, seen in ((table.definition, [0, 4]), (table, [0, 3])):
        offsets.numpy()[1] = 3
        assert definition(offsets).tolist() == [0, 3]
        offsets.numpy()[1] = 4
        assert definition(offsets).tolist() == seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_trace_records_the_operator() -> None:
    traced = torch.jit.trace(lambda x: scale(x, 2.0), torch.ones(2))
    assert "gemsmith_tests::scale" in str(traced.graph)


def test_traced_whole() -> None:
    compiled = torch.compile(lambda x: scale(x, 2.0) + 1, backend="aot_eager", fullgraph=True)
    x = leaf()
    out = compiled(x)
    torch.testing.assert_close(out, 2 * x + 1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full((3,), 2.0))


def test_opcheck() -> None:
    torch.library.opcheck(scale.definition, (leaf(), 2.0))
    torch.library.opcheck(halve.definition, (torch.ones(2),))


def test_no_operator_has_defaults() -> None:
    """PyTorch leaves out last arguments that equal them, and what saves for the backward would miss these."""
    functions = [
        function
        for file in (Path(__file__).parents[3] / "kernels").rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any("custom_op" in ast.unparse(each) for each in function.decorator_list)
    ]
    assert len(functions) > 50
    assert [function.name for function in functions if function.args.defaults] == []
