"""The Triton backend of `jagged_attention`: interpreted in float32, compiled for absent chips, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention import jagged_attention
from kernels.attention.bias import Bias, time_bucket_edges
from kernels.core import dispatch
from kernels.testing import check_gradients, compile_ahead, poisoned_empty
from tests.kernels.attention.attention_cases import (
    STRUCTURES,
    gradients,
    inputs_of,
    outputs,
    table_gradients,
    with_lse,
    with_targets,
)
from tests.kernels.core.devices import FROM_REGISTERS, PRODUCTS, SHARED_LIMITS, on_chips
from tests.kernels.core.on_gpu import (
    assert_more_than_2_to_the_31_elements,
    assert_same_bits,
    assert_views_are_as_copies,
    memory_of,
    without_waiting,
)
from tests.kernels.jagged.jagged_problems import offsets_of

pytest.importorskip("triton")

from kernels.attention.triton.launch import bias_tensors

ROOT = Path(__file__).parents[3]

LENGTHS = [0, 100, 1, 64, 0, 129], [70, 130, 0, 64, 3, 17]
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (30, 7)},
    "left": {"window": (9, None), "causal": True},
    "right": {"window": (None, 5)},
    "blocks": {"block_size": 64},
    "odd blocks": {"block_size": 50, "causal": True, "window": 40},
    "negative scale": {"scale": -0.3},
    "positions": {"reach": 20},
    "all positions": {"reach": 300},
    "times": {"buckets": 50},
    "both": {"reach": 33, "buckets": 7, "window": (90, 60), "block_size": 100},
}
CASES |= {
    "lse": {"lse": True, "window": (30, 7)},
    "sinks": {"sinks": True, "causal": True},
    "sinks, lse": {"sinks": True, "lse": True, "reach": 20, "buckets": 7, "align": "end", "window": (40, 3)},
}
CASES |= {f"structure: {name}": case for name, case in STRUCTURES.items()}
CASES["structure: biases"] = STRUCTURES["all, window"] | {"reach": 20, "buckets": 7}


def check(name: str, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Output and gradients of a case of CASES against the oracle, with poisoned memory."""
    call = dict(CASES[name])
    tables = {key: call.pop(key) for key in ("reach", "buckets") if key in call}
    sinks, beside = call.pop("sinks", False), with_lse if call.pop("lse", False) else partial
    offsets = {
        "q_offsets": offsets_of(LENGTHS[0]).to(device),
        "k_offsets": offsets_of(LENGTHS[1], torch.int32).to(device),
    }
    call = with_targets(call, offsets["k_offsets"])
    # An entry of a table may be read by every pair of a query and a key.
    pairs = max(num_q * num_k for num_q, num_k in zip(*LENGTHS, strict=True))
    with poisoned_empty():
        check_gradients(
            beside(partial(jagged_attention, max_q=129, max_k=130, **offsets, **call, backend="triton")),
            beside(partial(jagged_attention, max_q=129, max_k=130, **offsets, **call, backend="reference")),
            inputs_of(**offsets, heads=heads, widths=widths, dtype=dtype, sinks=sinks, **tables),
            outputs(130),
            table_gradients(pairs) if tables else gradients(300),
        )


INTERPRETED = """
import torch
from kernels.core import dispatch
from kernels.attention.triton import launch
from kernels.attention.triton.operators import attention
from kernels.core.mask import NO_MASK
from kernels.core.rows import Rows
from kernels.testing import serving
import tests.kernels.core.patched_language
from tests.kernels.attention import test_jagged_attention_triton as cases
from tests.kernels.gdpa.test_gdpa_triton import is_interpreted

dispatch._registry["jagged_attention"] = serving("jagged_attention", "triton")
tiles = launch._TILES
cases.LENGTHS = [0, 35, 1], [3, 40, 0]
for name in filter(is_interpreted, cases.CASES):
    # Small tiles, so that a row of structure has whole ones, tails and several of each.
    launch._TILES = dict.fromkeys(tiles, ((16, 16, 4, 1),) * 2) if "structure" in name else tiles
    cases.check(name, (1, 1), (16, 16), torch.float32, "cpu")
cases.check("both", (2, 1), (24, 40), torch.float32, "cpu")
empty = torch.tensor([0])
assert attention(*[torch.zeros(0, 1, 16)] * 3, *[Rows(empty, 0)] * 2, 1.0, NO_MASK).shape == (0, 1, 16)
print("checked", len(cases.CASES))
"""


def test_layers_of_the_same_times_share_the_edges_of_their_buckets() -> None:
    q, times, table = torch.zeros(4, 1, 16), torch.arange(4), torch.zeros(1, 7)
    bias = Bias(time=table, q_times=times, k_times=times)
    edges = bias_tensors(bias, q)[2]
    assert torch.equal(edges, time_bucket_edges(7, bias.bucket_width, q.device))
    assert bias_tensors(bias._replace(time=table + 1), q)[2] is edges
    wide = bias_tensors(bias._replace(time=torch.zeros(1, 9), bucket_width=0.5), q)[2]
    assert torch.equal(wide, time_bucket_edges(9, 0.5, q.device))


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


def test_every_tile_has_a_row_also_where_values_go_on_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.attention.triton import tile as triton_attention_tile
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_attention_tile)
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), -1, **options))
    rows = triton_attention_tile.tile_rows_of(offsets_of([70, 0, 5]), 300, 64)
    assert rows.tolist() == [0, 0, 1, 2, 2, 2, 2]


POINTERS = {"lse": "*fp32", "delta": "*fp32", "edges": "*i32", "tile_rows": "*i32"}
POINTERS |= dict.fromkeys(("position_table", "time_table", "position_partial", "time_partial"), "*fp32")
POINTERS |= dict.fromkeys(("q_offsets", "k_offsets", "q_times", "k_times"), "*i64")
POINTERS |= dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), "*bf16")
POINTERS |= {"num_targets": "*i32"}
POINTERS |= {"scale": "fp32", "buckets_per_octave": "fp32"}


@pytest.mark.parametrize(
    ("kernel", "structured", "target"),
    [
        *on_chips((kernel, False) for kernel in ("forward", "query", "key", "table")),
        ("key", True, "sm_90"),
        *(pytest.param(each, True, "sm_90", marks=pytest.mark.nightly) for each in ("forward", "query", "table")),
    ],
)
def test_compiles_for_a_chip_that_is_absent(kernel: str, structured: bool, target: str) -> None:
    from kernels.attention.triton import dkv, dq, forward
    from kernels.attention.triton import tables as triton_attention_tables
    from kernels.attention.triton.launch import tile_of

    biased, itemsize = kernel == "table", 4 if target == "sm_86" else 2
    tile = tile_of(kernel, itemsize, 128, biased, SHARED_LIMITS[target], target in FROM_REGISTERS)
    pointers = POINTERS if itemsize == 2 else {name: kind.replace("bf16", "fp32") for name, kind in POINTERS.items()}
    function = {
        "forward": forward.attention_forward_kernel,
        "query": dq.attention_query_kernel,
        "key": dkv.attention_key_kernel,
        "table": triton_attention_tables.attention_table_kernel,
    }[kernel]
    constants = {"NUM_HEADS": 4, "GROUP": 1, "SCALE_LATE": True, "BLOCK_T": 64, "SIDE": tile.m}
    constants |= {"PRECISION": "tf32" if itemsize == 2 else "tf32x3"}
    constants |= dict.fromkeys(("HEAD_DIM", "VALUE_DIM", "BLOCK_D", "BLOCK_V"), 128)
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "HAS_POSITION": biased, "HAS_TIME": biased}
    constants |= {"STRUCTURED": structured, "HAS_TARGETS": structured}
    signature = {name: pointers.get(name, "i32") for name in function.arg_names if not name.isupper()}
    compiled = compile_ahead(
        function,
        signature,
        {name: value for name, value in constants.items() if name in function.arg_names},
        target=target,
        num_warps=tile.warps,
        num_stages=tile.stages,
        divisible_by_16=[name for name in signature if name.startswith("stride")],
    )
    assert compiled.shared_bytes <= SHARED_LIMITS[target]
    # A few addresses and masks around the loops; accumulators in memory would be kilobytes.
    assert compiled.spill_bytes <= 256
    if not biased:
        # On sm_100 products of fewer than 64 rows are those of earlier chips.
        assert compiled.contains(PRODUCTS[target]) or (target == "sm_100" and compiled.contains("mma.sync"))


@pytest.mark.parametrize("kernel", ["forward", "query", "key"])
def test_chips_of_little_shared_memory_load_ahead(kernel: str) -> None:
    from kernels.attention.triton.launch import tile_of

    for width in (64, 128):
        assert tile_of(kernel, 2, width, False, SHARED_LIMITS["sm_86"], True).stages > 1


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_features(name: str, dtype: torch.dtype) -> None:
    check(name, (4, 2), (64, 64), dtype, "cuda")


@gpu
@pytest.mark.parametrize("widths", [(32, 32), (40, 72), (96, 96), (128, 128), (192, 64), (256, 256)])
@pytest.mark.parametrize("name", ["dense", "both"])
def test_widths(name: str, widths: tuple[int, int]) -> None:
    check(name, (2, 1), widths, torch.bfloat16, "cuda")
    check(name, (2, 1), widths, torch.float32, "cuda")


@gpu
def test_one_position_changes_nothing() -> None:
    """A bias that all pairs share leaves the probabilities as they are, and its gradient is zero but for roundings."""
    offsets = offsets_of([100, 0, 65]).cuda()
    inputs = inputs_of(offsets, offsets, (2, 2), dtype=torch.float32, reach=0, buckets=1)
    tables = [inputs[name].requires_grad_() for name in ("position_bias", "time_bias")]
    attend = partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=100, max_k=100)
    out = attend(**inputs, backend="triton")
    torch.testing.assert_close(out, attend(**{name: inputs[name] for name in "qkv"}, backend="triton"))
    for grad in torch.autograd.grad(out.square().sum(), tables):
        assert float(grad.abs().max()) < 1e-4


@gpu
@pytest.mark.parametrize("name", ["dense", "both"])
def test_same_bits_every_time(name: str) -> None:
    call = dict(CASES[name])
    tables = {key: call.pop(key) for key in ("reach", "buckets") if key in call}
    offsets = offsets_of([0, 700, 1, 300, 0, 1000]).cuda()
    inputs = inputs_of(offsets, offsets, (4, 2), (64, 64), torch.bfloat16, **tables)
    leaves = [tensor.requires_grad_() for tensor in inputs.values() if tensor.is_floating_point()]

    def run() -> list[torch.Tensor]:
        out = jagged_attention(
            **inputs, q_offsets=offsets, k_offsets=offsets, max_q=1000, max_k=1000, **call, backend="triton"
        )
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    assert_same_bits(run)


@gpu
def test_views_with_strides_of_their_own() -> None:
    assert_views_are_as_copies(partial(jagged_attention, backend="triton"))


@gpu
def test_nothing_waits_for_the_device_and_memory_is_linear() -> None:
    offsets = offsets_of([0] * 999 + [2000]).cuda()
    inputs = inputs_of(offsets, offsets, (2, 2), (64, 64), torch.bfloat16, reach=10)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    attend = partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=4000, max_k=4000, backend="triton")
    # A score for every pair of padded positions would be 128 GB, one for every pair of values 16 MB.
    assert memory_of(lambda: torch.autograd.grad(attend(**inputs).sum(), leaves)) < 8e6


@gpu
def test_more_than_2_to_the_31_elements() -> None:
    assert_more_than_2_to_the_31_elements(
        partial(jagged_attention, backend="triton"), partial(jagged_attention, backend="reference")
    )


@gpu
@pytest.mark.parametrize("name", ["dense", "both"])
def test_opcheck(name: str) -> None:
    from kernels.attention.triton import operators  # noqa: F401  defines the operator

    offsets = offsets_of([5, 0, 70]).cuda()
    tables = {key: value for key, value in CASES[name].items() if key in ("reach", "buckets")}
    inputs = inputs_of(offsets, offsets, (2, 1), (32, 32), torch.bfloat16, **tables)
    leaves = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
    bias = [leaves.get(key) for key in ("position_bias", "time_bias")]
    bias = [None if table is None else table.detach().float().requires_grad_() for table in bias]
    times = [leaves.get(key) for key in ("q_times", "k_times")]
    arguments = (*(leaves[key] for key in "qkv"), offsets, offsets, *bias, *times, None, 0.301, 0, 0, -1, False)
    torch.library.opcheck(
        torch.ops.gemsmith.jagged_attention_triton.default, (*arguments, 70, 70, 0.3, True, -1, -1, None)
    )


flash_attention_4 = pytest.mark.skipif(
    "flash_attention_4" not in dispatch.operators()["jagged_attention"], reason="needs flash-attn-4"
)
# Libraries, and features of a head that they compute in different ways.
LIBRARIES = [
    ("torch", 64),
    *(pytest.param("flash_attention_4", d, marks=flash_attention_4) for d in (32, 96, 128, 256)),
]


@gpu
@pytest.mark.parametrize(("backend", "width"), LIBRARIES)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (2, 3)), (True, 3)])
@pytest.mark.parametrize("lengths", [[0, 300, 1, 128, 0], [5], [64, 64], [0, 0]])
def test_varlen_matches_the_reference(lengths: list[int], causal: bool, window: Any, backend: str, width: int) -> None:
    offsets = offsets_of(lengths).cuda()
    attend = partial(
        jagged_attention,
        q_offsets=offsets,
        k_offsets=offsets,
        max_q=320,
        max_k=320,
        causal=causal,
        window=window,
    )
    with poisoned_empty():
        check_gradients(
            partial(attend, backend=backend),
            partial(attend, backend="reference"),
            inputs_of(offsets, offsets, (4, 2), (width, width), torch.bfloat16),
            outputs(300),
            gradients(300),
        )


@gpu
@pytest.mark.parametrize(("backend", "width"), LIBRARIES)
def test_varlen_with_rows_that_lack_queries_or_keys(backend: str, width: int) -> None:
    offsets = {"q_offsets": offsets_of([3, 0, 130, 2]).cuda(), "k_offsets": offsets_of([0, 5, 40, 0]).cuda()}
    with poisoned_empty():
        check_gradients(
            partial(jagged_attention, **offsets, max_q=256, max_k=64, backend=backend),
            partial(jagged_attention, **offsets, max_q=256, max_k=64, backend="reference"),
            inputs_of(**offsets, heads=(2, 2), widths=(width, width), dtype=torch.bfloat16),
            outputs(130),
            gradients(130),
        )


@gpu
@flash_attention_4
@pytest.mark.parametrize("width", [32, 128, 256])
def test_flash_attention_4_in_a_layer(width: int) -> None:
    """Parts of a projection, the gradient of a sum, a graph of torch.compile, a CUDA graph; nothing waits."""
    offsets = offsets_of([130, 0, 700] * 100 + [1]).cuda()  # they list the tiles of more than 256 rows
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(83001, 3, 2, width, device="cuda", generator=generator).bfloat16().requires_grad_()

    def step(backend: str = "flash_attention_4", attend: Any = jagged_attention) -> list[torch.Tensor]:
        q, k, v = packed.unbind(1)
        out = attend(q, k, v, offsets, offsets, max_q=700, max_k=700, causal=True, backend=backend)
        return [out.detach(), *torch.autograd.grad(out.sum(), packed)]

    def close(actual: list[torch.Tensor]) -> None:
        for one, other in zip(actual, expected, strict=True):
            assert float((one - other).float().norm() / other.float().norm()) < 1e-2

    expected = step("triton")
    close(step())
    torch.use_deterministic_algorithms(True)
    try:
        bits = [step() for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    close(bits[0])
    assert all(torch.equal(x, y) for one in bits[1:] for x, y in zip(bits[0], one, strict=True))
    without_waiting(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    close(captured)
    if width == 128:
        close(step(attend=torch.compile(jagged_attention, fullgraph=True)))
