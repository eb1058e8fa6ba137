"""The Triton kernels of the jagged operators compiled for GPUs that are not here: no spills, tensor cores in use."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.jagged import (
    triton_bmm,
    triton_elementwise,
    triton_gather,
    triton_linear,
    triton_moves,
    triton_segment,
    triton_softmax,
    triton_square,
)
from kernels.testing import Compiled, compile_ahead

INDICES = {
    "offsets",
    "a_offsets",
    "b_offsets",
    "window_offsets",
    "selected_offsets",
    "starts",
    "order",
    "first",
    "squares",
    "rows",
}
POINTERS = {*"x y a b both out source grad largest dx dy weight bias row_bias before".split()} | INDICES
FLOATS = {"fill"}
OPTIONS = ("num_warps", "num_stages")


def build(kernel: Any, dtype: str, target: str, **constants: Any) -> Compiled:
    """Every argument that is neither a pointer nor a constant is an integer, and all of those divide by 16."""
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in INDICES:
            signature[name] = "*i64"
        elif name in POINTERS:
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    integers = [name for name, kind in signature.items() if kind == "i32" and name != "num_rows"]
    return compile_ahead(kernel, signature, constants, target=target, divisible_by_16=integers, **options)


STEPS = {"STEPS": 10}
TILE = {"BLOCK_R": 16, "BLOCK_W": 256}
LONG_TILE = {"BLOCK_L": 16, "BLOCK_W": 256}

PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"move {kind}": (triton_moves._move_kernel, {"KIND": kind, "SIDE": "last", **STEPS, **TILE})
        for kind in ("to_padded", "to_jagged", "flip", "window", "unwindow", "select")
    },
    "split": (triton_gather._concat_kernel, {"SPLIT": True, **STEPS, **TILE}),
    "sum selected": (triton_gather._sum_selected_kernel, {**STEPS, **TILE}),
    "outer sum": (triton_bmm._outer_sum_kernel, {"K": 8, **STEPS, "BLOCK_M": 16, "BLOCK_N": 256}),
    "softmax": (triton_softmax._column_kernel, {"BLOCK_L": 128, "BLOCK_W": 8}),
    "softmax gradient": (triton_softmax._column_gradient_kernel, {"BLOCK_L": 128, "BLOCK_W": 8}),
    **{
        f"matrix softmax {gradient}": (
            triton_softmax._matrix_kernel,
            {"GRADIENT": gradient, **STEPS, "BLOCK_R": 32, "ELEMENTS": 1024},
        )
        for gradient in (False, True)
    },
    **{
        f"segment {kind}": (triton_segment._reduce_kernel, {"KIND": kind, **LONG_TILE})
        for kind in ("sum", "mean", "max")
    },
    "segment spread": (triton_segment._spread_kernel, {"KIND": "mean", **STEPS, **TILE}),
    "segment max gradient": (triton_segment._max_gradient_kernel, LONG_TILE),
    "elementwise": (
        triton_elementwise._forward_kernel,
        {"OP": "mul", "ACTIVATION": "gelu", "DENSE": True, **STEPS, **TILE},
    ),
    **{
        f"elementwise gradient {dense}": (
            triton_elementwise._gradient_kernel,
            {"OP": "mul", "ACTIVATION": "gelu", "DENSE": dense, "BLOCK_L": 8, "BLOCK_W": 256},
        )
        for dense in (False, True)
    },
}


def products(dtype: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    kind, common = torch.bfloat16, {"PRECISION": "tf32"}
    if dtype == "fp32":
        kind, common = torch.float32, {"PRECISION": "tf32x3"}
    by_row = common | STEPS
    result = {
        f"dense {inner} {width}": (
            triton_bmm._dense_kernel,
            {**by_row, "y_stride_e": 1, **triton_bmm._dense_config(kind, inner, width)},
        )
        for inner, width in ((256, 8), (256, 256))
    }
    result |= {
        f"jagged {narrow} 256": (
            triton_bmm._jagged_kernel,
            {**common, "out_stride_d": 1, **triton_bmm._jagged_config(kind, narrow, 256)},
        )
        for narrow in (8, 256)
    }
    result["outer"] = (triton_square._outer_kernel, {**by_row, **triton_square._outer_config(kind, 256)})
    result |= {
        f"inner {transpose}": (
            triton_square._inner_kernel,
            {**by_row, "TRANSPOSE": transpose, **triton_square._inner_config(kind, 256)},
        )
        for transpose in (False, True)
    }
    epilogue = {"ACTIVATION": "gelu", "BIAS": True, "ROW_BIAS": True, "KEEP": True}
    result["linear"] = (triton_linear._linear_kernel, {**by_row, **epilogue, **triton_linear._config(kind, 256, 256)})
    return result


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str, target: str) -> None:
    kernel, constants = PLAIN[name]
    compiled = build(kernel, "bf16", target, **constants)
    assert compiled.spill_bytes <= 8, f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled"
    if not name.startswith("matrix"):  # whose rows begin anywhere
        assert ".v4." in compiled.ptx or ".v2." in compiled.ptx, "loads and stores are not vectorised"


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", products("bf16"))
def test_products(name: str, dtype: str, target: str) -> None:
    kernel, constants = products(dtype)[name]
    compiled = build(kernel, dtype, target, **constants)
    assert compiled.spill_bytes <= 8, f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled"
    assert re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", compiled.ptx), "tensor cores are not used"
