"""The fused projection to rotated q and k, and v: compiled for Hopper, in compiled code, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from kernels.tokens import project_qkv, reference
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.tokens.test_tokens import HAS_TRITON

# Rows, features, heads and the width of each: tiles of 128 and of 256 columns, and parts of them.
SHAPES = [(1, 8, 1, 64), (0, 64, 2, 64), (127, 64, 1, 128), (129, 72, 3, 64), (1000, 128, 2, 64), (500, 256, 2, 128)]
ROUNDED = Tolerance("sums over up to 1,000 rows of operands rounded once", roundings=4, reduction=1000)


def check(
    function: Callable[..., tuple[Tensor, ...]],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    table: bool,
) -> None:
    rows, depth, heads, width = shape
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(rows, depth, generator=generator),
        "weight": torch.randn(3 * heads * width, depth, generator=generator) / depth**0.5,
    }
    angle = torch.rand(50 if table else rows, width // 2, generator=generator).to(device) * 6
    positions = torch.randint(0, 50, (rows,), generator=generator).to(device) if table else None
    settings: dict[str, Any] = {"positions": positions, "heads": heads, "twice": table}

    def turned(project: Callable[..., tuple[Tensor, ...]], x: Tensor, weight: Tensor) -> Tensor:
        cos, sin = angle.cos(), angle.sin()
        if x.dtype is torch.float64:
            cos, sin = cos.double(), sin.double()
        # Both readers of k and v, with gradients of their own.
        parts = project(x, weight, cos, sin, **settings)
        return torch.cat([part.flatten(1) * (at + 1) for at, part in enumerate(parts)], 1)

    with poisoned_empty():
        moved = {name: value.to(device, dtype) for name, value in inputs.items()}
        check_gradients(partial(turned, function), partial(turned, reference.project_qkv), moved, ROUNDED)


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_specification(shape: tuple[int, int, int, int], table: bool) -> None:
    check(partial(project_qkv, backend="reference"), shape, torch.float32, "cpu", table)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(("head", "columns"), [(64, 128), (64, 256), (128, 128), (128, 256)])
def test_compiled_for_hopper(head: int, columns: int, table: bool) -> None:
    from kernels.tokens.hopper import rotated_product

    types = {"x_desc": descriptor("bf16", 64, 64), "w_desc": descriptor("bf16", columns, 64)}
    types |= {"out_desc": descriptor("bf16", 64, 64), "cos": "*fp32", "sin": "*fp32"}
    types |= {"positions": "*i64" if table else "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    compiled = compile_ahead(
        rotated_product._rotated_product_kernel,
        types,
        {"HEAD": head, "TABLE": table, "COLUMNS": columns},
        target="sm_90",
        gluon=True,
        maxnreg=168,
        divisible_by_16=["N", "K"],
    )
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16" in compiled.ptx
    assert not compiled.serialized
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_compiled_code_under_autocast_and_bad_shapes(dynamic: bool) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    angle = torch.rand(3, 2)
    call = partial(project_qkv, cos=angle.cos(), sin=angle.sin(), heads=2)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for ours, expected in zip(compiled(x, weight), call(x, weight), strict=True):
        torch.testing.assert_close(ours, expected)
    value = call(x, weight)[2]
    torch.testing.assert_close(value.flatten(1), F.linear(x, weight[16:]))
    with torch.autocast("cpu", torch.bfloat16):
        assert {part.dtype for part in call(x, weight)} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"weight \[3 \* heads=5 \* d, D\], got \(3, 4\) and \(24, 4\)"):
        call(x, weight, heads=5)
    with pytest.raises(ValueError, match=r"shapes do not fit: q \[N, heads, d\] \(3, 1, 8\)"):
        call(x, weight, heads=1)


@on_hopper
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (70000, 128, 2, 64), (20000, 512, 4, 128)], ids=str)
def test_on_hopper(shape: tuple[int, int, int, int], table: bool) -> None:
    from kernels.tokens.hopper.project_qkv import project_qkv as on_hopper

    def ours(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        return on_hopper(x, weight, cos, sin, *settings.values())

    check(ours, shape, torch.bfloat16, "cuda", table)
