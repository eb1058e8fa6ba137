"""The Triton backend of `gdpa`: interpreted in float32, compiled for absent chips, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import Bias, Structure
from kernels.core.mask import Mask
from kernels.gdpa import ACTIVATIONS, gdpa
from kernels.testing import Compiled, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.attention.attention_cases import STRUCTURES, with_targets
from tests.kernels.core.devices import FROM_REGISTERS, PRODUCTS, SHARED_LIMITS, on_chips
from tests.kernels.core.on_gpu import (
    assert_more_than_2_to_the_31_elements,
    assert_same_bits,
    assert_views_are_as_copies,
    memory_of,
    with_gradients,
)
from tests.kernels.gdpa.gdpa_cases import check_shared, gradients, inputs_of, outputs, table_gradients
from tests.kernels.jagged.jagged_problems import offsets_of

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]

LENGTHS = [0, 100, 1, 64, 0, 129], [70, 130, 0, 64, 3, 17]
MIXED = ("gelu", "relu", "silu", "gelu")
CASES: dict[str, dict[str, Any]] = {name: {"activation": name} for name in ACTIVATIONS} | {
    "mixed": {"activation": MIXED},
    "window": {"window": (30, 7)},
    "mixed window": {"window": (0, 40), "activation": MIXED},
    "left": {"window": (9, -1)},
    "right": {"window": (-1, 5)},
    "negative": {"score_scale": -0.3, "out_scale": -2.0},
    # Reach and buckets: entries that many pairs share, and some that none has.
    "position": {"biases": (40, 0), "activation": "silu", "window": (-1, 0)},
    "one position": {"biases": (0, 0), "activation": "silu"},
    "time": {"biases": (None, 9), "activation": MIXED},
    "position and time": {"biases": (200, 20), "activation": MIXED, "window": (50, 0)},
}
SILU = {"activation": "silu"}
CASES |= {f"structure: {name}": case | SILU for name, case in STRUCTURES.items()}
CASES["structure: biases"] = STRUCTURES["all, window"] | SILU | {"biases": (20, 9)}


def biases_of(reach: int | None, buckets: int, heads: int, totals: tuple[int, int], device: str) -> dict[str, Tensor]:
    """Tables, float32 as the operator takes them, and times of queries and keys."""
    chance = torch.Generator().manual_seed(2)
    given = {}
    if reach is not None:
        given["position_bias"] = torch.randn(heads, 2 * reach + 1, generator=chance)
    if buckets:
        given["time_bias"] = torch.randn(heads, buckets, generator=chance)
        for name, total in zip(("q_times", "k_times"), totals, strict=True):
            given[name] = torch.randint(0, 5000, (total,), generator=chance)
    return {name: x.to(device) for name, x in given.items()}


def check(name: str, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Output and gradients of a case of CASES against the reference in float64, with poisoned memory."""
    call = {"score_scale": 1.3 * widths[0] ** -0.5, "out_scale": 0.1} | CASES[name]
    biases = call.pop("biases", (None, 0))
    if not isinstance(call.get("activation", ""), str):
        call["activation"] = call["activation"][: heads[0]]
    call = with_targets(call, offsets_of(LENGTHS[1]).to(device)) | {
        "q_offsets": offsets_of(LENGTHS[0]).to(device),
        "k_offsets": offsets_of(LENGTHS[1], torch.int32).to(device),
    }
    inputs = inputs_of(call["q_offsets"], call["k_offsets"], heads, widths, dtype)
    totals = inputs["q"].shape[0], inputs["k"].shape[0]
    tables = biases_of(*biases, heads[0], totals, device)
    call |= {key: tables.pop(key) for key in ("q_times", "k_times") if key in tables}
    attend = partial(gdpa, max_q=129, max_k=130, **call)
    with poisoned_empty():
        check_gradients(
            partial(attend, backend="triton", **tables),
            partial(attend, backend="reference", **tables),
            inputs,
            outputs(130),
            gradients(300),
        )
        if tables:
            check_gradients(
                partial(attend, backend="triton", **inputs),
                partial(attend, backend="reference", **{name: x.double() for name, x in inputs.items()}),
                tables,
                outputs(130),
                table_gradients(dtype, 130 * 300),
            )


def is_interpreted(name: str) -> bool:
    """Of structures those with most of everything."""
    return "structure" not in name or "all" in name or "biases" in name


INTERPRETED = """
import torch
from kernels.core import dispatch
from kernels.core.mask import NO_MASK
from kernels.core.rows import Rows
from kernels.gdpa.triton import launch as triton_launch
from kernels.gdpa.triton.operators import gdpa
from kernels.testing import serving
import tests.kernels.core.patched_language
from tests.kernels.gdpa import test_gdpa_triton as cases

# Small tiles, so that short rows have whole ones, tails and several of each.
triton_launch._TILES = dict.fromkeys(triton_launch._TILES, (16, 32, 4, 1))
dispatch._registry["gdpa"] = serving("gdpa", "triton")
cases.LENGTHS = [0, 35, 1, 32], [3, 70, 0, 64]
for name in filter(cases.is_interpreted, cases.CASES):
    cases.check(name, (4, 2) if "mixed" in name or "time" in name else (1, 1), (16, 16), torch.float32, "cpu")
cases.check("window", (2, 1), (24, 40), torch.float32, "cpu")
empty = Rows(torch.tensor([0]), 0)
none = gdpa(*[torch.zeros(0, 1, 16)] * 3, empty, empty, ("relu",), 1.0, 1.0, NO_MASK)
assert none.shape == (0, 1, 16)
every, x = torch.tensor([0, 3, 5, 9, 12]), torch.randn(12, 1, 16)  # every second offset: pairs of rows as one
rows = [Rows(offsets, 7) for offsets in (every[::2], every[::2].clone())]
merged = [gdpa(x, x, x, own, own, ("relu",), 1.0, 1.0, NO_MASK) for own in rows]
assert torch.equal(*merged)
print("checked", len(cases.CASES))
"""


def test_interpreted_kernels_match_the_reference() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == f"checked {len(CASES)}", done.stderr[-3000:]


def compiled(
    kernel: str,
    names: tuple[str, ...],
    width: int,
    target: str,
    window: tuple[int, int],
    itemsize: int = 2,
    biased: bool = False,
    structured: bool = False,
) -> Compiled:
    from kernels.attention.triton import launch as attention_launch
    from kernels.attention.triton.structure import constants
    from kernels.gdpa.triton import backward, biases, forward, launch

    function = {
        "forward": forward.gdpa_forward_kernel,
        "query": backward.gdpa_query_kernel,
        "key": backward.gdpa_key_kernel,
        "table": biases.gdpa_table_kernel,
    }[kernel]
    kind, dtype = ("bf16", torch.bfloat16) if itemsize == 2 else ("fp32", torch.float32)
    example = torch.empty(0, len(names), width, dtype=dtype)
    chip = SHARED_LIMITS[target], target in FROM_REGISTERS
    fitting = attention_launch.tile_of(kernel, itemsize, width, True, *chip) if biased else None
    tile = launch.tiling(fitting or launch.tile_of(kernel, itemsize, width, *chip))
    if kernel == "table":
        tile |= {"SIDE": tile.pop("BLOCK_M"), "BLOCK_T": 32}
        tile.pop("BLOCK_N")
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    bias = Bias(example, example) if biased else None
    structure = Structure(example, prefix=1) if structured else None
    pointers = {
        "tile_rows": "*i32",
        "q_offsets": "*i64",
        "k_offsets": "*i32",
        "score_scale": "fp32",
        "out_scale": "fp32",
        "edges": "*i32",
        "q_times": "*i64",
        "k_times": "*i64",
        "num_targets": "*i32",
        "buckets_per_octave": "fp32",
    }
    pointers |= dict.fromkeys(("position_table", "time_table", "position_partial", "time_partial"), "*fp32")
    pointers |= dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), f"*{kind}")
    signature = {name: pointers.get(name, "i32") for name in function.arg_names if not name.isupper()}
    return compile_ahead(
        function,
        signature,
        launch.constants(example, example, example, names, Mask(False, *window))
        | launch.bias_constants(bias)
        | constants(structure)
        | tile
        | {"SHORT": 64},
        target=target,
        divisible_by_16=[name for name in signature if name.startswith("stride")],
        **options,
    )


@pytest.mark.parametrize(
    ("kernel", "names", "target"),
    on_chips((kernel, names) for kernel in ("forward", "query", "key") for names in (("gelu",) * 4, MIXED)),
)
def test_compiles_for_a_chip_that_is_absent(kernel: str, names: tuple[str, ...], target: str) -> None:
    result = compiled(kernel, names, 128, target, (-1, -1))
    assert result.shared_bytes <= SHARED_LIMITS[target]
    # A few addresses and masks around the loops; accumulators in memory would be kilobytes.
    assert result.spill_bytes <= 256
    assert result.contains(PRODUCTS[target])
    assert result.contains("tanh.approx.f32")


@pytest.mark.parametrize(
    ("width", "target", "itemsize"),
    [
        (256, "sm_90", 2),
        (64, "sm_86", 4),
        pytest.param(64, "sm_80", 2, marks=pytest.mark.nightly),
        pytest.param(32, "sm_90", 2, marks=pytest.mark.nightly),
        pytest.param(64, "sm_90", 2, marks=pytest.mark.nightly),
        pytest.param(128, "sm_89", 2, marks=pytest.mark.nightly),
    ],
)
def test_other_widths_compile(width: int, target: str, itemsize: int) -> None:
    for kernel in ("forward", "query", "key"):
        result = compiled(kernel, ("gelu",) * 4, width, target, (3, 4), itemsize)
        assert result.shared_bytes <= SHARED_LIMITS[target]
        assert result.spill_bytes <= 256 or width == 256


@pytest.mark.parametrize(
    ("kernel", "structured"),
    [
        *((kernel, False) for kernel in ("forward", "query", "key", "table")),
        *((kernel, True) for kernel in ("forward", "key")),
        *(pytest.param(kernel, True, marks=pytest.mark.nightly) for kernel in ("query", "table")),
    ],
)
def test_compiles_with_features(kernel: str, structured: bool) -> None:
    biased = not structured or kernel == "table"
    for width, itemsize in ((64, 2),) if structured else ((64, 2), (256, 2), (64, 4)):
        result = compiled(kernel, ("silu",) * 4, width, "sm_90", (-1, 0), itemsize, biased, structured)
        assert result.shared_bytes <= SHARED_LIMITS["sm_90"]
        assert result.spill_bytes <= 256 or width == 256


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_features(name: str, dtype: torch.dtype) -> None:
    check(name, (4, 2), (64, 64), dtype, "cuda")


@gpu
@pytest.mark.parametrize("widths", [(32, 32), (40, 72), (96, 96), (128, 128), (192, 64), (256, 256)])
@pytest.mark.parametrize("name", ["gelu", "window"])
def test_widths(name: str, widths: tuple[int, int]) -> None:
    check(name, (2, 1), widths, torch.bfloat16, "cuda")
    check(name, (2, 1), widths, torch.float32, "cuda")


@gpu
def test_same_bits_every_time() -> None:
    offsets = offsets_of([0, 700, 1, 300, 0, 1000]).cuda()
    leaves = [x.requires_grad_() for x in inputs_of(offsets, offsets, (4, 2), (64, 64), torch.bfloat16).values()]
    fixed = {"q_offsets": offsets, "k_offsets": offsets, "max_q": 1000, "max_k": 1000, "score_scale": 0.1}
    attend = partial(gdpa, **fixed, activation=MIXED, backend="triton")
    assert_same_bits(partial(with_gradients, attend, leaves))


@gpu
def test_views_with_strides_of_their_own() -> None:
    assert_views_are_as_copies(partial(gdpa, score_scale=0.1, backend="triton"))


@gpu
def test_shared_queries_dense_keys_and_an_index() -> None:
    check_shared("triton", 70, 64)


@gpu
def test_nothing_waits_for_the_device_and_memory_is_linear() -> None:
    offsets = offsets_of([0] * 999 + [2000]).cuda()
    leaves = [x.requires_grad_() for x in inputs_of(offsets, offsets, (2, 2), (64, 64), torch.bfloat16).values()]
    index = torch.arange(1000, device="cuda")
    fixed = {"q_offsets": offsets, "k_offsets": offsets, "max_q": 4000, "max_k": 4000, "score_scale": 0.1}
    attend = partial(gdpa, **fixed, kv_index=index, activation=("gelu", "silu"), backend="triton")
    # A score for every pair of padded positions would be 64 GB, one for every pair of values 16 MB.
    assert memory_of(partial(with_gradients, attend, leaves)) < 8e6


@gpu
def test_more_than_2_to_the_31_elements() -> None:
    attend = partial(gdpa, score_scale=0.1)
    assert_more_than_2_to_the_31_elements(partial(attend, backend="triton"), partial(attend, backend="reference"))


@gpu
@pytest.mark.parametrize("window", [(-1, -1), (3, 4)])
def test_opcheck(window: tuple[int, int]) -> None:
    from kernels.gdpa.triton import operators  # noqa: F401  defines the operator

    offsets = offsets_of([5, 0, 70]).cuda()
    leaves = [x.requires_grad_() for x in inputs_of(offsets, offsets, (2, 1), (32, 32), torch.bfloat16).values()]
    operator = torch.ops.gemsmith.gdpa_triton.default
    table = torch.randn(2, 9, device="cuda", requires_grad=True)
    targets = torch.tensor([1, 0, 9], device="cuda", dtype=torch.int32)
    for features in ((None, None, None, None, None), (table, None, None, None, targets)):
        features = *features, 0.3, 2, 0, -1, True
        torch.library.opcheck(operator, (*leaves, offsets, offsets, *features, 70, 70, [0, 3], 0.3, 1.0, *window))
