"""The jagged reference against Python loops over rows, in float64, output and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import jagged
from kernels.attention import attention_pool, jagged_attention
from kernels.testing import Tolerance, check_gradients, poisoned_empty
from tests.kernels.jagged.jagged_problems import offsets_of

LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=5)
fast = settings(max_examples=20, deadline=None)

# float64 against float64: only the order of additions differs.
EXACT = Tolerance("same arithmetic in another order", roundings=4, reduction=64, accumulate=torch.float64)


def rows(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(values.split_with_sizes(offsets.diff().tolist()))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def stack(parts: list[Tensor], *shape: int) -> Tensor:
    """torch.stack that also takes no parts at all."""
    return torch.stack(parts) if parts else torch.zeros(0, *shape, dtype=torch.float64)


def check(function: Callable[..., Tensor], oracle: Callable[..., Tensor], **inputs: Any) -> None:
    check_gradients(function, oracle, inputs, EXACT)


@pytest.mark.parametrize(
    ("function", "reduce"),
    [
        (jagged.segment_sum, lambda row: row.sum(0)),
        (jagged.segment_mean, lambda row: row.sum(0) / max(len(row), 1)),
        (jagged.segment_max, lambda row: row.amax(0) if len(row) else row.sum(0)),
    ],
)
@given(lengths=LENGTHS, dtype=st.sampled_from([torch.int32, torch.int64]), trailing=st.sampled_from([(), (3,), (2, 2)]))
@fast
def test_segment(
    function: Callable[..., Tensor],
    reduce: Callable[[Tensor], Tensor],
    lengths: list[int],
    dtype: torch.dtype,
    trailing: tuple[int, ...],
) -> None:
    offsets = offsets_of(lengths, dtype)
    check(
        lambda values: function(values, offsets),
        lambda values: stack([reduce(row) for row in rows(values, offsets)], *trailing),
        values=random(sum(lengths), *trailing),
    )


def test_segment_mean_of_half_precision_accumulates_in_float32() -> None:
    # 3000 times 1 + 2^-7 in bfloat16: a bfloat16 accumulator would stick at 256.
    values = torch.full((3000, 1), 1.0078125, dtype=torch.bfloat16)
    assert jagged.segment_mean(values, torch.tensor([0, 3000])).item() == 1.0078125


def test_segment_max_shares_the_gradient_of_ties() -> None:
    values = torch.tensor([1.0, 1.0, 0.0], requires_grad=True)
    for sign in (1.0, -1.0):
        (gradient,) = torch.autograd.grad(sign * jagged.segment_max(values, torch.tensor([0, 3])).sum(), values)
        assert gradient.tolist() == [0.5 * sign, 0.5 * sign, 0.0]


@given(lengths=LENGTHS, maximum=st.integers(1, 6), keep=st.sampled_from(["first", "last"]))
@fast
def test_jagged_to_padded(lengths: list[int], maximum: int, keep: str) -> None:
    offsets = offsets_of(lengths)

    def oracle(values: Tensor) -> Tensor:
        padded = []
        for row in rows(values, offsets):
            kept = row[:maximum] if keep == "first" else row[max(len(row) - maximum, 0) :]
            padded.append(torch.cat([kept, kept.new_full((maximum - len(kept), 2), 7.0)]))
        return stack(padded, maximum, 2)

    check(
        lambda values: jagged.jagged_to_padded(values, offsets, maximum, 7.0, keep),
        oracle,
        values=random(sum(lengths), 2),
    )


@given(lengths=LENGTHS, maximum=st.integers(1, 6))
@fast
def test_padded_to_jagged(lengths: list[int], maximum: int) -> None:
    offsets = offsets_of(lengths, torch.int32)

    def oracle(padded: Tensor) -> Tensor:
        parts = [padded.new_zeros(0, 2)]
        for row, length in zip(padded, lengths, strict=True):
            parts += [row[:length], padded.new_zeros(max(length - maximum, 0), 2)]
        return torch.cat(parts)

    check(
        lambda padded: jagged.padded_to_jagged(padded, offsets, sum(lengths)),
        oracle,
        padded=random(len(lengths), maximum, 2),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16])
def test_what_only_moves_keeps_its_dtype_and_value(dtype: torch.dtype) -> None:
    padded, offsets = torch.tensor([[2**24 + 1, 1, 7], [3, 0, 1]]).to(dtype), torch.tensor([0, 2, 5])
    values = jagged.padded_to_jagged(padded, offsets, 5)
    assert values.dtype is dtype
    assert values.tolist() == [*padded[0, :2].tolist(), *padded[1].tolist()]
    assert torch.equal(jagged.jagged_to_padded(values, offsets, 3)[1], padded[1])


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5))
@fast
def test_jagged_concat(pairs: list[tuple[int, int]]) -> None:
    a_offsets, b_offsets = (offsets_of([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = random(int(a_offsets[-1]), 2), random(int(b_offsets[-1]), 2)
    _, offsets = jagged.jagged_concat(a, a_offsets, b, b_offsets)
    assert offsets.tolist() == offsets_of([a + b for a, b in pairs]).tolist()

    def oracle(a: Tensor, b: Tensor) -> Tensor:
        both = zip(rows(a, a_offsets), rows(b, b_offsets), strict=True)
        return torch.cat([a[:0], *(part for row in both for part in row)])

    with poisoned_empty():
        check(
            lambda a, b: jagged.jagged_concat(a, a_offsets, b, b_offsets)[0],
            oracle,
            a=a,
            b=b,
        )


@given(data=st.data(), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5), known=st.booleans())
@fast
def test_jagged_index_select(data: st.DataObject, lengths: list[int], known: bool) -> None:
    selection = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    offsets, index = offsets_of(lengths), torch.tensor(selection, dtype=torch.int64)
    wanted = [lengths[row] for row in selection]
    total = sum(wanted) if known else None
    _, selected = jagged.jagged_index_select(random(sum(lengths)), offsets, index, total)
    assert selected.tolist() == offsets_of(wanted).tolist()
    check(
        lambda values: jagged.jagged_index_select(values, offsets, index, total)[0],
        lambda values: torch.cat([values[:0], *(rows(values, offsets)[row] for row in selection)]),
        values=random(sum(lengths), 2),
    )


@given(lengths=LENGTHS, count=st.integers(1, 7))
@fast
def test_jagged_last(lengths: list[int], count: int) -> None:
    offsets = offsets_of(lengths)

    def oracle(values: Tensor) -> Tensor:
        last = [row[max(len(row) - count, 0) :] for row in rows(values, offsets)]
        return stack([torch.cat([row.new_zeros(count - len(row), 2), row]) for row in last], count, 2)

    check(lambda values: jagged.jagged_last(values, offsets, count), oracle, values=random(sum(lengths), 2))


@given(lengths=LENGTHS, slack=st.integers(0, 2))
@fast
def test_jagged_dense_bmm(lengths: list[int], slack: int) -> None:
    offsets = offsets_of(lengths)
    check(
        lambda x, y: jagged.jagged_dense_bmm(x, offsets, y, max(lengths, default=0) + slack),
        lambda x, y: torch.cat([x.new_zeros(0, 2), *(a @ b for a, b in zip(rows(x, offsets), y, strict=True))]),
        x=random(sum(lengths), 3),
        y=random(len(lengths), 3, 2),
    )


def test_non_contiguous_inputs() -> None:
    offsets = offsets_of([2, 0, 3])
    transposed = random(4, 5).t()
    assert torch.equal(jagged.segment_sum(transposed, offsets), jagged.segment_sum(transposed.contiguous(), offsets))
    wide_offsets = torch.stack([offsets, offsets], 1)[:, 0]
    assert torch.equal(
        jagged.jagged_to_padded(transposed, wide_offsets, 3), jagged.jagged_to_padded(transposed, offsets, 3)
    )


def every_operator(device: str | None = None) -> dict[str, Callable[..., Tensor]]:
    """Each operator as a function of (values [6, 2, 4], offsets [4]) for tests of what they have in common."""
    rows_selected = torch.tensor([2, 0], device=device)
    return {
        "segment_sum": jagged.segment_sum,
        "segment_mean": jagged.segment_mean,
        "segment_max": jagged.segment_max,
        "jagged_to_padded": lambda x, o: jagged.jagged_to_padded(x, o, 3),
        "padded_to_jagged": lambda x, o: jagged.padded_to_jagged(x.unflatten(0, (3, 2)), o, 6),
        "jagged_concat": lambda x, o: jagged.jagged_concat(x, o, x, o)[0],
        "jagged_index_select": lambda x, o: jagged.jagged_index_select(x, o, rows_selected, 5)[0],
        "jagged_last": lambda x, o: jagged.jagged_last(x, o, 2),
        "jagged_dense_bmm": lambda x, o: jagged.jagged_dense_bmm(x[:, 0], o, x[:3, 0, :, None], 3),
        "jagged_attention": lambda x, o: jagged_attention(x, x, x, o, o, max_q=3, max_k=3, causal=True),
        "attention_pool": lambda x, o: attention_pool(x, x[:, 0], o, o, max_q=3, max_k=3, scale=0.5),
    }


@pytest.mark.parametrize("name", every_operator())
def test_gradcheck(name: str) -> None:
    operator = every_operator()[name]
    offsets = torch.tensor([0, 3, 4, 6])
    assert torch.autograd.gradcheck(lambda x: operator(x, offsets), random(6, 2, 4).requires_grad_())


@pytest.mark.parametrize("name", every_operator())
def test_no_host_sync_forward_or_backward(name: str) -> None:
    # Meta tensors have no data: whoever asks for a number of theirs gets an exception.
    values = torch.empty(6, 2, 4, device="meta", requires_grad=True)
    offsets = torch.empty(4, device="meta", dtype=torch.int64)
    every_operator("meta")[name](values, offsets).sum().backward()
    assert values.grad is not None


def test_compiles_into_one_graph() -> None:
    def model(x: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([operator(x, offsets).flatten() for operator in every_operator().values()])

    x, offsets = random(6, 2, 4), torch.tensor([0, 3, 4, 6])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x, offsets), model(x, offsets), rtol=1e-12)  # float64, another order of additions


def test_fake_tensors_are_not_looked_at() -> None:
    with FakeTensorMode() as mode:
        q, offsets = mode.from_tensor(torch.zeros(5, 2, 8)), mode.from_tensor(torch.tensor([0, 2, 5]))
        attended = jagged_attention(q, q, q, offsets, offsets, max_q=3, max_k=3)
        assert attended.shape == (5, 2, 8)
        assert jagged.jagged_index_select(q, offsets, offsets[:2], 3)[0].shape == (3, 2, 8)


def test_autocast_gives_its_dtype() -> None:
    offsets = offsets_of([2, 1])
    x = torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        product = jagged.jagged_dense_bmm(x[:, 0], offsets, torch.randn(2, 4, 3), 2)
    assert product.dtype is torch.bfloat16


def test_bad_inputs_are_named() -> None:
    values, offsets = torch.zeros(5, 1, 4), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="offsets end at 5 but there are 4 values"):
        jagged.segment_sum(values[:4], offsets)
    with pytest.raises(ValueError, match=r"offsets begin with 2; offsets\[0\].*must be 0"):
        jagged.segment_sum(values, offsets[1:])
    with pytest.raises(ValueError, match="row 1 goes from 4 to 3"):
        jagged.jagged_to_padded(values, torch.tensor([0, 4, 3, 5]), 4)
    for wrong in (offsets.float(), offsets.short(), offsets[None], offsets[:0]):
        with pytest.raises(ValueError, match=r"offsets must be \[B \+ 1\] int32 or int64"):
            jagged.segment_sum(values, wrong)
    for reduce in (jagged.segment_sum, jagged.segment_mean, jagged.segment_max, jagged.jagged_softmax):
        with pytest.raises(ValueError, match=r"values must be floating, got torch.int64; e.g. values.double\(\)"):
            reduce(values.long(), offsets)
    with pytest.raises(ValueError, match="rows must not be negative, got -2"):
        jagged.jagged_index_select(values, offsets, torch.tensor([1, -2]))
    with pytest.raises(ValueError, match="offsets end at 5 but there are 4 values"):
        jagged.padded_to_jagged(torch.zeros(2, 3), offsets, 4)
    with pytest.raises(ValueError, match="offsets end at 6 but there are 5 values"):
        jagged.jagged_index_select(values, offsets, torch.tensor([1, 1]), total=5)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_length=2"):
        jagged.jagged_dense_bmm(values[:, 0], offsets, torch.zeros(2, 4, 4), 2)
    with pytest.raises(ValueError, match="a has 2 rows and b has 1"):
        jagged.jagged_concat(values, offsets, values, torch.tensor([0, 5]))
    # A kernel would read b in a's width, and rows that are not there.
    with pytest.raises(ValueError, match=r"a \(5, 1, 4\) and b \(5, 1, 3\) must be alike but for their first size"):
        jagged.jagged_concat(values, offsets, values[..., :3], offsets)
    with pytest.raises(ValueError, match="padded has 1 rows and the offsets have 2"):
        jagged.padded_to_jagged(torch.zeros(1, 3, 4), offsets, 5)
    with pytest.raises(ValueError, match="keep must be 'first' or 'last', got 'middle'"):
        jagged.jagged_to_padded(values, offsets, 3, keep="middle")
