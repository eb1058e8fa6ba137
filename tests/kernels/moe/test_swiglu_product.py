"""The experts' first product with SwiGLU in its epilogue, against the product and SwiGLU one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.core import dispatch
from kernels.moe.hopper import gather, hidden, swiglu_product
from kernels.moe.hopper.swiglu_quantized import Results
from kernels.moe.triton import route
from kernels.mxfp8.grouped import Quantized
from kernels.mxfp8.hopper.quantize import weights
from kernels.mxfp8.hopper.quantize.pairs import codes_layout
from kernels.testing import compile_ahead, poisoned_empty
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import HOPPER
from tests.kernels.moe.moe_cases import random, routing

on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.mark.parametrize("keep", [False, True])
def test_compiles_without_spills(keep: bool) -> None:
    codes = f"tensordesc<i16[64, 64],{codes_layout()!r}>"
    types = {
        "a_desc": descriptor("fp8e4nv", 64, 128),
        "b_desc": descriptor("fp8e4nv", 1, 16, 4, 2, 128, swizzle=128),
        "rows_desc": descriptor("u8", 1, 128, swizzle=0),
        "columns_desc": descriptor("bf16", 1, 128, swizzle=0),
        "codes_desc": codes,
        "kept_desc": codes,
        "scales": "*u8",
        "kept_scales": "*i32",
        "differ": "*i32",
        "ticket": "*i32",
        "ends": "*i32",
    }
    kernel = swiglu_product.swiglu_product_kernel
    signature = {name: "i32" for name in kernel.arg_names if name != "KEEP"} | types
    compiled = compile_ahead(
        kernel, signature, {"KEEP": keep}, target="sm_90", num_warps=4, gluon=True,
        maxnreg=swiglu_product.MAX_REGISTERS, divisible_by_16=["N", "K"],
    )  # fmt: skip
    for instruction in (
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3",
        "cp.async.bulk.tensor.5d.shared",
        "cp.async.bulk.tensor.2d.global.shared",
        "st.shared.v4",  # 16 codes that one thread has of a row
        "max.NaN.xorsign.abs.bf16x2",
        "setmaxnreg.inc",
    ):
        assert instruction in compiled.ptx, instruction
    assert not compiled.serialized
    assert compiled.spill_bytes <= 16  # outside of the loops over the sums
    assert compiled.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"group": 32}, "not 32"),
        ({"group": 128, "in_features": 192}, "got 192"),
        ({"group": 128, "out_features": 64}, "and 64"),
        ({"group": 128, "capability": (10, 0)}, "sm_90"),
        ({"group": 128}, "chosen"),
    ],
)
def test_what_it_serves(facts: dict[str, Any], reason: str) -> None:
    given = {"device": "cuda", "capability": (9, 0), "dtype": torch.float8_e4m3fn, **facts}
    (line,) = (line for line in dispatch.explain("moe_hidden", **given).splitlines() if line.split()[0] == "hopper")
    assert reason in line


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "load", "depth", "width"),
    [
        (1, 1, 1, "random", 128, 128),
        (300, 5, 2, "random", 256, 384),
        (700, 16, 2, "one", 512, 128),
        (5000, 8, 2, "random", 512, 2048),
        (900, 3, 3, "random", 1152, 256),
    ],
)
def test_gpu_is_the_two_passes_bit_for_bit(
    tokens: int, experts: int, top_k: int, load: str, depth: int, width: int, uneven: bool, keep: bool
) -> None:
    """Also with weights of which squares of 128 x 128 do not share their scales (`uneven`)."""
    permutation = route.permutation(routing(tokens, experts, top_k, load).cuda(), experts)
    x = random(tokens, depth).bfloat16().cuda()
    weight = random(experts, 2 * width, depth, seed=1) * depth**-0.5
    if uneven:
        weight[:, ::3] *= 2.0**-14
    rows, row_scales, *_ = gather.gather(x, permutation, 128, None)
    gate_up = weights.operand(weight.bfloat16().cuda(), False, 128)
    assert isinstance(gate_up, Quantized)
    assert bool(gate_up.differ) == uneven
    arguments = (Quantized(rows, row_scales, 128), gate_up, permutation.ends, width, keep)
    with poisoned_empty():
        results: list[Results] = [each.hidden(*arguments) for each in (swiglu_product, hidden)]
    end = int(permutation.ends[-1])
    for name, own, passes in zip(Results._fields, *results, strict=True):
        assert own.shape == passes.shape
        along = own[:, :end] if name.endswith("scales") else own[:end]
        expected = passes[:, :end] if name.endswith("scales") else passes[:end]
        assert torch.equal(along.view(torch.int8), expected.view(torch.int8)), name
    again = swiglu_product.hidden(*arguments)
    assert torch.equal(again.codes[:end].view(torch.int8), results[0].codes[:end].view(torch.int8))


@on_hopper
@pytest.mark.gpu
def test_gpu_broken_rows_stay_broken() -> None:
    """A NaN or an infinity in a row spoils that row of the result and of what is kept, and no other."""
    permutation = route.permutation(torch.zeros(256, 1, dtype=torch.int64).cuda(), 1)
    x = random(256, 128).bfloat16()
    x[3, 5], x[200, 7] = torch.nan, torch.inf
    rows, row_scales, *_ = gather.gather(x.cuda(), permutation, 128, None)
    gate_up = weights.operand(random(1, 512, 128, seed=1).bfloat16().cuda(), False, 128)
    assert isinstance(gate_up, Quantized)
    arguments = (Quantized(rows, row_scales, 128), gate_up, permutation.ends, 256, True)
    own, passes = swiglu_product.hidden(*arguments), hidden.hidden(*arguments)
    broken = own.codes.float().isnan().all(1).nonzero().flatten().tolist()
    assert broken == [3, 200]
    assert torch.equal(own.scales.view(torch.uint8), passes.scales.view(torch.uint8))
    assert torch.equal(own.kept_scales, passes.kept_scales)
