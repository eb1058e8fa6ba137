"""The experts' first product with SwiGLU in its epilogue, against the product and SwiGLU one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.moe.hopper import gather, hidden, swiglu_product, swiglu_product_bf16
from kernels.moe.triton import route
from kernels.mxfp8.grouped import Operand, Quantized
from kernels.mxfp8.hopper.grouped.tiles import MAX_REGISTERS
from kernels.mxfp8.hopper.quantize import weights
from kernels.mxfp8.hopper.quantize.pairs import codes_layout
from kernels.testing import compile_ahead, poisoned_empty
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.moe.moe_cases import random, routing

CODES = f"tensordesc<i16[64, 64],{codes_layout()!r}>"
QUANTIZED = {
    "a_desc": descriptor("fp8e4nv", 64, 128),
    "b_desc": descriptor("fp8e4nv", 1, 16, 4, 2, 128, swizzle=128),
    "rows_desc": descriptor("u8", 1, 128, swizzle=0),
    "columns_desc": descriptor("bf16", 1, 128, swizzle=0),
    "codes_desc": CODES,
    "kept_desc": CODES,
    "scales": "*u8",
    "kept_scales": "*i32",
    "differ": "*i32",
}
BF16 = {name: descriptor("bf16", 64, 64) for name in ("a_desc", "result_desc", "hidden_desc")}
BF16 |= {"b_desc": descriptor("bf16", 128, 64)}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("kernel", "types", "instructions"),
    [
        (
            swiglu_product.swiglu_product_kernel,
            QUANTIZED,
            # The last one: 16 codes that one thread has of a row.
            ("m64n128k32.f32.e4m3", "bulk.tensor.5d.shared", "max.NaN.xorsign.abs.bf16x2", "st.shared.v4"),
        ),
        (swiglu_product_bf16.swiglu_product_bf16_kernel, BF16, ("m64n256k16.f32.bf16", "stmatrix")),
    ],
    ids=["mxfp8_g128", "bf16"],
)
def test_compiles_without_spills(kernel: Any, types: dict[str, str], instructions: tuple[str, ...], keep: bool) -> None:
    types = types | {"ticket": "*i32", "ends": "*i32"}
    compiled = compile_ahead(
        kernel, {name: "i32" for name in kernel.arg_names if name != "KEEP"} | types, {"KEEP": keep},
        target="sm_90", num_warps=4, gluon=True, maxnreg=MAX_REGISTERS, divisible_by_16=["N", "K"],
    )  # fmt: skip
    for instruction in (*instructions, "cp.async.bulk.tensor.2d.global.shared", "setmaxnreg.inc"):
        assert instruction in compiled.ptx, instruction
    # Conversions are of two elements: those of one take four times as long.
    assert "cvt.rn.bf16.f32" not in compiled.ptx
    assert not compiled.serialized
    assert compiled.spill_bytes <= 16  # outside of the loops over the sums
    assert compiled.shared_bytes <= 227 * 1024


def first_product(
    tokens: int, experts: int, top_k: int, load: str, depth: int, width: int, group: int, uneven: bool = False
) -> tuple[Operand, Operand, torch.Tensor]:
    """Rows, gate_up and ends; `uneven`: of which squares of 128 x 128 do not share their scales."""
    permutation = route.permutation(routing(tokens, experts, top_k, load).cuda(), experts)
    weight = random(experts, 2 * width, depth, seed=1) * depth**-0.5
    if uneven:
        weight[:, ::3] *= 2.0**-14
    gate_up = weight.bfloat16().cuda()
    rows, row_scales, *_ = gather.gather(random(tokens, depth).bfloat16().cuda(), permutation, group, None)
    if not group:
        return rows, gate_up, permutation.ends
    quantized = weights.operand(gate_up, False, group)
    assert isinstance(quantized, Quantized)
    assert bool(quantized.differ) == uneven
    return Quantized(rows, row_scales, group), quantized, permutation.ends


def parts_of(results: hidden.Hidden, end: int) -> list[torch.Tensor]:
    """All tensors, as bytes, up to the last row."""
    result, kept, kept_scales = results
    # Scales have a column for each row.
    of_result = [result.codes[:end], result.scales[:, :end]] if isinstance(result, Quantized) else [result[:end]]
    return [part.contiguous().view(torch.uint8) for part in (*of_result, kept[:end], kept_scales[:, :end])]


@on_hopper
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("group", "uneven"), [(0, False), (128, False), (128, True)])
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
    tokens: int, experts: int, top_k: int, load: str, depth: int, width: int, group: int, uneven: bool, keep: bool
) -> None:
    rows, gate_up, ends = first_product(tokens, experts, top_k, load, depth, width, group, uneven)
    with poisoned_empty():
        results = [run(rows, gate_up, ends, keep) for run in (hidden.in_the_product, hidden.in_passes)]
    end = int(ends[-1])
    own, passes = (parts_of(each, end) for each in results)
    for i, (actual, expected) in enumerate(zip(own, passes, strict=True)):
        if i == 0 and not group:  # other instructions for the exponential and the quotient: a rounding apart
            close = actual.view(torch.bfloat16).float(), expected.view(torch.bfloat16).float()
            torch.testing.assert_close(*close, rtol=2**-7, atol=1e-30)
        else:
            assert torch.equal(actual, expected), i
    again = parts_of(hidden.in_the_product(rows, gate_up, ends, keep), end)
    assert all(torch.equal(*pair) for pair in zip(own, again, strict=True))


@on_hopper
def test_gpu_broken_rows_stay_broken() -> None:
    """A NaN or an infinity in a row spoils that row of the result and of what is kept, and no other."""
    permutation = route.permutation(torch.zeros(256, 1, dtype=torch.int64).cuda(), 1)
    x = random(256, 128).bfloat16()
    x[3, 5], x[200, 7] = torch.nan, torch.inf
    rows, row_scales, *_ = gather.gather(x.cuda(), permutation, 128, None)
    gate_up = weights.operand(random(1, 512, 128, seed=1).bfloat16().cuda(), False, 128)
    arguments = (Quantized(rows, row_scales, 128), gate_up, permutation.ends, True)
    own, passes = hidden.in_the_product(*arguments), hidden.in_passes(*arguments)
    assert isinstance(own[0], Quantized)
    assert own[0].codes.float().isnan().all(1).nonzero().flatten().tolist() == [3, 200]
    own_parts, passes_parts = parts_of(own, 256), parts_of(passes, 256)
    for i in (1, 3):  # scales; the codes of a broken block mean nothing
        assert torch.equal(own_parts[i], passes_parts[i])
