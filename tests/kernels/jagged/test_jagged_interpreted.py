"""The Triton kernels of the jagged operators in Triton's interpreter, on the CPU, against the reference in float64."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import jagged
from kernels.core import dispatch
from kernels.testing import Tolerance, check_gradients, poisoned_empty

pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")

from kernels.core import triton as core_triton
from kernels.jagged.triton import bmm_narrow, low_rank
from kernels.jagged.triton.parts import num_parts
from tests.kernels.core.interpreting import interpret
from tests.kernels.core.ungraded import ungraded
from tests.kernels.jagged.jagged_problems import offsets_of, problems

NAMES = "parts activations moves gather bmm_narrow bmm square softmax segment elementwise linear low_rank".split()
TOLERANCE = Tolerance(
    "activations and their derivatives are some ten operations, each rounded; sums over up to 300 places",
    roundings=25,
    reduction=300,
)


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch, core_triton, *(importlib.import_module(f"kernels.jagged.triton.{name}") for name in NAMES))
        patch.setattr(dispatch, "needs_triton", lambda *_: None)
        # One multiprocessor's programs have several tiles each.
        patch.setattr(low_rank, "processors", lambda device: 1)
        dispatch._chosen.clear()
        yield
    dispatch._chosen.clear()


@pytest.mark.parametrize("name", problems([]))
@pytest.mark.parametrize("lengths", [[0, 5, 0, 70, 1, 0], [3], [0, 0], []], ids=str)
def test_operator(name: str, lengths: list[int]) -> None:
    operator, inputs = problems(lengths, offsets_dtype=torch.int32 if len(lengths) > 3 else torch.int64)[name]
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            {key: value.float() for key, value in inputs.items()},
            TOLERANCE,
        )


@given(data=st.data(), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None)
def test_any_lengths(data: st.DataObject, lengths: list[int]) -> None:
    names = [name for name in problems([]) if not name.startswith(("jagged_jagged", "array", "jagged_linear"))]
    operator, inputs = problems(lengths)[data.draw(st.sampled_from(names))]
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            {key: value.float() for key, value in inputs.items()},
            TOLERANCE,
        )


@pytest.mark.parametrize("name", [name for name in problems([]) if name.startswith(("segment", "jagged_"))])
@pytest.mark.parametrize("lengths", [[0, 20, 0, 75, 1, 33, 32, 0], [40, 16, 17, 48]], ids=str)
def test_rows_in_parts(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Parts of 16 places, so that rows of a few dozen are divided.
    for module in ("parts", "segment", "elementwise", "bmm_narrow", "linear"):
        monkeypatch.setattr(importlib.import_module(f"kernels.jagged.triton.{module}"), "PART", 16)
    operator, inputs = problems(lengths)[name]
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            {key: value.float() for key, value in inputs.items()},
            TOLERANCE,
        )


def test_a_matrix_row_longer_than_a_tile() -> None:
    from kernels.jagged.triton import softmax as triton_softmax

    # Smaller tiles, so that the rows are longer than a tile without taking minutes.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_softmax, "MATRIX_ELEMENTS", 256)
        operator, inputs = problems([257, 2])["jagged2_softmax"]
        check_gradients(
            lambda a: operator("triton", a=a),
            lambda a: operator("reference", a=a),
            {"a": inputs["a"].float()},
            TOLERANCE,
        )


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("lengths", [[0, 5, 0, 70, 1, 0], [64, 33], []], ids=str)
def test_both_gradients_of_a_square_product(lengths: list[int], transpose: bool) -> None:
    from kernels.jagged.triton import square

    offsets = offsets_of(lengths)
    squares, longest = jagged.squared_offsets(offsets), max([0, *lengths])

    # The operator asks for both at once in half precision only, which the interpreter multiplies wrong.
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, y):
            ctx.save_for_backward(a, y)
            return square.inner(a, y, offsets, squares, transpose)

        @staticmethod
        def backward(ctx, grad):
            return square.inner_gradients(grad, *ctx.saved_tensors, offsets, squares, transpose)

    inputs = {"a": torch.randn(int(squares[-1])), "y": torch.randn(sum(lengths), 5)}
    with poisoned_empty():
        check_gradients(
            lambda a, y: Product.apply(a, y),
            lambda a, y: jagged.array_jagged_bmm_jagged_out(
                a, y, offsets, squares, longest, transpose, backend="reference"
            ),
            inputs,
            TOLERANCE,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_square_product_can_be_differentiated_twice(dtype: torch.dtype) -> None:
    from kernels.jagged.triton import square

    offsets = offsets_of([3])
    a, y = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((9,), (3, 5)))
    out = square.inner(a, y, offsets, jagged.squared_offsets(offsets), False)
    firsts = torch.autograd.grad(out.sum(), (a, y), create_graph=True)
    assert all(second is not None for second in torch.autograd.grad(sum(x.sum() for x in firsts), (y, a)))


def test_places_behind_the_last_row_are_taken_for_its_own() -> None:
    from kernels.jagged.triton import linear as triton_linear

    rows = torch.full((70,), -1, dtype=torch.int32)
    constants = {"PART": 16, "STEPS": 2, "BLOCK": 16}
    triton_linear._row_of_place_kernel[(num_parts(70, 3, 16),)](offsets_of([20, 0, 5]), rows, 3, 70, **constants)
    assert rows.tolist() == [0] * 20 + [2] * 50


def test_maximum_shares_the_gradient_of_ties() -> None:
    values = torch.tensor([[1.0], [1.0], [0.0], [2.0]], requires_grad=True)
    out = jagged.segment_max(values, torch.tensor([0, 3, 4]), backend="triton")
    (gradient,) = torch.autograd.grad(-out.sum(), values)
    assert gradient.flatten().tolist() == [-0.5, -0.5, 0.0, -1.0]


def test_softmax_of_infinities_is_that_of_the_reference() -> None:
    values = torch.tensor([[-torch.inf], [-torch.inf], [0.0], [1.0], [-torch.inf]])
    offsets = torch.tensor([0, 0, 5])
    expected = jagged.jagged_softmax(values, offsets, backend="reference")
    assert torch.allclose(jagged.jagged_softmax(values, offsets, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moves_of_integers(dtype: torch.dtype) -> None:
    offsets, values = offsets_of([2, 0, 3]), torch.arange(5, dtype=dtype)
    padded = jagged.jagged_to_padded(values, offsets, 3, -1, backend="triton")
    assert padded.tolist() == [[0, 1, -1], [-1, -1, -1], [2, 3, 4]]
    assert jagged.jagged_flip(values, offsets, backend="triton").tolist() == [1, 0, 4, 3, 2]
    both, _ = jagged.jagged_concat(values, offsets, values, offsets, backend="triton")
    assert both.tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4]


def test_gradient_of_more_selected_rows_than_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.jagged.triton import gather

    monkeypatch.setattr(gather, "MAX_RANKED", 2)
    operator, inputs = problems([3, 0, 5, 2])["jagged_index_select"]
    check_gradients(
        lambda x: operator("triton", x=x),
        lambda x: operator("reference", x=x),
        {"x": inputs["x"].float()},
        TOLERANCE,
    )


def test_slice_without_a_total() -> None:
    start, length = torch.tensor([1, 0, 2]), torch.tensor([9, 1, 1])
    sliced, offsets = jagged.jagged_slice(torch.arange(5.0), offsets_of([2, 0, 3]), start, length, backend="triton")
    assert sliced.tolist() == [1, 4]
    assert offsets.tolist() == [0, 1, 1, 2]


def test_index_select_without_a_total() -> None:
    selected, offsets = jagged.jagged_index_select(
        torch.arange(5.0), offsets_of([2, 0, 3]), torch.tensor([2, 0]), backend="triton"
    )
    assert selected.tolist() == [2, 3, 4, 0, 1]
    assert offsets.tolist() == [0, 3, 5]


def custom_operators() -> dict[str, tuple[object, tuple[object, ...]]]:
    """Each custom operator with arguments."""
    from kernels.jagged.triton import bmm, gather, moves, segment, square
    from kernels.jagged.triton import elementwise as triton_elementwise
    from kernels.jagged.triton import linear as triton_linear
    from kernels.jagged.triton import softmax as triton_softmax

    offsets, squares = offsets_of([2, 0, 3]), torch.tensor([0, 4, 4, 13])

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    x, y, a = leaf(5, 4), leaf(5, 4), leaf(13)
    begins, kept = torch.tensor([1, 2, 2]), torch.tensor([0, 1, 1, 3])
    rows, selected = torch.tensor([2, 2, 0]), torch.tensor([0, 3, 6, 8])
    return {
        "to_padded": (moves.to_padded, (x, offsets, 2, 1.0, "last")),
        "to_jagged": (moves.to_jagged, (leaf(3, 2, 4), offsets, 5, "first")),
        "flip": (moves.flip, (x, offsets)),
        "window": (moves.window, (x, offsets, begins, kept, 3)),
        "unwindow": (moves.unwindow, (leaf(3, 4), offsets, begins, kept, 5)),
        "concat": (gather.concat, (x, offsets, y, offsets)),
        "split": (gather.split, (leaf(10, 4), offsets, offsets, 5)),
        "select": (gather.select, (x, offsets, rows, selected, 8)),
        "sum_selected": (gather.sum_selected, (leaf(8, 4), offsets, rows, selected, 5)),
        "slice_offsets": (gather.slice_offsets, (offsets, rows, torch.tensor([1, 1, 2]))),
        "select_offsets": (gather.select_offsets, (offsets, rows)),
        "dense_bmm": (bmm.dense_bmm, (x, offsets, leaf(3, 4, 2), 3)),
        "jagged_bmm": (bmm.jagged_bmm, (x, leaf(5, 2), offsets, 3)),
        "dense_bmm_gradient": (
            bmm.dense_gradient,
            (torch.randn(5, 2), x.detach(), offsets, torch.randn(3, 4, 2), 3, True, False),
        ),
        "jagged_bmm_gradient": (
            bmm.jagged_gradient,
            (torch.randn(3, 4, 4), x.detach(), y.detach(), offsets, True, True),
        ),
        "low_rank": (low_rank.low_rank, (x, offsets, leaf(3, 2, 4), leaf(6, 2), 3)),
        "low_rank_gradient": (
            low_rank.gradient,
            (
                torch.randn(5, 6),
                x.detach(),
                offsets,
                torch.randn(3, 2, 4),
                torch.randn(6, 2),
                torch.randn(5, 2),
                3,
                True,
                True,
            ),
        ),
        "outer": (square.outer, (x, y, offsets, squares, 13)),
        "inner": (square.inner, (a, x, offsets, squares, True)),
        "inner_gradients": (
            square.inner_gradients,
            (y.detach(), a.detach(), x.detach(), offsets, squares, True),
        ),
        "softmax": (triton_softmax.softmax, (x, offsets)),
        "softmax_gradient": (triton_softmax.softmax_gradient, (x.detach(), y.detach(), offsets)),
        "matrix_softmax": (triton_softmax.matrix_softmax, (a, offsets, squares, 5)),
        "matrix_softmax_gradient": (
            triton_softmax.matrix_softmax_gradient,
            (a.detach(), a.detach(), offsets, squares, 5),
        ),
        "reduce": (segment.reduce, (x, offsets, "mean", torch.float32)),
        "largest": (segment.largest, (x, offsets)),
        "spread": (segment.spread, (torch.randn(3, 4), offsets, 5, "mean")),
        "max_gradient": (
            segment.max_gradient,
            (torch.randn(3, 4), x.detach(), torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int32), offsets),
        ),
        "elementwise": (triton_elementwise.elementwise, (x, leaf(3, 4), offsets, "mul", "tanh")),
        "elementwise_alike": (triton_elementwise.elementwise, (x, leaf(5, 4), None, "mul", "tanh")),
        "elementwise_gradient": (
            triton_elementwise.gradient,
            (torch.randn(5, 4), x.detach(), torch.randn(3, 4), offsets, "mul", "tanh"),
        ),
        "linear": (triton_linear.linear, (x, offsets, leaf(2, 4), leaf(2), leaf(3, 2), "gelu", True)),
        "linear_relu": (triton_linear.linear, (x, offsets, leaf(2, 4), None, None, "relu", False)),
    }


@pytest.mark.parametrize("name", custom_operators())
def test_opcheck(name: str) -> None:
    operator, arguments = custom_operators()[name]
    torch.library.opcheck(operator.definition, arguments)


@pytest.mark.parametrize("name", ["largest", "linear", "linear_relu", "low_rank"])
def test_a_result_without_a_gradient_gives_none(name: str) -> None:
    operator, arguments = custom_operators()[name]
    ungraded(operator(*arguments)[0]).backward()
    assert all(x.grad is None for x in arguments if isinstance(x, Tensor))


@pytest.mark.parametrize("wanted", [("x",), ("left",), ("weight",), ("x", "weight"), ("left", "weight")], ids=str)
def test_some_gradients_of_a_low_rank_product(wanted: tuple[str, ...]) -> None:
    operator, inputs = problems([3, 0, 70])["jagged_low_rank"]
    given = {key: value.float().requires_grad_(key in wanted) for key, value in inputs.items()}
    ours, expected = (
        torch.autograd.grad(operator(backend, **given).square().sum(), [given[name] for name in wanted])
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("part", [16, 1024])
def test_the_columns_of_a_pass_without_a_narrow_result_are_divided(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both gradients are one pass where float32 is one product, which the interpreter does not round.
    monkeypatch.setattr(bmm_narrow, "precision_of", lambda dtype: "tf32")
    for module in ("parts", "bmm_narrow"):
        monkeypatch.setattr(importlib.import_module(f"kernels.jagged.triton.{module}"), "PART", part)
    made = []
    products = bmm_narrow.products
    monkeypatch.setattr(bmm_narrow, "products", lambda *args, **named: made.append(named) or products(*args, **named))
    operator, inputs = problems([3, 0, 70])["jagged_low_rank"]
    wide = {"x": torch.randn(73, 200), "left": torch.randn(3, 4, 200), "weight": torch.randn(20, 4)}
    assert inputs.keys() == wide.keys()
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            wide,
            TOLERANCE,
        )
    assert bmm_narrow.config(torch.float32, 200, made[-1]["to"])["BLOCKS_W"] == 4


@pytest.mark.parametrize("part", [2, 1024])
def test_maximum_shows_what_is_not_a_number(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("parts", "segment"):
        monkeypatch.setattr(importlib.import_module(f"kernels.jagged.triton.{module}"), "PART", part)
    nan = float("nan")
    values = torch.tensor([[1.0, 1.0], [nan, 2.0], [3.0, 3.0], [nan, 4.0], [nan, -1.0]])
    offsets = torch.tensor([0, 3, 5])
    expected = torch.tensor([[nan, 3.0], [nan, 4.0]])
    for backend in ("triton", "reference"):
        torch.testing.assert_close(jagged.segment_max(values, offsets, backend=backend), expected, equal_nan=True)
