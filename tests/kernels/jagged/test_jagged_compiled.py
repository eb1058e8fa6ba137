"""The Triton kernels of the jagged operators compiled for GPUs that are not here: no spills, tensor cores in use."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from kernels.core import dispatch
from kernels.core.chip import multiplies_registers
from kernels.jagged.triton import bmm, bmm_narrow, elementwise, gather, low_rank, moves, parts, segment, softmax, square
from kernels.jagged.triton import linear as triton_linear
from kernels.jagged.triton.parts import reduction_blocks
from kernels.testing import Compiled, compile_ahead
from tests.kernels.core.devices import FROM_REGISTERS, SHARED_LIMITS, on_chips

INDICES = {
    "offsets",
    "a_offsets",
    "b_offsets",
    "window_offsets",
    "selected_offsets",
    "starts",
    "begins",
    "first",
    "first_copy",
    "squares",
    "rows",
}
SUMS = {"parts", "sums"}
COUNTS = {"ties", "counts"}
POINTERS = {*"x y a da dy b both out source grad largest dx dy weight bias row_bias for_backward".split()}
POINTERS |= {*"wide narrow matrix wide_out narrow_out matrix_out of_rows of_chunks left products".split()}
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
        elif name in SUMS | COUNTS:
            signature[name] = "*fp32" if name in SUMS else "*i32"
        elif name in POINTERS:
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    integers = [name for name, kind in signature.items() if kind == "i32" and name != "num_rows"]
    return compile_ahead(kernel, signature, constants, target=target, divisible_by_16=integers, **options)


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_chips_that_are_compiled_for_are_served(target: str) -> None:
    number = int(target.removeprefix("sm_"))
    facts = {"device": "cuda", "capability": (number // 10, number % 10), "dtype": torch.bfloat16}
    operators = {"segment_sum": {}, "jagged_to_padded": {}, "jagged_dense_bmm": {}, "jagged_elementwise": {}}
    for operator, more in (operators | {"moe_top_k": {"num_experts": 8, "k": 2}}).items():
        assert re.search(r"triton .*chosen", dispatch.explain(operator, **facts, **more))
    assert "needs sm_80 or newer" in dispatch.explain("segment_sum", **facts | {"capability": (7, 5)})


def test_what_chips_multiply_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in SHARED_LIMITS:
        number = int(target.removeprefix("sm_"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, n=number: (n // 10, n % 10))
        multiplies_registers.cache_clear()
        assert multiplies_registers(torch.device("cuda", 0)) == (target in FROM_REGISTERS)
    multiplies_registers.cache_clear()


def test_the_size_of_a_batch_makes_no_kernel_of_its_own() -> None:
    modules = (bmm, elementwise, gather, triton_linear, moves, bmm_narrow, parts, low_rank)
    kernels = [value for module in (*modules, segment, softmax) for value in vars(module).values()]
    for kernel in kernels:
        if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel"):
            sizes = [parameter for parameter in kernel.params if parameter.name in ("num_rows", "total", "count")]
            assert all(size.do_not_specialize for size in sizes), kernel.__name__


STEPS = {"STEPS": 10}
TILE = {"BLOCK_R": 16, "BLOCK_W": 256}
BY_PART = {**STEPS, "PART": parts.PART}
LONG_TILE = {**BY_PART, "BLOCK_L": 16, "BLOCK_W": 256}

PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"move {kind}": (moves._move_kernel, {"KIND": kind, "SIDE": "last", **STEPS, **TILE})
        for kind in ("to_padded", "to_jagged", "flip", "window", "unwindow", "select")
    },
    "concat": (gather._concat_kernel, {"SPLIT": False, **STEPS, **TILE}),
    "split": (gather._concat_kernel, {"SPLIT": True, **STEPS, **TILE}),
    "sum selected": (gather._sum_selected_kernel, {**BY_PART, **TILE}),
    **{
        f"join {kind}": (parts._join_parts_kernel, {"KIND": kind, **BY_PART, "BLOCK_W": 256, "num_warps": 2})
        for kind in ("mean", "max")
    },
    "ranks of selected rows": (gather._rank_kernel, {"BLOCK_M": 4, "BLOCK_N": 1024}),
    "rows of places": (triton_linear._row_of_place_kernel, {**BY_PART, "BLOCK": 256}),
    "bias gradients": (triton_linear._linear_bias_kernel, {"CHUNK": 1024, "BLOCK_W": 4, "num_warps": 8}),
    "softmax": (softmax._softmax_kernel, {"BLOCK_L": 128, "BLOCK_W": 8}),
    "softmax gradient": (softmax._softmax_gradient_kernel, {"BLOCK_L": 128, "BLOCK_W": 8}),
    **{
        f"matrix softmax {gradient}": (
            softmax._softmax_matrix_kernel,
            {"GRADIENT": gradient, **STEPS, "BLOCK_R": 32, "ELEMENTS": 1024},
        )
        for gradient in (False, True)
    },
    **{
        f"segment {kind}": (segment._segment_reduce_kernel, {"KIND": kind, **LONG_TILE, "SUMS": 4, "EVEN": True})
        for kind in ("sum", "mean", "max")
    },
    "segment sum of short rows": (
        segment._segment_reduce_kernel,
        {"KIND": "sum", **LONG_TILE, **reduction_blocks(22528, 128, 2, 4, warps=2, widest=256), "EVEN": True},
    ),
    "segment spread": (segment._segment_spread_kernel, {"KIND": "mean", **LONG_TILE}),
    "segment max gradient": (segment._segment_max_gradient_kernel, {**LONG_TILE, "EVEN": True}),
    "elementwise": (
        elementwise._elementwise_kernel,
        {"OP": "mul", "ACTIVATION": "gelu", "DENSE": True, **STEPS, **TILE},
    ),
    **{
        f"elementwise gradient {dense}": (
            elementwise._elementwise_gradient_kernel,
            {"OP": "mul", "ACTIVATION": "gelu", "DENSE": dense, **LONG_TILE, "SUMS": 4, "EVEN": True},
        )
        for dense in (False, True)
    },
}


def products(
    dtype: str, from_registers: bool, shared: int = SHARED_LIMITS["sm_90"]
) -> dict[str, tuple[Any, dict[str, Any]]]:
    kind, common = torch.bfloat16, {"PRECISION": "tf32"}
    if dtype == "fp32":
        kind, common = torch.float32, {"PRECISION": "tf32x3"}
    by_row = common | STEPS
    whole_row = by_row | {"PART": parts.UNDIVIDED}
    result = {
        f"dense {inner} {width}": (
            bmm._bmm_dense_kernel,
            {**by_row, "y_stride_e": 1, **bmm._dense_config(kind, inner, width)},
        )
        for inner, width in ((256, 8), (256, 256))
    }
    result |= {
        f"jagged {narrow} 256": (
            bmm._bmm_jagged_kernel,
            {
                **whole_row,
                "out_stride_d": 1,
                **bmm._jagged_config(kind, narrow, 256, from_registers),
            },
        )
        for narrow in (8, 256)
    }
    for to in (("wide",), ("narrow",), ("wide", "matrix"), ("wide", "narrow"), ("narrow", "matrix")):
        if bmm_narrow.serves(256, 8, kind, to):
            flags = {f"TO_{name.upper()}": name in to for name in ("wide", "narrow", "matrix")}
            strides = {"matrix_stride_t": 1, "out_stride_t": 1}
            result[f"narrow {to}"] = (
                bmm_narrow._bmm_narrow_kernel,
                {**whole_row, "NARROW_STRIDE": 8, "T": 8, **flags, **strides, **bmm_narrow.config(kind, 256, to)},
            )
    for width in (128, 512, low_rank.MAX_WIDTH):
        strides = {"left_stride_d": 1, "weight_stride_n": 1}
        forward = by_row | strides | {"PART": low_rank._PART, **low_rank._forward_config(kind, width, width)}
        result[f"low rank {width}"] = (low_rank._low_rank_kernel, forward | {"N": 4})
        if dtype == "bf16" or width == 128:
            weight = common | {"weight_stride_n": 1, **low_rank._weight_config(kind, width, shared)}
            result[f"low rank weight {width}"] = (low_rank._low_rank_weight_kernel, weight | {"N": 4})
    outer = square._outer_config(kind, 256, from_registers)
    result["outer"] = (square._bmm_outer_kernel, {**by_row, "TMA": False, **outer})
    result |= {
        f"inner {transpose}": (
            square._bmm_inner_kernel,
            {**by_row, "TRANSPOSE": transpose, **square._inner_config(kind, 256)},
        )
        for transpose in (False, True)
    }
    if dtype == "bf16":
        result |= {
            f"inner gradients {transpose}": (
                square._bmm_gradients_kernel,
                {**by_row, "TRANSPOSE": transpose, **square._gradients_config(256, from_registers)},
            )
            for transpose in (False, True)
        }
    epilogue = {"ACTIVATION": "gelu", "BIAS": True, "ROW_BIAS": True, "KEEP": True}
    linear = triton_linear._config(kind, 256, 256, from_registers)
    result["linear"] = (triton_linear._linear_kernel, {**common, **epilogue, **linear})
    return result


# The kinds of a kernel differ in a few instructions: on chips other than Hopper one of them stands for all.
FIRST_OF_KERNEL = {kernel.__name__: name for name, (kernel, _) in reversed(PLAIN.items())}


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, "sm_90") for name in PLAIN if name not in FIRST_OF_KERNEL.values()] + on_chips(FIRST_OF_KERNEL.values()),
)
def test_plain(name: str, target: str) -> None:
    kernel, constants = PLAIN[name]
    compiled = build(kernel, "bf16", target, **constants)
    assert compiled.spill_bytes <= 16, f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled"
    if not name.startswith(("matrix", "rows")):  # whose rows begin anywhere
        assert ".v4." in compiled.ptx or ".v2." in compiled.ptx, "loads and stores are not vectorised"


ALIKE = [
    (name, dtype, target) for target in ("sm_80", "sm_89") for name, dtype in (("outer", "bf16"), ("linear", "fp32"))
]


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [
        *on_chips((name, "bf16") for name in products("bf16", False)),
        *on_chips(((name, "fp32") for name in products("fp32", False)), always=""),
        *ALIKE,
    ],
)
def test_products(name: str, dtype: str, target: str) -> None:
    kernel, constants = products(dtype, target in FROM_REGISTERS, SHARED_LIMITS[target])[name]
    compiled = build(kernel, dtype, target, **constants)
    assert compiled.shared_bytes <= SHARED_LIMITS[target]
    # A few addresses; accumulators in memory would be kilobytes.
    assert compiled.spill_bytes <= 32, f"{compiled.registers} registers, {compiled.spill_bytes} bytes spilled"
    if constants["PRECISION"] == "ieee":
        assert "fma.rn.f32" in compiled.ptx
    else:
        assert re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", compiled.ptx), "tensor cores are not used"


def test_an_outer_product_by_tma_compiles() -> None:
    config = square._outer_config(torch.float32, 256) | {"PRECISION": "tf32x3", "BLOCK_D": 64}
    options = {name: config.pop(name) for name in OPTIONS}
    kernel, constants = square._bmm_outer_kernel, {**STEPS, **config, "TMA": True, "BLOCK_N": 32}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= {"offsets": "*i64", "squares": "*i64", "out": "*fp32"}
    signature |= {"x": "tensordesc<fp32[64, 64]>", "y": "tensordesc<fp32[32, 64]>"}
    compiled = compile_ahead(kernel, signature, constants, target="sm_90", **options)
    assert compiled.spill_bytes == 0
    assert compiled.contains("cp.async.bulk.tensor")
    assert compiled.contains("wgmma.mma_async")
    assert compiled.shared_bytes <= SHARED_LIMITS["sm_90"]
