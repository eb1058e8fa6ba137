"""Two linear layers with SiLU between them: compiled for Hopper, in compiled code, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from kernels.tokens import silu_mlp
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.tokens.test_tokens import HAS_TRITON

# Rows and the widths before, between and behind the layers: more than a tile of each, and less.
SHAPES = [
    (1, 8, 8, 8),
    (0, 64, 256, 64),
    (127, 64, 256, 64),
    (129, 72, 264, 40),
    (5000, 384, 768, 384),
    (300, 8, 4104, 8),
]
# z, silu(z + bias) and the gradient of z are rounded before further products.
ROUNDED = Tolerance("sums over up to 5,000 rows of operands rounded once", roundings=4, reduction=5000)


def specification(x: Tensor, inner: Tensor, bias: Tensor, outer: Tensor, outer_bias: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, inner, bias)), outer, outer_bias)


def check(function: Callable[..., Tensor], shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    rows, before, between, behind = shape
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (rows, 1, before), "inner": (between, before), "bias": (between,), "outer": (behind, between)}
    inputs = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    inputs["outer_bias"] = torch.randn(behind, generator=generator)
    inputs["inner"] /= before**0.5
    inputs["outer"] /= between**0.5
    with poisoned_empty():
        moved = {name: value.to(device, dtype) for name, value in inputs.items()}
        check_gradients(function, specification, moved, ROUNDED)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_specification(shape: tuple[int, int, int, int]) -> None:
    check(partial(silu_mlp, backend="reference"), shape, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("backward", [False, True])
def test_compiled_for_hopper(backward: bool) -> None:
    from kernels.tokens.hopper import silu_products

    types = {name: descriptor("bf16", 64, 64) for name in ("x_desc", "z_desc", "out_desc")}
    types["w_desc"] = descriptor("bf16", *((64, 256) if backward else (256, 64)))
    types |= {"bias": "*bf16", "sums": "*fp32" if backward else "*bf16", "M": "i32", "N": "i32", "K": "i32"}
    compiled = compile_ahead(
        silu_products._silu_product_kernel,
        types,
        {"BACKWARD": backward},
        target="sm_90",
        gluon=True,
        maxnreg=168,
        divisible_by_16=["N", "K"],
    )
    products = "wgmma.mma_async.sync.aligned.{}.f32.bf16"
    assert products.format("m64n256k16") in compiled.ptx
    assert (products.format("m64n8k16") in compiled.ptx) == backward  # the sums by column
    assert not compiled.serialized
    assert compiled.spill_bytes <= 128  # outside of the loop over the sums
    assert compiled.shared_bytes <= 227 * 1024


def test_in_compiled_code_under_autocast_and_bad_shapes() -> None:
    sizes = ((3, 4), (5, 4), (5,), (6, 5), (6,))
    tensors = [torch.randn(size, requires_grad=True) for size in sizes]
    compiled = torch.compile(silu_mlp, backend="aot_eager", fullgraph=True)
    ours, expected = (torch.autograd.grad(f(*tensors).square().sum(), tensors) for f in (compiled, specification))
    torch.testing.assert_close(ours, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert silu_mlp(*tensors).dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"takes inner \[F, 4\], bias \[F\], outer \[E, F\]"):
        silu_mlp(tensors[0], tensors[1], tensors[2], tensors[1])
    with pytest.raises(ValueError, match="operands must have one dtype"):
        silu_mlp(tensors[0].bfloat16(), *tensors[1:])


@on_hopper
@pytest.mark.parametrize("shape", [*SHAPES, (70000, 384, 768, 384), (20000, 1536, 3072, 1536)], ids=str)
def test_on_hopper(shape: tuple[int, int, int, int]) -> None:
    from kernels.tokens.hopper.silu_mlp import silu_mlp as on_hopper

    check(on_hopper, shape, torch.bfloat16, "cuda")


@on_hopper
def test_rows_apart_and_the_same_bits_again() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    wide, inner, bias, outer = random(20000, 128), random(64, 72)[:, :64], random(64), random(8, 64)
    x = wide[:, :64].requires_grad_()
    weights = [each.requires_grad_() for each in (inner, bias, outer)]
    results = []
    for _ in range(2):
        out = silu_mlp(x, *weights, backend="hopper")
        results.append((out, *torch.autograd.grad(out.float().square().sum(), [x, *weights])))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    expected = silu_mlp(x.detach().contiguous(), *(each.detach().contiguous() for each in weights), backend="hopper")
    assert torch.equal(results[0][0], expected)
