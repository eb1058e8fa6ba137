"""Rows that are moved to places: the specifications by indexing, the Triton kernel interpreted and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.testing import compile_ahead, poisoned_empty
from kernels.tokens import concat_tokens, move_rows_, place_rows, split_tokens
from kernels.tokens.triton import placement
from tests.kernels.core.devices import SHARED_LIMITS
from tests.kernels.tokens.test_tokens import HAS_TRITON, interpreted

PLACED_SHAPES = [(5, 48), (0, 16), (1, 5), (70, 2, 33), (300,), (9, 1500)]
MOVED_SHAPES = [(5, 48), (0, 16), (1, 5), (70, 33), (300, 1), (9, 1500)]


@pytest.mark.parametrize("shape", PLACED_SHAPES, ids=str)
def test_placement(shape: tuple[int, ...]) -> None:
    placed(partial(place_rows, backend="reference"), shape, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", PLACED_SHAPES, ids=str)
def test_placement_in_the_interpreter(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    placed(placement.place_rows, shape, torch.float32, "cpu")


def over(x: Tensor, divisor: float) -> Tensor:
    """The quotients, rounded once: by a Python number PyTorch's division on a GPU multiplies with the reciprocal."""
    return x / torch.full_like(x, divisor)


def placed(function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Output and gradients are moved, and these divided: every bit is that of indexing and PyTorch's division."""
    places = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3)).to(device)
    x = torch.randn(*shape, 2).to(device, dtype)[..., 0]
    for cuts in ([], [0, shape[0] // 3], [shape[0]]):
        parts = [part.detach().requires_grad_() for part in x.tensor_split(cuts)]
        with poisoned_empty():
            out = function(parts, places)
            gradients = torch.autograd.grad(out, parts, out.detach())
        assert torch.equal(out[places], x)
        assert torch.equal(torch.cat(gradients), x)
        divided = function(parts, places, gradient_divisor=3)
        assert torch.equal(divided, out)
        assert torch.equal(torch.cat(torch.autograd.grad(divided, parts, out.detach())), over(x, 3))
    if shape[0] > 1:  # a part without a gradient
        first, second = x[:1].clone(), x[1:].clone().requires_grad_()
        out = function([first, second], places)
        assert torch.equal(torch.autograd.grad(out, second, out.detach())[0], x[1:])


CONCATENATED = [(5, 6, 16), (0, 6, 8), (1, 1, 5), (9, 40, 300)]


@pytest.mark.parametrize("shape", CONCATENATED, ids=str)
def test_tokens_side_by_side(shape: tuple[int, int, int]) -> None:
    concatenated(concat_tokens, shape, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", CONCATENATED, ids=str)
def test_tokens_side_by_side_in_the_interpreter(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    concatenated(placement.concat_tokens, shape, torch.float32, "cpu")


def concatenated(function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Output and gradients are those of torch.cat and a sum, of parts of larger tensors and of whole ones."""
    x, added = (torch.randn(*shape).to(device, dtype) for _ in range(2))
    cut = shape[1] // 2
    for given in (None, added.clone().requires_grad_()):
        parts = [x[:, :cut].detach().requires_grad_(), x[:, cut:].clone().requires_grad_()]
        leaves = parts if given is None else [*parts, given]
        with poisoned_empty():
            out = function(parts, given)
            gradients = torch.autograd.grad(out, leaves, added)
        assert torch.equal(out, x if given is None else x + added)
        assert torch.equal(torch.cat(gradients[:2], 1), added)
        assert given is None or torch.equal(gradients[2], added)


def test_gradients_of_split_tokens_are_put_together() -> None:
    x, weight = torch.randn(3, 5, 4, requires_grad=True), torch.randn(3, 5, 4)
    first, second = split_tokens(x, [2, 3])
    (gradient,) = torch.autograd.grad((first * weight[:, :2]).sum() + second.square().sum(), x)
    assert torch.equal(gradient, torch.cat([weight[:, :2], 2 * x[:, 2:]], 1))


def test_parts_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 3, 4)
    for parts in ([], [x, x[:1]], [x, x[..., :2]], [x[0]]):
        with pytest.raises(ValueError, match="of one N and D"):
            concat_tokens(parts)
    with pytest.raises(ValueError, match="shape of all parts"):
        concat_tokens([x, x], x)
    assert concat_tokens([x, x.half()]).dtype is torch.float32


@pytest.mark.parametrize("shape", MOVED_SHAPES, ids=str)
def test_moves(shape: tuple[int, int]) -> None:
    moved(partial(move_rows_, backend="reference"), shape, torch.float32, "cpu")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("shape", MOVED_SHAPES, ids=str)
def test_moves_in_the_interpreter(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)

    def move(out: Tensor, rows: Tensor, places: Tensor, scatter: bool = False, divisor: float = 1.0) -> Tensor:
        return placement.move_rows_(out, rows, places, scatter, divisor)

    moved(move, shape, torch.float32, "cpu")


def moved(function: Callable[..., Tensor], shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Some rows are moved and divided, to some places, and nothing else is written."""
    x = torch.randn(*shape, 2).to(device, dtype)[..., 0]
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3)).to(device)
    for places in (order, order[: shape[0] // 3], order[shape[0] // 3 :]):
        for divisor in (1, 3):
            taken = function(x.new_full((len(places), shape[1]), torch.nan), x, places, divisor=divisor)
            assert torch.equal(taken, over(x[places], divisor))
            given, expected = x[: len(places)], x.new_full(shape, -1.0)
            expected[places] = over(given, divisor)
            out = x.new_full(shape, -1.0)
            assert function(out, given, places, scatter=True, divisor=divisor) is out
            assert torch.equal(out, expected)


def test_bad_arguments() -> None:
    x = torch.zeros(4, 2, 8)
    for places in (torch.arange(3), torch.arange(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"places must be int64 \[4\], one for each row of the parts"):
            place_rows([x[:1], x[1:]], places)
    for given in ([], [x, x.half()], [x, x[:, 0]]):
        with pytest.raises(ValueError, match="parts must be at least one, with rows of one shape and dtype"):
            place_rows(given, torch.arange(8))
    rows = torch.zeros(3, 2)
    for out in (torch.zeros(4, 3), torch.zeros(4, 2).half(), torch.zeros(2, 4).t(), torch.zeros(4)):
        with pytest.raises(ValueError, match="out must be a contiguous matrix, and rows one of its width and dtype"):
            move_rows_(out, rows, torch.arange(4))
    for scatter, number in ((False, 4), (True, 3)):
        for places in (torch.arange(7 - number), torch.arange(number, dtype=torch.int32)):
            with pytest.raises(ValueError, match=rf"places must be int64 \[{number}\]"):
                move_rows_(torch.zeros(4, 2), rows, places, scatter=scatter)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_placement_compiles_to_whole_lines(target: str) -> None:
    from kernels.tokens.triton import tokens as triton_tokens

    kernel = triton_tokens.move_rows_kernel
    constants = {"SCATTER": True, "DIVISOR": 1.0, "WIDTH": 128, "ROWS": 32, "BLOCK": 128}
    signature = {"values": "*bf16", "places": "*i64", "out": "*bf16", "num_rows": "i32", "row_stride": "i32"}
    compiled = compile_ahead(kernel, signature, constants, target=target, divisible_by_16=("row_stride",))
    assert compiled.spill_bytes == 0
    assert compiled.contains("ld.global.v4.b32")
    assert compiled.contains("st.global.v4.b32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
class TestOnAGPU:
    @pytest.mark.parametrize("shape", [*CONCATENATED, (100, 24, 1024)], ids=str)
    def test_tokens_side_by_side(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        concatenated(partial(concat_tokens, backend="triton"), shape, dtype, "cuda")

    @pytest.mark.parametrize("shape", [*PLACED_SHAPES, (1000, 256)], ids=str)
    def test_placement(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        placed(partial(place_rows, backend="triton"), shape, dtype, "cuda")

    @pytest.mark.parametrize("shape", [*MOVED_SHAPES, (1000, 256)], ids=str)
    def test_moves(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        moved(partial(move_rows_, backend="triton"), shape, dtype, "cuda")
