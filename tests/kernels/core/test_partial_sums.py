"""What adds up partial sums: all of them, once, in the dtype that is asked for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from kernels.core import partial_sums
from kernels.testing import compile_ahead, poisoned_empty
from tests.kernels.core.interpreting import interpret

SHAPES = [(1, 1), (3, 5), (7, 3, 40), (33, 4, 96), (528, 128), (2049, 24), (264, 16, 72), (0, 8), (4, 0)]


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    with poisoned_empty():
        total = partial_sums.add_partial_sums(x, dtype)
    exact = x.double().sum(0)
    assert total.dtype is dtype
    # Sums of float32 in trees of at most a thousand, and one rounding to the result's dtype.
    slack = 1e-6 * x.double().abs().sum(0) + torch.finfo(dtype).eps * exact.abs()
    assert ((total.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partial_sums_are_added(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    interpret(monkeypatch)
    check(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (132, 8192, 128)], ids=str)
def test_gpu_adds_partial_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("rows", "block"), [(1024, 8), (16, 512)])
def test_it_compiles_within_its_registers(target: str, rows: int, block: int) -> None:
    compiled = compile_ahead(
        partial_sums._add_partial_sums_kernel,
        {"parts": "*fp32", "out": "*bf16", "count": "i32", "width": "i32"},
        {"PARTS": rows, "BLOCK": block},
        target=target,
        num_warps=8,
    )
    assert compiled.spill_bytes == 0
