"""Linear compression: the specification against the broadcast it avoids, backends against the specification."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kernels.ikbo import linear_compression, nested_offsets
from kernels.ikbo.lce_operator import gradients_with
from kernels.ikbo.lce_torch import aligned_rows, batched, weight_gradient
from kernels.testing import Tolerance, check_gradients, poisoned_empty
from tests.kernels.ikbo.lce_cases import SHAPES, Case, call

EXACT = Tolerance("the same sums in another order, over at most 300 candidates", roundings=4, reduction=600)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_one_product_over_the_tokens_of_all_levels(shape: str) -> None:
    tensors = SHAPES[shape].inputs("cpu", torch.float64)
    x, weight = tensors["candidate"], tensors["w_candidate"]
    row = torch.arange(x.shape[0])
    for level in reversed(range(len(SHAPES[shape].counts))):
        bounds = tensors[f"offsets_{level}"].tolist()
        owner = torch.tensor([r for r, (low, high) in enumerate(pairwise(bounds)) for _ in range(low, high)])
        row = owner.long()[row]
        x = torch.cat([x, tensors[f"user_{level}"][row]], 1)
        weight = torch.cat([weight, tensors[f"w_user_{level}"]], 1)
    torch.testing.assert_close(call("reference", **tensors), weight @ x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_backend_equals_the_reference(shape: str, dtype: torch.dtype) -> None:
    with poisoned_empty():
        check_gradients(
            lambda **tensors: call("torch", **tensors),
            lambda **tensors: call("reference", **tensors),
            SHAPES[shape].inputs("cpu", dtype),
            EXACT,
        )


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    num_out=st.integers(1, 9),
    depth=st.integers(1, 9),
    width=st.integers(1, 5),
)
@settings(max_examples=20, deadline=None)
def test_any_counts(counts: list[int], num_out: int, depth: int, width: int) -> None:
    case = Case((tuple(counts),), num_out, depth, (3,), width)
    tensors = case.inputs("cpu", torch.float64)
    torch.testing.assert_close(call("torch", **tensors), call("reference", **tensors))


@pytest.mark.parametrize("columns", [1, 7, 8])
def test_aligned_keeps_values_and_shape(columns: int) -> None:
    matrix = torch.randn(3, columns + 1, dtype=torch.float16)
    for view in (matrix[:, 1:], matrix[:, :columns], matrix[:, :columns].T, matrix[:1, :columns].expand(3, -1)):
        copy = aligned_rows(view)
        assert torch.equal(copy, view)
        assert copy.stride(1) == 1
        assert copy.stride(0) >= view.shape[1]
        assert copy.stride(0) % 8 == 0
        assert copy.data_ptr() % 16 == 0
    assert aligned_rows(copy) is copy


def test_operands_may_be_views() -> None:
    tensors = SHAPES["uneven"].inputs("cpu", torch.float64)
    views = {
        "candidate": tensors["candidate"].mT.contiguous().mT,
        "w_candidate": tensors["w_candidate"].T.contiguous().T,
        "user_0": tensors["user_0"].repeat_interleave(2, 0)[::2],
        "offsets_0": tensors["offsets_0"].repeat_interleave(2)[::2],
    }
    check_gradients(
        lambda **given: call("torch", **given), lambda **given: call("reference", **given), tensors | views, EXACT
    )


@pytest.mark.parametrize("needed", [("candidate",), ("w_candidate", "user_1"), ("w_user_0",)], ids=str)
def test_gradients_that_nobody_needs_cost_nothing(needed: tuple[str, ...]) -> None:
    tensors = SHAPES["two levels"].inputs("cpu", torch.float64)
    leaves = [tensors[name].requires_grad_() for name in needed]
    expected = torch.autograd.grad(call("reference", **tensors).square().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(call("torch", **tensors).square().sum(), leaves), expected)
    out = call("torch", **tensors).sum()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, leaves)
    sizes = {"candidate": 6 * 6, "w_candidate": 6 * 6, "user_1": 4 * 7, "w_user_0": 3 * 3}
    assert counter.get_total_flops() == 2 * 5 * 4 * sum(sizes[name] for name in needed)


def test_a_backward_stops_at_the_last_level_that_needs_it() -> None:
    tensors = SHAPES["one request"].inputs("cpu", torch.float64)
    grad, users, w_users = torch.ones(5, 5, 4, dtype=torch.float64), [tensors["user_0"]], [tensors["w_user_0"]]
    needs = [False, False, False, True]
    backward = gradients_with(batched, weight_gradient)
    gradients = backward(grad, tensors["candidate"], tensors["w_candidate"], users, w_users, [], needs)
    assert [gradient is not None for gradient in gradients] == needs


@pytest.mark.parametrize("differentiated", ["all", "weights"])
@pytest.mark.parametrize("shape", ["no requests", "uneven", "two levels"])
def test_operator_is_sound_for_compilers(shape: str, differentiated: str) -> None:
    tensors = SHAPES[shape].inputs("cpu", torch.float64)
    levels = len(SHAPES[shape].counts)
    arguments = [tensors[f"{kind}_{level}"] for level in range(levels) for kind in ("user", "w_user", "offsets")]
    arguments += [tensors["candidate"], tensors["w_candidate"]]
    dims = (2, 3) if differentiated == "all" else (2,)
    arguments = [x.requires_grad_(x.is_floating_point() and x.dim() in dims) for x in arguments]
    torch.library.opcheck(getattr(torch.ops.gemsmith, f"lce_torch_{levels}").default, arguments)


def test_products_are_counted_at_their_own_number_of_rows() -> None:
    tensors = SHAPES["two levels"].inputs("cpu", torch.float32)
    floating = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    with FlopCounterMode(display=False) as counter:
        out = call("torch", **tensors)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert all(x.grad is not None for x in floating)
    assert forward == 2 * 5 * 4 * (6 * 6 + 4 * 7 + 3 * 3)
    assert counter.get_total_flops() == 3 * forward


def test_autocast_decides_the_dtype() -> None:
    tensors = SHAPES["uneven"].inputs("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(None, **tensors).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": torch.zeros(7, 5, 4)}, r"candidate \(7, 5, 4\).*expected \[C, Kc, N\]"),
        ({"user_0": torch.zeros(6, 3, 5)}, r"request \(6, 3, 5\).*level 0.*\[R, Kr, 4\]"),
        ({"w_user_0": torch.zeros(4, 3)}, r"w_request \(4, 3\)"),
        ({"offsets_0": torch.zeros(3, dtype=torch.long)}, r"6 rows need \[7\]"),
        ({"offsets_0": torch.tensor([0, 0, 0, 0, 0, 0, 6])}, "end at 6 but there are 7"),
        ({"w_candidate": torch.zeros(5, 6, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_bad_input_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    tensors = SHAPES["uneven"].inputs("cpu", torch.float32) | change
    with pytest.raises(ValueError, match=message):
        call(None, **tensors)


def test_too_many_levels_are_refused() -> None:
    tensors = SHAPES["one candidate each"].inputs("cpu", torch.float32)
    lists = [[tensors[name]] * 4 for name in ("user_0", "w_user_0", "offsets_0")]
    with pytest.raises(ValueError, match="4 levels above the candidates; at most 3"):
        linear_compression(tensors["candidate"], lists[0], tensors["w_candidate"], lists[1], lists[2])


def test_levels_are_those_of_nested_offsets() -> None:
    """Outermost first: leaves of the tree get what the two-level call with composed offsets gives them."""
    tensors = SHAPES["two levels"].inputs("cpu", torch.float64)
    offsets = tensors["offsets_0"], tensors["offsets_1"]
    candidate, w_candidate = tensors["candidate"], tensors["w_candidate"]
    users, w_users = ([tensors[f"{kind}_{level}"] for level in range(2)] for kind in ("user", "w_user"))
    out = linear_compression(candidate, users, w_candidate, w_users, offsets)
    by_user = linear_compression(candidate, users[0], w_candidate, w_users[0], nested_offsets(*offsets))
    of_vendors = linear_compression(0 * candidate, users[1], w_candidate, w_users[1], offsets[1])
    torch.testing.assert_close(out, by_user + of_vendors)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_levels_from_the_candidates_upwards_are_refused(backend: str) -> None:
    tensors = SHAPES["two levels"].inputs("cpu", torch.float32)
    lists = [[tensors[f"{kind}_1"], tensors[f"{kind}_0"]] for kind in ("user", "w_user", "offsets")]
    message = r"level 0: offsets end at 6 but there are 3 values; levels come outermost first, e.g. \[user, vendor\]"
    with pytest.raises(ValueError, match=message):
        linear_compression(tensors["candidate"], lists[0], tensors["w_candidate"], lists[1], lists[2], backend=backend)


def test_levels_come_in_threes() -> None:
    tensors = SHAPES["one request"].inputs("cpu", torch.float32)
    with pytest.raises(ValueError, match="one entry a level, got 1, 0 and 1"):
        linear_compression(tensors["candidate"], tensors["user_0"], tensors["w_candidate"], [], tensors["offsets_0"])
