"""The Hopper kernels of `gdpa`: compiled for it here, run against the reference in float64 where there is one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.core.mask import NO_MASK
from kernels.core.rows import Rows
from kernels.gdpa import ACTIVATIONS, reference
from kernels.gdpa.hopper import backward as hopper_backward
from kernels.gdpa.hopper import forward as hopper_forward
from kernels.gdpa.hopper.activations import head_kinds
from kernels.testing import Compiled, assert_close_to_oracle, compile_ahead, poisoned_empty
from tests.kernels.core.barriers import assert_turns_have_barriers_of_their_own
from tests.kernels.core.descriptors import compile_forward, descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.gdpa.gdpa_cases import Case, check_problem, check_shared, outputs, problem
from tests.kernels.jagged.jagged_problems import offsets_of

SHARED_LIMIT = 227 * 1024
UNLIMITED = (-1, -1)
MIXED = ("gelu", "relu", "silu", "gelu")


@cache
def compiled_forward(
    *, names: tuple[str, ...] = ("gelu_tanh",), window: tuple[int, int] = UNLIMITED, run: int = 2, d: int = 128,
    dtype: str = "bf16", block_k: int = 128,
) -> Compiled:  # fmt: skip
    kinds, heads = head_kinds(names)
    constants = {"GROUP": 2, "KINDS": kinds, "HEAD_KINDS": heads, "RUN": run, "STAGES": 65536 // (block_k * 2 * d)}
    scales = {"score_scale": "fp32", "out_scale": "fp32"}
    return compile_forward(hopper_forward._gdpa_forward_kernel, dtype, d, block_k, window, constants, **scales)


@pytest.mark.parametrize(
    ("options", "spill_bytes"),
    [
        ({}, 0),
        ({"d": 64, "dtype": "fp16", "block_k": 64}, 0),
        ({"names": MIXED}, 64),
        ({"window": (64, 64), "run": 1}, 64),
    ],
    ids=str,
)
def test_forward_compiles_to_asynchronous_hopper_instructions(options: dict[str, Any], spill_bytes: int) -> None:
    compiled = compiled_forward(**options)
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc", "stmatrix"):
        assert compiled.contains(instruction), instruction
    assert compiled.spill_bytes <= spill_bytes
    assert compiled.shared_bytes <= SHARED_LIMIT


def test_consumers_of_the_forward_take_turns_where_that_gains() -> None:
    assert_turns_have_barriers_of_their_own(compiled_forward())
    assert not compiled_forward(names=("gelu",)).contains("bar.arrive")


def compiled_backward(
    *, names: tuple[str, ...] = ("gelu_tanh",), window: bool = False, d: int = 128, dtype: str = "bf16",
    pairs: bool = False, uneven: bool = False,
) -> Compiled:  # fmt: skip
    kinds, heads = head_kinds(names)
    constants = {f"{name}_STEP": d for name in "QKVG"} | {"HEADS": 2, "GROUP": 2, "LEFT": window, "RIGHT": window}
    signature = {f"{name}_desc": descriptor(dtype, 64, d, swizzle=d if name == "k" else 128) for name in "qkvg"}
    signature["sums_desc"] = descriptor("fp32", d, 32, swizzle=128)
    signature |= {
        "table_ptr": "*i32",
        "flags_ptr": "*i32",
        "tiles_stride": "i32",
        "scratch_ptr": "*fp32",
    }
    signature |= {f"d{name}_ptr": f"*{dtype}" for name in "qkv"}
    signature |= {"score_scale": "fp32", "out_scale": "fp32", "left": "i32", "right": "i32"}
    return compile_ahead(
        hopper_backward._gdpa_backward_kernel,
        signature,
        constants | {"KINDS": kinds, "HEAD_KINDS": heads, "PAIRS": pairs, "UNEVEN": uneven},
        target="sm_90",
        gluon=True,
        maxnreg=hopper_backward.MAX_REGISTERS,
    )


@pytest.mark.parametrize(
    ("options", "spill_bytes"),
    [
        ({}, 64),
        ({"uneven": True, "pairs": True}, 64),
        pytest.param({"pairs": True}, 64, marks=pytest.mark.nightly),
        pytest.param({"uneven": True}, 64, marks=pytest.mark.nightly),
        ({"d": 64, "dtype": "fp16"}, 128),
        ({"names": MIXED}, 2048),
        ({"window": True}, 512),
    ],
    ids=str,
)
def test_backward_compiles_to_asynchronous_hopper_instructions(options: dict[str, Any], spill_bytes: int) -> None:
    compiled = compiled_backward(**options)
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc", "stmatrix"):
        assert compiled.contains(instruction), instruction
    assert compiled.shared_bytes <= SHARED_LIMIT
    # Four elements to a reduction; those of an element come in one order, so runs do not differ. Of two key tiles to a
    # row the first stores and the second takes.
    pairs = options.get("pairs", False)
    assert compiled.contains("atom.global.gpu.relaxed.add.v4.f32") == (not pairs)
    assert compiled.contains("st.global.L2::cache_hint.v4.f32") == pairs
    # Little of it in the loop over steps, but where heads differ; how much depends on the compiler.
    assert compiled.spill_bytes <= spill_bytes


def test_other_head_dimensions_are_refused_and_nothing_gives_zeros() -> None:
    def attempt(queries: int, keys: int, d: int) -> torch.Tensor:
        q, k = (torch.randn(n, 2, d, dtype=torch.bfloat16) for n in (queries, keys))
        rows = Rows(offsets_of([0]), 8)
        return hopper_forward.forward(q, k, k, rows, rows, ("relu",) * 2, 1.0, 1.0, NO_MASK)

    def attempt_backward(queries: int, keys: int, d: int) -> tuple[torch.Tensor, ...]:
        q, k = (torch.randn(n, 2, d, dtype=torch.bfloat16) for n in (queries, keys))
        rows = Rows(offsets_of([0]), 8)
        return hopper_backward.backward(q, q, k, k, rows, rows, ("relu",) * 2, 1.0, 1.0, NO_MASK)

    for function in (attempt, attempt_backward):
        with pytest.raises(ValueError, match="head dimensions"):
            function(3, 3, 96)
    with poisoned_empty():
        for queries, keys in ((0, 3), (3, 0)):
            assert torch.equal(attempt(queries, keys, 64), torch.zeros(queries, 2, 64, dtype=torch.bfloat16))
            assert all((gradient == 0).all() for gradient in attempt_backward(queries, keys, 64))


@pytest.mark.parametrize(
    ("num_keys", "max_k", "block_k"),
    [(4000, 1000, 64), (25_600, 256, 128), (12_800, 256, 64), (25_600, 512, 64), (51_200, 1024, 128), (0, 0, 64)],
)
def test_short_rows_of_unequal_lengths_have_narrow_blocks(num_keys: int, max_k: int, block_k: int) -> None:
    assert hopper_forward.block_of_keys(num_keys, 100, max_k) == block_k


@pytest.mark.parametrize(
    ("num_queries", "max_q", "uneven"),
    [(12_800, 256, True), (25_600, 256, False), (25_600, 512, True), (3_000, 2048, True), (51_200, 1024, False)],
)
def test_short_rows_of_unequal_lengths_have_a_backward_of_their_own(num_queries: int, max_q: int, uneven: bool) -> None:
    assert hopper_backward.short_and_uneven(num_queries, 100, max_q) == uneven


def lengths_of(rows: int, high: int, seed: int) -> list[int]:
    return torch.randint(0, high + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


ODD = [1, 0, 128, 129, 64, 65, 300, 7], [5, 9, 0, 128, 129, 256, 257, 600]
RANDOM = lengths_of(60, 400, 1), lengths_of(60, 500, 2)
HUGE = [0] * 5 + [1500] + [0] * 3, [0] * 5 + [1700] + [3] * 3
# Enough tiles that runs of them share keys and values, with unequal tails; and keys that may not fit.
RUNS = lengths_of(1100, 600, 3), lengths_of(1100, 256, 4)
MANY = lengths_of(1100, 600, 3), lengths_of(1100, 300, 4)
# Several tiles to a program, most of one step, and tiles without a step between them and behind them.
SHORT = lengths_of(200, 70, 5), lengths_of(200, 300, 6)
EMPTY = [0, 0, 0, 130, 0] * 40, [90, 0, 300, 260, 0] * 40
# No more than two key tiles to a row.
PAIRS = lengths_of(200, 256, 7), lengths_of(200, 256, 8)
CASES: dict[str, Case] = {
    **{name: (RANDOM, {"names": (name,) * 4}) for name in ACTIVATIONS},
    "odd": (ODD, {}),
    "one row": (([3], [2]), {}),
    # One row: its key tiles wait for each other's sums of dq.
    **{f"{keys} keys": (([keys], [keys]), {}) for keys in (1, 128, 129, 257, 1024, 2048)},
    "one huge among empties": (HUGE, {}),
    "short rows": (SHORT, {}),
    "empty rows": (EMPTY, {}),
    "pairs": (PAIRS, {}),
    "pairs, grouped, 64 features": (PAIRS, {"heads": (6, 2), "width": 64}),
    "pairs, window 70 20": (PAIRS, {"window": (70, 20)}),
    "runs": (RUNS, {}),
    "many tiles": (MANY, {}),
    "mixed": (RANDOM, {"names": MIXED}),
    "grouped": (RANDOM, {"heads": (6, 2)}),
    "float16": (RANDOM, {"dtype": torch.float16}),
    "64 features": (RANDOM, {"width": 64}),
    "64 features in float16, mixed": (RANDOM, {"width": 64, "dtype": torch.float16, "names": MIXED}),
    "negative scales": (RANDOM, {"scales": (-0.03, -2.0), "names": MIXED}),
    "negative scales, gelu_tanh": (RANDOM, {"scales": (-0.1, -2.0)}),
    "negative scales, relu": (RANDOM, {"scales": (-0.1, -2.0), "names": ("relu",) * 4}),
    **{f"window {left} {right}": (RANDOM, {"window": (left, right)}) for left, right in ((-1, 0), (50, -1), (0, 0))},
    "window 100 30": (RANDOM, {"window": (100, 30), "names": MIXED}),
}


@on_hopper
@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_forward_matches_float64(name: str, block_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_forward, "block_of_keys", lambda *arguments: block_k)
    inputs, rest = problem(CASES[name])
    with poisoned_empty():
        runs = [hopper_forward.forward(*inputs, *rest) for _ in range(3)]
    assert_close_to_oracle(runs[0], reference.gdpa(*(x.double() for x in inputs), *rest), outputs(rest[1].max_length))
    assert all(torch.equal(runs[0], other) for other in runs[1:]), "runs differ"


@on_hopper
def test_forward_reads_views_of_a_fused_projection() -> None:
    fused = torch.randn(405, 3, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    q, k, v = fused.unbind(1)
    offsets = offsets_of([100, 300, 5]).cuda()
    rest = [Rows(offsets, 300), Rows(offsets, 300), ("gelu_tanh",) * 4, 128**-0.5, 1.0, NO_MASK]
    out = hopper_forward.forward(q, k, v, *rest)
    assert torch.equal(out, hopper_forward.forward(*(x.contiguous() for x in (q, k, v)), *rest))


@on_hopper
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("runs", "many tiles")])
def test_gradients_match_float64(name: str, uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_backward, "short_and_uneven", lambda *arguments: uneven)
    check_problem(CASES[name])


@on_hopper
@pytest.mark.parametrize("name", ["grouped", "short rows", "pairs", "window 50 -1"])
def test_gradients_have_equal_bits_in_every_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), rest = problem(CASES[name])
    grad = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(q.dtype)
    results = []
    for uneven in (False, True):  # the order of sums is the same
        monkeypatch.setattr(hopper_backward, "short_and_uneven", lambda *arguments, uneven=uneven: uneven)
        results += [hopper_backward.backward(grad, q, k, v, *rest) for _ in range(20)]
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@on_hopper
def test_gradients_of_a_sum_have_no_strides() -> None:
    (q, k, v), rest = problem("odd")
    grad = torch.ones(1, 1, 1, device="cuda", dtype=q.dtype).expand(q.shape)
    for ours, expected in zip(
        hopper_backward.backward(grad, q, k, v, *rest),
        hopper_backward.backward(grad.contiguous(), q, k, v, *rest),
        strict=True,
    ):
        assert torch.equal(ours, expected)


@on_hopper
def test_shared_queries_dense_keys_and_an_index() -> None:
    check_shared("hopper", 170, 128)


@on_hopper
def test_gradients_of_views_of_a_fused_projection() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(405, 3, 4, 128, device="cuda", generator=generator).bfloat16()
    grad = torch.randn(4, 405, 128, device="cuda", generator=generator).bfloat16().transpose(0, 1)
    offsets = offsets_of([100, 300, 5]).cuda()
    rest = [Rows(offsets, 300), Rows(offsets, 300), ("gelu_tanh",) * 4, 128**-0.5, 1.0, NO_MASK]
    views = (grad, *fused.unbind(1))
    for ours, expected in zip(
        hopper_backward.backward(*views, *rest),
        hopper_backward.backward(*(x.contiguous() for x in views), *rest),
        strict=True,
    ):
        assert torch.equal(ours, expected)
