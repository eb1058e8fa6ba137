"""Grouped products compiled for GPUs that need not be there: instructions, spills, shared memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from kernels.mxfp8.hopper import dequantize
from kernels.mxfp8.hopper.grouped import bf16, fp8, strict
from kernels.mxfp8.hopper.grouped.tiles import PAIRED
from kernels.testing import Compiled, compile_ahead
from tests.kernels.core.descriptors import descriptor


def _compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Compiled:
    signature = {name: "i32" for name in kernel.arg_names if name not in constants} | {"ends": "*i32"} | types
    return compile_ahead(
        kernel, signature, constants, target="sm_90", gluon=True, maxnreg=168,
        divisible_by_16=["N", "K"],
    )  # fmt: skip


def _bf16() -> Compiled:
    types = {
        "a_desc": descriptor("bf16", 64, 64),
        "b_desc": descriptor("bf16", 256, 64),
        "out_desc": descriptor("bf16", 64, 64),
        "out": "*bf16",
        "ticket": "*i32",
    }
    return _compiled(bf16._grouped_bf16_kernel, types, {"WGRAD": False, "B_T": False})


def _strict(wgrad: bool, ahead: bool = False) -> Compiled:
    types = {
        "a_desc": descriptor("fp8e4nv", 64, 64),
        "b_desc": descriptor("bf16", 256, 64),
        "words_desc": descriptor("i32", 1, 128, swizzle=0),
        "out_desc": descriptor("bf16", 64, 64),
        "out": "*bf16",
        "ticket": "*i32",
        "b_codes": "*i32",
        "b_scales": "*i16",
        "b_values": "*i32",
    }
    constants = {"WGRAD": wgrad, "OUT_T": wgrad, "A_FORM": 0, "AHEAD": ahead}
    return _compiled(strict._grouped_strict_kernel, types, constants)


def _fp8(wgrad: bool, out: str = "bf16", form: int = 0) -> Compiled:
    types = {
        "a_desc": descriptor("fp8e4nv", 64, 128),
        "b_desc": descriptor("fp8e4nv", 128, 128),
        "rows_desc": descriptor("u8", 1, 256, swizzle=0),
        "columns_desc": descriptor("bf16", 1, 128, swizzle=0),
        "out_desc": descriptor(out, 64, 64),
        "out": f"*{out}",
        "differ": "*i32",
        "ticket": "*i32",
    }
    return _compiled(fp8._grouped_fp8_kernel, types, {"WGRAD": wgrad, "A_FORM": form})


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("compiled", "products", "spill_bytes"),
    [
        pytest.param(_bf16, "m64n256k16.f32.bf16", 0, id="bf16"),
        pytest.param(lambda: _strict(False), "m64n256k16.f32.bf16", 0, id="mxfp8"),
        pytest.param(lambda: _strict(True), "m64n256k16.f32.bf16", 0, id="mxfp8 transposed wgrad"),
        pytest.param(lambda: _strict(False, ahead=True), "m64n256k16.f32.bf16", 0, id="mxfp8 of codes", marks=nightly),
        # Outside of the loops over the sums, which would take twice the time with what is spilled in them.
        pytest.param(lambda: _fp8(False), "m64n128k32.f32.e4m3", 64, id="mxfp8_g128"),
        pytest.param(lambda: _fp8(True, "fp32"), "m64n128k32.f32.e4m3", 0, id="wgrad in fp32", marks=nightly),
        pytest.param(lambda: _fp8(True, "fp32", PAIRED.value), "m64n128k32.f32.e4m3", 0, id="wgrad of pairs in fp32"),
        pytest.param(lambda: _fp8(True, "bf16", PAIRED.value), "m64n128k32.f32.e4m3", 0, id="of pairs", marks=nightly),
    ],
)
def test_compiles_to_asynchronous_products_without_spills(compiled: Any, products: str, spill_bytes: int) -> None:
    kernel = compiled()
    for instruction in (f"wgmma.mma_async.sync.aligned.{products}", "cp.async.bulk.tensor.2d", "setmaxnreg.inc"):
        assert instruction in kernel.ptx, instruction
    assert not kernel.serialized
    assert kernel.spill_bytes <= spill_bytes
    assert kernel.shared_bytes <= 227 * 1024


def test_dequantises_two_elements_at_a_time() -> None:
    types = {"codes": "*i16", "scales": "*i16", "values": "*i32", "num_lines": "i32"}
    kernel = compile_ahead(dequantize.dequantize_kernel, types, {}, target="sm_90", gluon=True)
    for instruction in ("mul.rn.bf16x2", "st.global.v4.b32"):
        assert instruction in kernel.ptx, instruction
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes == 0
