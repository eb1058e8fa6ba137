"""GDPA of rows that fit into one tile: interpreted in float32, compiled for chips, and run beside other kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention.triton import short as short_rows
from kernels.attention.triton.short import BACKWARD_REGISTERS, LONGEST, OPTIONS
from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows
from kernels.gdpa import reference
from kernels.gdpa.hopper import backward as hopper_backward
from kernels.gdpa.hopper import forward as hopper_forward
from kernels.gdpa.triton import activations, launch
from kernels.gdpa.triton import backward as triton_backward
from kernels.gdpa.triton import forward as triton_forward
from kernels.gdpa.triton import short as triton_short
from kernels.testing import Compiled, assert_close_to_oracle, compile_ahead, poisoned_empty
from tests.kernels.core.devices import PRODUCTS, SHARED_LIMITS, on_hopper
from tests.kernels.core.interpreting import interpret
from tests.kernels.gdpa.gdpa_cases import Case, check_problem, gradients, inputs_of, outputs, problem
from tests.kernels.jagged.jagged_problems import offsets_of

UNLIMITED = (-1, -1)
MIXED = ("gelu", "relu", "silu", "gelu")
LIMIT = LONGEST


def heavy(rows: int, least: int, most: int, seed: int) -> list[int]:
    """Mostly short lengths, some without any, some long."""
    chance = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    lengths = (least / chance).long().clamp(max=most)
    return torch.where(chance > 0.9, 0, lengths).tolist()


EDGES = [0, 1, 16, 17, 32, 33, 64, 65, 0, 64, 128, 5], [3, 0, 16, 17, 2, 33, 64, 1, 0, 65, 64, 60]


@pytest.mark.parametrize(
    ("heads", "widths", "names", "window"),
    [
        ((2, 2), (32, 16), ("gelu", "relu"), UNLIMITED),
        ((4, 2), (24, 40), MIXED, (20, 3)),
        ((2, 1), (16, 16), ("gelu_tanh",) * 2, (-1, 0)),
    ],
    ids=str,
)
def test_short_rows_are_written_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    widths: tuple[int, int],
    names: tuple[str, ...],
    window: tuple[int, int],
) -> None:
    interpret(monkeypatch, triton_short, activations, short_rows)
    q_offsets, k_offsets = offsets_of(EDGES[0]), offsets_of(EDGES[1], torch.int32)
    q, k, v = inputs_of(q_offsets, k_offsets, heads, widths, torch.float32).values()
    grad = torch.randn(q.shape[0], heads[0], widths[1], generator=torch.Generator().manual_seed(1))
    rows = Rows(q_offsets, max(EDGES[0])), Rows(k_offsets, max(EDGES[1]))
    rest = (*rows, names, 0.3, 0.7, Mask(False, *window))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference.gdpa(*exact, *rest)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    short = [queries <= LIMIT and keys <= LIMIT for queries, keys in zip(*EDGES, strict=True)]
    queries, keys = (torch.tensor(short).repeat_interleave(torch.tensor(lengths)) for lengths in EDGES)
    with poisoned_empty():
        out = torch.empty(expected.shape)
        results = [torch.empty(x.shape) for x in (q, k, v)]
    triton_short.forward(out, q, k, v, *rest)
    triton_short.backward(grad, q, k, v, *results, *rest)
    for result, oracle, written in zip(
        (out, *results), (expected.detach(), *expected_gradients), (queries, queries, keys, keys), strict=True
    ):
        assert_close_to_oracle(result[written], oracle[written], gradients(LIMIT))
        assert result[~written].isnan().all()


def compiled(kernel: str, names: tuple[str, ...], group: int, window: tuple[int, int], d: int, target: str) -> Compiled:
    function = {"forward": triton_short.gdpa_short_forward_kernel, "backward": triton_short.gdpa_short_backward_kernel}[
        kernel
    ]
    q, k = (torch.empty(0, heads, d, dtype=torch.bfloat16) for heads in (4, 4 // group))
    types = {"q_offsets": "*i64", "k_offsets": "*i32", "score_scale": "fp32", "out_scale": "fp32"}
    types |= dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), "*bf16")
    signature = {name: types.get(name, "i32") for name in function.arg_names if not name.isupper()}
    constants = launch.constants(q, k, k, names, Mask(False, *window))
    return compile_ahead(
        function,
        signature,
        constants | {"TOGETHER": len(set(names)) == 1, "CHECKED": True, "BESIDE": target == "sm_90"},
        target=target,
        divisible_by_16=[name for name in signature if name.startswith("stride")],
        maxnreg=BACKWARD_REGISTERS if kernel == "backward" else None,
        **OPTIONS,
    )


@pytest.mark.parametrize(
    ("kernel", "names", "group", "window", "d", "target", "spill_bytes"),
    [
        ("forward", ("gelu_tanh",) * 4, 1, UNLIMITED, 128, "sm_90", 0),
        ("forward", MIXED, 2, (3, 4), 64, "sm_90", 0),
        ("backward", ("gelu_tanh",) * 4, 1, UNLIMITED, 128, "sm_90", 64),
        ("backward", MIXED, 2, (3, 4), 128, "sm_90", 2048),
        ("backward", ("gelu",) * 4, 1, UNLIMITED, 128, "sm_100", 256),
    ],
    ids=str,
)
def test_several_programs_fit_on_a_multiprocessor(
    kernel: str, names: tuple[str, ...], group: int, window: tuple[int, int], d: int, target: str, spill_bytes: int
) -> None:
    result = compiled(kernel, names, group, window, d, target)
    assert result.contains(PRODUCTS[target])
    assert result.contains("griddepcontrol.wait") == (target == "sm_90")
    programs = {"forward": 4, "backward": 3}[kernel]
    assert programs * (result.shared_bytes + 1024) <= SHARED_LIMITS[target]
    assert programs * 128 * result.registers <= 65536
    assert result.spill_bytes <= spill_bytes


@pytest.mark.parametrize(
    ("tokens", "longest", "expected"),
    [
        (31, 256, LIMIT),
        (62, 512, LIMIT),
        (64, 64, LIMIT),
        (1, 1, LIMIT),
        (100, 128, 0),
        (200, 4000, 0),
        (0, 100, LIMIT),
    ],
)
def test_rows_are_likely_short_where_the_mean_is_far_below_the_longest(
    tokens: int, longest: int, expected: int
) -> None:
    q = torch.empty(100 * tokens, 2, 128, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(101, device="meta")
    rows, few = Rows(offsets, longest), Rows(offsets, 1)
    assert triton_short.limit_of(q, q[:5], q[:5], rows, few) == expected
    assert triton_short.limit_of(q[:5], q, q, few, rows) == expected
    assert triton_short.limit_of(q.float(), q, q, rows, rows) == 0
    wide = torch.empty(100 * tokens, 2, 256, dtype=torch.bfloat16, device="meta")
    assert triton_short.limit_of(wide, wide, wide, rows, rows) == 0


SHORT = heavy(300, 8, LIMIT, 0), heavy(300, 8, LIMIT, 1)
BOTH = heavy(300, 12, 300, 2), heavy(300, 12, 300, 3)
LONG = [65, 300, 0, 100, 1] * 20, [65, 129, 70, 0, 200] * 20
CASES: dict[str, Case] = {
    "edges": (EDGES, {}),
    "all short": (SHORT, {}),
    "short and long": (BOTH, {}),
    "all long": (LONG, {}),
    "one": (([3], [2]), {}),
    "empty": (([0, 5, 0], [4, 0, 0]), {}),
    "mixed": (BOTH, {"names": MIXED}),
    "grouped": (BOTH, {"heads": (6, 2)}),
    "grouped, mixed, 64 features": (SHORT, {"heads": (4, 1), "names": MIXED, "width": 64}),
    "float16": (BOTH, {"dtype": torch.float16}),
    "64 features": (BOTH, {"width": 64}),
    "negative scales": (BOTH, {"scales": (-0.1, -2.0)}),
    "window 20 3": (BOTH, {"window": (20, 3)}),
    "window -1 0": (BOTH, {"window": (-1, 0)}),
    "window 9 -1": (SHORT, {"window": (9, -1), "names": MIXED}),
}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows go to their kernels however few they are."""
    monkeypatch.setattr(triton_short, "limit_of", lambda *arguments: LIMIT)


@on_hopper
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_match_float64(name: str) -> None:
    check_problem(CASES[name])


@on_hopper
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", ["short and long", "grouped", "window 20 3"])
def test_runs_give_equal_bits(name: str) -> None:
    (q, k, v), rest = problem(CASES[name])
    grad = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(q.dtype)
    first, *others = (
        (hopper_forward.forward(q, k, v, *rest), *hopper_backward.backward(grad, q, k, v, *rest)) for _ in range(10)
    )
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@on_hopper
@pytest.mark.usefixtures("shared")
def test_views_are_read_in_place() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(182, 3, 4, 128, device="cuda", generator=generator).bfloat16()
    grad = torch.randn(4, 182, 128, device="cuda", generator=generator).bfloat16().transpose(0, 1)
    offsets = offsets_of([30, 100, 0, 52]).cuda()
    rest = [Rows(offsets, 100), Rows(offsets, 100), ("gelu_tanh",) * 4, 128**-0.5, 1.0, NO_MASK]
    views = (grad, *fused.unbind(1))
    plain = [x.contiguous() for x in views]
    assert torch.equal(hopper_forward.forward(*views[1:], *rest), hopper_forward.forward(*plain[1:], *rest))
    for ours, expected in zip(
        hopper_backward.backward(*views, *rest), hopper_backward.backward(*plain, *rest), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", ["edges", "short and long", "grouped", "window 20 3"])
def test_other_rows_go_to_the_triton_kernels_too(name: str) -> None:
    inputs, rest = problem(CASES[name])
    grad = torch.randn(inputs[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    exact = [x.double().requires_grad_() for x in inputs]
    expected = reference.gdpa(*exact, *rest)
    grad = grad.to(inputs[0].dtype)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    with poisoned_empty():
        out = triton_forward.forward(*inputs, *rest)
        results = triton_backward.backward(grad, *inputs, *rest)
    assert_close_to_oracle(out, expected.detach(), outputs(300))
    for result, oracle in zip(results, expected_gradients, strict=True):
        assert_close_to_oracle(result, oracle, gradients(300))
