"""The reference of jagged products, softmax, linear layers, element-wise operations, slices and flips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kernels import jagged
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, poisoned_empty
from tests.kernels.jagged.jagged_problems import offsets_of, problems

LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=5)
fast = settings(max_examples=20, deadline=None)

EXACT = Tolerance("same arithmetic in another order", roundings=16, reduction=64, accumulate=torch.float64)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def rows(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(values.split_with_sizes(lengths))


def squares(values: Tensor, lengths: list[int]) -> list[Tensor]:
    parts = values.split_with_sizes([length * length for length in lengths])
    return [part.view(length, length) for part, length in zip(parts, lengths, strict=True)]


def cat(parts: list[Tensor], *shape: int) -> Tensor:
    return torch.cat([torch.zeros(0, *shape, dtype=torch.float64), *parts])


def check(function: Callable[..., Tensor], oracle: Callable[..., Tensor], **inputs: Any) -> None:
    check_gradients(function, oracle, inputs, EXACT)


@given(lengths=LENGTHS, slack=st.integers(0, 2), dtype=st.sampled_from([torch.int32, torch.int64]))
@fast
def test_jagged_jagged_bmm(lengths: list[int], slack: int, dtype: torch.dtype) -> None:
    longest = max(lengths, default=0) + slack
    check(
        lambda x, y: jagged.jagged_jagged_bmm(x, y, offsets_of(lengths, dtype), longest),
        lambda x, y: cat([(a.mT @ b)[None] for a, b in zip(rows(x, lengths), rows(y, lengths), strict=True)], 3, 2),
        x=random(sum(lengths), 3),
        y=random(sum(lengths), 2),
    )


@given(lengths=LENGTHS, slack=st.integers(0, 2))
@fast
def test_jagged_jagged_bmm_jagged_out(lengths: list[int], slack: int) -> None:
    offsets, longest = offsets_of(lengths), max(lengths, default=0) + slack
    matrices = jagged.squared_offsets(offsets)
    check(
        lambda x, y: jagged.jagged_jagged_bmm_jagged_out(x, y, offsets, matrices, int(matrices[-1]), longest),
        lambda x, y: cat([(a @ b.mT).flatten() for a, b in zip(rows(x, lengths), rows(y, lengths), strict=True)]),
        x=random(sum(lengths), 3),
        y=random(sum(lengths), 3),
    )


@given(lengths=LENGTHS, transpose=st.booleans())
@fast
def test_array_jagged_bmm_jagged_out(lengths: list[int], transpose: bool) -> None:
    offsets, longest = offsets_of(lengths, torch.int32), max(lengths, default=0)
    matrices = jagged.squared_offsets(offsets)

    def oracle(a: Tensor, y: Tensor) -> Tensor:
        pairs = zip(squares(a, lengths), rows(y, lengths), strict=True)
        return cat([(matrix.mT if transpose else matrix) @ row for matrix, row in pairs], 3)

    check(
        lambda a, y: jagged.array_jagged_bmm_jagged_out(a, y, offsets, matrices, longest, transpose),
        oracle,
        a=random(int(matrices[-1])),
        y=random(sum(lengths), 3),
    )


@given(lengths=LENGTHS)
@fast
def test_softmax(lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    matrices = jagged.squared_offsets(offsets)
    check(
        lambda x: jagged.jagged_softmax(x, offsets),
        lambda x: cat([row.softmax(0) for row in rows(x, lengths)], 3),
        x=random(sum(lengths), 3),
    )
    check(
        lambda a: jagged.jagged2_softmax(a, offsets, matrices, sum(lengths)),
        lambda a: cat([matrix.softmax(1).flatten() for matrix in squares(a, lengths)]),
        a=random(int(matrices[-1])),
    )


ACTIVATIONS = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@given(lengths=LENGTHS, activation=st.sampled_from(sorted(ACTIVATIONS)))
@fast
def test_jagged_linear(lengths: list[int], activation: str) -> None:
    offsets, act = offsets_of(lengths), ACTIVATIONS[activation]

    def oracle(x: Tensor, weight: Tensor, bias: Tensor, row_bias: Tensor) -> Tensor:
        pairs = zip(rows(x, lengths), row_bias, strict=True)
        return cat([act(row @ weight.mT + bias + extra) for row, extra in pairs], 2)

    check(
        lambda x, weight, bias, row_bias: jagged.jagged_linear(x, offsets, weight, bias, row_bias, activation),
        oracle,
        x=random(sum(lengths), 3),
        weight=random(2, 3),
        bias=random(2),
        row_bias=random(len(lengths), 2),
    )


@given(lengths=LENGTHS, activation=st.sampled_from(sorted(ACTIVATIONS)), op=st.sampled_from(["add", "mul"]))
@fast
def test_elementwise(lengths: list[int], activation: str, op: str) -> None:
    offsets, act = offsets_of(lengths), ACTIVATIONS[activation]
    combine = getattr(torch, op)
    x, y, dense = random(sum(lengths), 2, 2), random(sum(lengths), 2, 2) + 1, random(len(lengths), 2, 2)
    check(lambda x, y: jagged.jagged_elementwise(x, y, op, activation), lambda x, y: act(combine(x, y)), x=x, y=y)
    check(
        lambda x, y: jagged.jagged_dense_elementwise(x, offsets, y, op, activation),
        lambda x, y: cat([act(combine(row, extra)) for row, extra in zip(rows(x, lengths), y, strict=True)], 2, 2),
        x=x,
        y=dense,
    )


@given(windows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6)), max_size=5))
@fast
def test_slice_and_flip(windows: list[tuple[int, int, int]]) -> None:
    lengths = [length for length, _, _ in windows]
    offsets = offsets_of(lengths)
    start, size = (torch.tensor([window[i] for window in windows], dtype=torch.int64) for i in (1, 2))

    def oracle(x: Tensor) -> Tensor:
        return cat([row[a : a + n] for row, (_, a, n) in zip(rows(x, lengths), windows, strict=True)], 2)

    x = random(sum(lengths), 2)
    total = oracle(x).shape[0]
    for given_total in (total, None):
        check(lambda x, total=given_total: jagged.jagged_slice(x, offsets, start, size, total)[0], oracle, x=x)
    _, sliced = jagged.jagged_slice(x, offsets, start, size, total)
    assert sliced.tolist() == offsets_of([min(n, max(length - a, 0)) for length, a, n in windows]).tolist()
    check(lambda x: jagged.jagged_flip(x, offsets), lambda x: cat([row.flip(0) for row in rows(x, lengths)], 2), x=x)


@pytest.mark.parametrize("name", problems([]))
def test_half_precision(name: str) -> None:
    operator, inputs = problems([3, 0, 9, 1])[name]
    check_gradients(
        lambda **tensors: operator("reference", **tensors),
        lambda **tensors: operator("reference", **tensors),
        {key: value.bfloat16() for key, value in inputs.items()},
        Tolerance("every step of an activation is rounded", roundings=40, reduction=30),
    )


def test_bad_inputs_are_named() -> None:
    x, offsets = torch.zeros(5, 4), offsets_of([2, 3])
    matrices = jagged.squared_offsets(offsets)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_length=2"):
        jagged.jagged_jagged_bmm(x, x, offsets, 2)
    with pytest.raises(ValueError, match=r"expected x \[N, D\] and y \[N, E\]"):
        jagged.jagged_jagged_bmm(x, x[:4], offsets, 3)
    left = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"expected x \[N, D\], left \[B, n, D\] and weight \[E, n\], got \(5, 4\), "):
        jagged.jagged_low_rank(x, offsets, left, torch.zeros(6, 2), 3)
    with pytest.raises(ValueError, match="left has 1 rows and the offsets have 2"):
        jagged.jagged_low_rank(x, offsets, left[:1], torch.zeros(6, 3), 3)
    half, weight = x.bfloat16(), torch.zeros(2, 4)
    for mixed in (
        lambda: jagged.jagged_jagged_bmm(half, x, offsets, 3),
        lambda: jagged.jagged_dense_bmm(half, offsets, torch.zeros(2, 4, 3), 3),
        lambda: jagged.jagged_jagged_bmm_jagged_out(half, x, offsets, matrices, 13, 3),
        lambda: jagged.array_jagged_bmm_jagged_out(torch.zeros(13), half, offsets, matrices, 3),
        lambda: jagged.jagged_linear(half, offsets, weight),
        lambda: jagged.jagged_low_rank(half, offsets, left.bfloat16(), torch.zeros(6, 3), 3),
        lambda: jagged.jagged_linear(x, offsets, weight, row_bias=weight[:, :2].bfloat16()),
    ):
        with pytest.raises(ValueError, match=r"operands must have one dtype, got .* torch.bfloat16"):
            mixed()
    with pytest.raises(ValueError, match="x is 4 and y is 3 wide"):
        jagged.jagged_jagged_bmm_jagged_out(x, x[:, :3], offsets, matrices, 13, 3)
    with pytest.raises(ValueError, match="offsets end at 13 but there are 12 values"):
        jagged.jagged_jagged_bmm_jagged_out(x, x, offsets, matrices, 12, 3)
    with pytest.raises(ValueError, match=r"expected a \[sum of L\^2\]"):
        jagged.array_jagged_bmm_jagged_out(x, x, offsets, matrices, 3)
    with pytest.raises(ValueError, match="y has 3 rows and the offsets have 2"):
        jagged.jagged_dense_elementwise(x, offsets, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="must be alike but for their first size"):
        jagged.jagged_dense_elementwise(x, offsets, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="must be alike"):
        jagged.jagged_elementwise(x, x[:4])
    with pytest.raises(ValueError, match="op must be one of add, mul, got 'sub'"):
        jagged.jagged_elementwise(x, x, "sub")
    with pytest.raises(ValueError, match="activation must be one of none, relu"):
        jagged.jagged_linear(x, offsets, torch.zeros(2, 4), activation="swish")
    with pytest.raises(ValueError, match=r"expected x \[N, D\] and weight \[E, D\]"):
        jagged.jagged_linear(x, offsets, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="bias .* does not fit weight"):
        jagged.jagged_linear(x, offsets, torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="start has 1 rows and the offsets have 2"):
        jagged.jagged_slice(x, offsets, torch.zeros(1), torch.ones(2, dtype=torch.int64))
    counts = torch.ones(2, dtype=torch.int64)
    for start, length, name in ((-counts, counts, "start"), (counts, -counts, "length")):
        with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
            jagged.jagged_slice(x, offsets, start, length)
    for compute in (
        lambda y: jagged.jagged_elementwise(y, y),
        lambda y: jagged.jagged_dense_elementwise(y, offsets, y[:2]),
    ):
        with pytest.raises(ValueError, match="x must be floating, got torch.int64"):
            compute(x.long())
    with pytest.raises(ValueError, match="offsets end at 2 but there are 3 values"):
        jagged.jagged_slice(x, offsets, torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 3)


@given(lengths=LENGTHS, slack=st.integers(0, 2), rank=st.integers(1, 3))
@fast
def test_jagged_low_rank(lengths: list[int], slack: int, rank: int) -> None:
    offsets, longest = offsets_of(lengths), max(lengths, default=0) + slack
    check(
        lambda x, left, weight: jagged.jagged_low_rank(x, offsets, left, weight, longest),
        lambda x, left, weight: cat(
            [row @ (weight @ one).mT for row, one in zip(rows(x, lengths), left, strict=True)], 2
        ),
        x=random(sum(lengths), 3),
        left=random(len(lengths), rank, 3),
        weight=random(2, rank),
    )


def test_autocast_casts_the_factors_of_a_low_rank_product() -> None:
    x, left, weight = torch.randn(5, 4).bfloat16(), torch.randn(2, 3, 4), torch.randn(6, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = jagged.jagged_low_rank(x, offsets_of([2, 3]), left, weight, 3)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_no_host_sync() -> None:
    # Meta tensors have no data: whoever asks for a number of theirs gets an exception.
    x = torch.empty(6, 4, device="meta", requires_grad=True)
    offsets, rows_of = torch.empty(4, device="meta", dtype=torch.int64), torch.empty(3, device="meta").long()
    matrices = jagged.squared_offsets(offsets)
    a = jagged.jagged_jagged_bmm_jagged_out(x, x, offsets, matrices, 14, 3)
    y = jagged.array_jagged_bmm_jagged_out(jagged.jagged2_softmax(a, offsets, matrices, 6), x, offsets, matrices, 3)
    z = jagged.jagged_linear(jagged.jagged_softmax(y, offsets), offsets, x[:2], activation="gelu")
    z = jagged.jagged_dense_elementwise(z, offsets, z[:3], "mul", "silu")
    z, _ = jagged.jagged_slice(jagged.jagged_flip(z, offsets), offsets, rows_of, rows_of, 5)
    z = jagged.jagged_low_rank(z, offsets, torch.empty(3, 4, z.shape[1], device="meta"), x[:, :4], 3)
    (z.sum() + jagged.jagged_jagged_bmm(x, x, offsets, 3).sum()).backward()
    assert x.grad is not None


GPU_TOLERANCE = Tolerance(
    "activations are some ten operations, each rounded; inputs of a backward are rounded results; sums over 300 places",
    roundings=25,
    reduction=300,
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lengths",
    [[0, 300, 1, 128, 0, 33], [5], [0] * 40 + [700] + [0] * 40, [0, 0], []],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("name", problems([]))
def test_triton_matches_the_reference(name: str, lengths: list[int], dtype: torch.dtype) -> None:
    operator, inputs = problems(lengths, "cuda", torch.int32)[name]
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            {key: value.to(dtype) for key, value in inputs.items()},
            GPU_TOLERANCE,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 100, 256])
def test_outer_products_of_float32_that_tma_loads(width: int) -> None:
    lengths = [0, 300, 1, 128, 0, 33]
    offsets = offsets_of(lengths).cuda()
    squares = jagged.squared_offsets(offsets)
    # Rows are the ends of wider ones, at places that TMA cannot address.
    x, y = (torch.randn(sum(lengths), width + 1, device="cuda")[:, 1:] for _ in "xy")
    x[301, 2], y[300, 1] = float("nan"), float("inf")
    out, exact = (
        jagged.jagged_jagged_bmm_jagged_out(x.to(kind), y.to(kind), offsets, squares, int(squares[-1]), 300)
        for kind in (torch.float32, torch.float64)
    )
    finite = exact.isfinite()
    assert torch.equal(out.isfinite(), finite)
    assert_close_to_oracle(out[finite], exact[finite], GPU_TOLERANCE)


DIVIDED = ("segment", "jagged_dense", "jagged_linear", "jagged_index_select", "jagged_jagged_bmm")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in problems([]) if name.startswith(DIVIDED) and "_out" not in name])
def test_rows_in_parts(name: str, dtype: torch.dtype) -> None:
    operator, inputs = problems([0] * 20 + [2700] + [0] * 20 + [1025, 3, 2048], "cuda")[name]
    with poisoned_empty():
        check_gradients(
            lambda **tensors: operator("triton", **tensors),
            lambda **tensors: operator("reference", **tensors),
            {key: value.to(dtype) for key, value in inputs.items()},
            Tolerance("as above; sums over 2700 places", roundings=25, reduction=2700),
        )


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    lengths, width = [3, 2**23, 0, 5], 257
    offsets, total = offsets_of(lengths).cuda(), sum(lengths)
    values = torch.arange(total, device="cuda").remainder_(251)[:, None].bfloat16().repeat(1, width)
    flipped = jagged.jagged_flip(values, offsets, backend="triton")
    assert torch.equal(flipped[-5:], values[-5:].flip(0))
    assert torch.equal(flipped[3:1003], values[2**23 - 997 : 2**23 + 3].flip(0))
    del flipped
    both, _ = jagged.jagged_concat(values, offsets, values[:4], offsets_of([1, 1, 1, 1]).cuda(), backend="triton")
    assert torch.equal(both[-6:-1], values[-5:])
    del both
    product = jagged.jagged_dense_bmm(values, offsets, torch.eye(width, 16).bfloat16().expand(4, -1, -1).cuda(), 2**23)
    assert torch.equal(product[-5:], values[-5:, :16])
    assert jagged.segment_max(values, offsets, backend="triton").max() == 250
