"""The Triton kernels of linear compression: interpreted and compiled here, run on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.core import dispatch
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty, serving

pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")

from kernels.ikbo.triton import lce
from tests.kernels.core.devices import PRODUCTS, SHARED_LIMITS, on_chips
from tests.kernels.core.interpreting import interpret
from tests.kernels.ikbo.lce_cases import SHAPES, Case, call

TOLERANCE = Tolerance("sums over tokens and over at most 300 candidates", roundings=4, reduction=1200)
LARGER = {"tails of blocks": Case(((1, 0, 3),), num_out=70, depth=66, user_depths=(33,), width=130)}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interpret(monkeypatch, lce)
    monkeypatch.setitem(dispatch._registry, "linear_compression", serving("linear_compression", "triton"))
    dispatch._chosen.clear()
    yield
    dispatch._chosen.clear()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", sorted((SHAPES | LARGER).keys() - {"one huge"}))
def test_interpreted(shape: str) -> None:
    with poisoned_empty():
        check_gradients(
            lambda **tensors: call("triton", **tensors),
            lambda **tensors: call("reference", **tensors),
            (SHAPES | LARGER)[shape].inputs("cpu", torch.float32),
            TOLERANCE,
        )


@pytest.mark.parametrize(("kernel", "target"), on_chips(["_compress_kernel", "_compress_weight_kernel"]))
def test_compiles_to_tensor_core_instructions(kernel: str, target: str) -> None:
    function = getattr(lce, kernel)
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "HAS_ROWS": True}
    if kernel == "_compress_weight_kernel":
        blocks = {"BLOCK_M": 128, "BLOCK_K": 128, "BLOCK_N": 64}
    constants = blocks | {"PRECISION": "ieee"}
    constants |= {name: 1 for name in function.arg_names if name.endswith("stride_n") or name == "w_stride_k"}
    signature = {name: "i32" for name in function.arg_names if name not in constants}
    signature |= {name: "*fp16" for name in ("x", "weight", "grad", "out") if name in signature}
    signature |= {name: "*fp32" for name in ("rows", "parts") if name in signature}
    if "owners" in signature:
        signature["owners"] = "*i64"
    divisible = [name for name in signature if "stride" in name or name == "width"]
    compiled = compile_ahead(
        function, signature, constants, target=target, num_warps=8, num_stages=3, divisible_by_16=divisible
    )
    assert compiled.contains(PRODUCTS[target])
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= SHARED_LIMITS[target]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("tails of blocks", torch.float32),
        ("tails of blocks", torch.float16),
        ("tails of blocks", torch.bfloat16),
        ("two levels", torch.float32),
        ("two levels", torch.float16),
        ("one huge", torch.float16),
        ("one candidate", torch.float16),
        ("no candidates", torch.float16),
        ("no requests", torch.float16),
    ],
)
def test_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    tolerance = Tolerance(
        "levels round the sums that their gradients start from; products of three TF32 parts, as of float32",
        roundings=6,
        reduction=150_000,
    )
    with poisoned_empty():
        check_gradients(
            lambda **tensors: call("triton", **tensors),
            lambda **tensors: call("reference", **tensors),
            (SHAPES | LARGER)[shape].inputs("cuda", dtype),
            tolerance,
        )
