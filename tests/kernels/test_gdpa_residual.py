"""residual + RMSNorm(x + normed): the specification by its formula, the Triton kernels interpreted and compiled."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.gdpa import add_rms_norm, residual
from kernels.gdpa.residual import EPSILON, _reference
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty

EXACT = Tolerance("same arithmetic in another order", roundings=8, reduction=300, accumulate=torch.float64)
ROUNDED = Tolerance("sums and statistics in float32, the result rounded", roundings=3, reduction=300)
SHAPES = [(5, 48), (0, 16), (1, 5), (2, 3, 300), (70, 64)]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def formula(x: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    z = x + normed
    return residual + z / (z.square().sum(-1, keepdim=True) / z.shape[-1] + EPSILON).sqrt()


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name in ("x", "normed", "residual")}
    if len(shape) == 3:  # not contiguous
        wide["x"] = wide["x"].transpose(0, 1).contiguous().transpose(0, 1)
    return {name: value.to(device, dtype) for name, value in wide.items()}


def attend(backend: str) -> Any:
    return lambda **tensors: add_rms_norm(**tensors, backend=backend)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape: tuple[int, ...]) -> None:
    check_gradients(attend("reference"), formula, inputs_of(shape, torch.float64), EXACT)


def test_zeros_stay_with_finite_gradients() -> None:
    x, normed, residual = (torch.zeros(2, 8, requires_grad=True) for _ in range(3))
    out = add_rms_norm(x, normed, residual)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_autocast_leaves_the_dtype_alone() -> None:
    # That of CUDA widens norms, that of the CPU does not. A fake tensor goes through it without a GPU.
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            assert _reference(x, x, x).dtype is torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_shapes_and_dtypes_must_agree() -> None:
    x = torch.zeros(2, 8)
    for other in (torch.zeros(2, 4), torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one shape and dtype"):
            add_rms_norm(x, other, x)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_in_the_interpreter(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.gdpa import triton_residual
    from tests.kernels.interpreting import interpret

    interpret(monkeypatch, triton_residual)
    with poisoned_empty():
        check_gradients(
            lambda **tensors: residual._triton(**tensors), formula, inputs_of(shape, torch.float32), ROUNDED
        )


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_kernels_compile_without_spills(target: str) -> None:
    from kernels.gdpa import triton_residual

    constants = triton_residual.tiling(512)
    num_warps = constants.pop("num_warps")
    for kernel in (triton_residual.forward_kernel, triton_residual.backward_kernel):
        *pointers, rows = (name for name in kernel.arg_names if name not in constants)
        signature = dict.fromkeys(pointers, "*bf16") | {rows: "i32"}
        compiled = compile_ahead(kernel, signature, constants, target=target, num_warps=num_warps)
        assert compiled.spill_bytes == 0
        assert compiled.contains("ld.global.v4.b32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 8192), (1000, 512)], ids=str)
def test_kernels_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_empty():
        check_gradients(attend("triton"), formula, inputs_of(shape, dtype, "cuda"), ROUNDED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_opcheck() -> None:
    inputs = [value.requires_grad_() for value in inputs_of((5, 48), torch.float32, "cuda").values()]
    torch.library.opcheck(residual._attach.definition, tuple(inputs))
