"""The jagged reference against Python loops over rows, in float64, output and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import jagged
from kernels.testing import Tolerance, check_gradients, poisoned_empty

LENGTHS = st.lists(st.integers(0, 5), min_size=0, max_size=5)
fast = settings(max_examples=20, deadline=None)

# float64 against float64: only the order of additions differs.
EXACT = Tolerance("same arithmetic in another order", roundings=4, reduction=64, accumulate=torch.float64)

GRADIENTS = Tolerance(
    "the gradient of a score is p * (dp - sum p dp): dp and the sum are rounded at about five times the size of their "
    "difference, which counts as 25 roundings; sums over up to 300 rows",
    roundings=25,
    reduction=300,
)


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


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
    (gradient,) = torch.autograd.grad(jagged.segment_max(values, torch.tensor([0, 3])).sum(), values)
    assert gradient.tolist() == [0.5, 0.5, 0.0]


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


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """One query and one head at a time, over an explicit list of the keys it sees."""
    out = []
    for q_row, k_row, v_row in zip(rows(q, q_offsets), rows(k, k_offsets), rows(v, k_offsets), strict=True):
        for i, query in enumerate(q_row):
            seen = [j for j in range(len(k_row)) if (not causal or j <= i) and (window is None or abs(i - j) <= window)]
            heads = []
            for head, head_query in enumerate(query):
                shared = head * k.shape[1] // q.shape[1]
                weights = (k_row[seen, shared] @ head_query * scale).softmax(0)
                heads.append(weights @ v_row[seen, shared] if seen else v.new_zeros(v.shape[2]))
            out.append(torch.stack(heads))
    return torch.stack(out) if out else v.new_zeros(0, q.shape[1], v.shape[2])


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4),
    causal=st.booleans(),
    window=st.sampled_from([None, 0, 1]),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    slack=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_jagged_attention(
    pairs: list[tuple[int, int]], causal: bool, window: int | None, heads: tuple[int, int], slack: int
) -> None:
    q_offsets, k_offsets = offsets_of([q for q, _ in pairs]), offsets_of([k for _, k in pairs], torch.int32)
    max_q, max_k = (max((pair[side] for pair in pairs), default=0) + slack for side in (0, 1))
    check(
        lambda q, k, v: jagged.jagged_attention(
            q, k, v, q_offsets, k_offsets, max_q=max_q, max_k=max_k, scale=0.7, causal=causal, window=window
        ),
        lambda q, k, v: attention_oracle(q, k, v, q_offsets, k_offsets, 0.7, causal, window),
        q=random(int(q_offsets[-1]), heads[0], 3),
        k=random(int(k_offsets[-1]), heads[1], 3),
        v=random(int(k_offsets[-1]), heads[1], 2),
    )


def test_query_without_keys_gives_zeros_and_zero_gradients() -> None:
    q_offsets, k_offsets = torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1])
    q, k, v = (random(n, 2, 4).requires_grad_() for n in (5, 1, 1))
    # Row 0 has no keys; in row 1 the window hides the only key from queries 1 and 2.
    with poisoned_empty():
        out = jagged.jagged_attention(q, k, v, q_offsets, k_offsets, max_q=3, max_k=4, window=0)
        gradients = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v))
    seen = [2]
    blind = [0, 1, 3, 4]
    assert (out[blind] == 0).all()
    assert torch.equal(out[seen], v)
    assert (gradients[0][blind] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_attention_scale_defaults_to_head_dimension() -> None:
    offsets = torch.tensor([0, 3])
    q, k, v = (random(3, 1, 5) for _ in range(3))
    given_scale, default = (
        jagged.jagged_attention(q, k, v, offsets, offsets, max_q=3, max_k=3, scale=scale)
        for scale in (1 / math.sqrt(5), None)
    )
    assert torch.equal(given_scale, default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_training_dtypes(dtype: torch.dtype) -> None:
    offsets = offsets_of([0, 7, 1, 20])
    q, k, v = (random(28, 2, 8).to(dtype) for _ in range(3))
    check_gradients(
        lambda q, k, v: jagged.jagged_attention(q, k, v, offsets, offsets, max_q=20, max_k=20),
        lambda q, k, v: attention_oracle(q, k, v, offsets, offsets, 8**-0.5, False, None),
        {"q": q, "k": k, "v": v},
        Tolerance("probabilities and result are rounded; sums over 20 keys", roundings=2, reduction=20),
        GRADIENTS,
    )


def test_non_contiguous_inputs() -> None:
    offsets = offsets_of([2, 0, 3])
    packed = random(5, 2, 3, 4)  # [N, q k v interleaved after the head, ...] views with strides of their own
    q, k, v = (packed[:, :, i].detach() for i in range(3))
    assert not q.is_contiguous()
    out = jagged.jagged_attention(q, k, v, offsets, offsets, max_q=3, max_k=3)
    assert torch.equal(
        out,
        jagged.jagged_attention(q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, max_q=3, max_k=3),
    )
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
        "jagged_attention": lambda x, o: jagged.jagged_attention(x, x, x, o, o, max_q=3, max_k=3, causal=True),
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


def test_autocast_gives_its_dtype() -> None:
    offsets = offsets_of([2, 1])
    x = torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        attention = jagged.jagged_attention(x, x.bfloat16(), x, offsets, offsets, max_q=2, max_k=2)
        product = jagged.jagged_dense_bmm(x[:, 0], offsets, torch.randn(2, 4, 3), 2)
    assert attention.dtype is product.dtype is torch.bfloat16


def test_bad_inputs_are_named() -> None:
    values, offsets = torch.zeros(5, 1, 4), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="offsets end at 5 but there are 4 values"):
        jagged.segment_sum(values[:4], offsets)
    with pytest.raises(ValueError, match="offsets end at 5 but there are 4 values"):
        jagged.padded_to_jagged(torch.zeros(2, 3), offsets, 4)
    with pytest.raises(ValueError, match="offsets end at 6 but there are 5 values"):
        jagged.jagged_index_select(values, offsets, torch.tensor([1, 1]), total=5)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_length=2"):
        jagged.jagged_dense_bmm(values[:, 0], offsets, torch.zeros(2, 4, 4), 2)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_k=2"):
        jagged.jagged_attention(values, values, values, offsets, offsets, max_q=3, max_k=2)
    with pytest.raises(ValueError, match=r"expected q \[Nq, H, d\]"):
        jagged.jagged_attention(values, values.repeat(1, 2, 1), values, offsets, offsets, max_q=3, max_k=3)
    with pytest.raises(ValueError, match="a has 2 rows and b has 1"):
        jagged.jagged_concat(values, offsets, values, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="keep must be 'first' or 'last', got 'middle'"):
        jagged.jagged_to_padded(values, offsets, 3, keep="middle")


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3)])
@pytest.mark.parametrize("lengths", [[0, 300, 1, 128, 0], [5], [64, 64], [0, 0]])
def test_varlen_matches_the_oracle(lengths: list[int], causal: bool, window: int | None) -> None:
    offsets = offsets_of(lengths).cuda()
    q, k, v = (random(sum(lengths), heads, 64).bfloat16().cuda() for heads in (4, 2, 2))

    def attend(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: jagged.jagged_attention(
            q, k, v, offsets, offsets, max_q=320, max_k=320, causal=causal, window=window, backend=backend
        )

    with poisoned_empty():
        check_gradients(
            attend("varlen"),
            attend("reference"),
            {"q": q, "k": k, "v": v},
            Tolerance("probabilities and result are rounded; sums over 300 keys", roundings=2, reduction=300),
            GRADIENTS,
        )


@pytest.mark.gpu
def test_varlen_with_rows_that_lack_queries_or_keys() -> None:
    q_offsets, k_offsets = offsets_of([3, 0, 130, 2]).cuda(), offsets_of([0, 5, 40, 0]).cuda()
    q, k, v = (random(n, 2, 32).bfloat16().cuda() for n in (135, 45, 45))

    def attend(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: jagged.jagged_attention(
            q, k, v, q_offsets, k_offsets, max_q=256, max_k=64, backend=backend
        )

    with poisoned_empty():
        check_gradients(
            attend("varlen"),
            attend("reference"),
            {"q": q, "k": k, "v": v},
            Tolerance("probabilities and result are rounded; sums over 130 rows", roundings=2, reduction=130),
            GRADIENTS,
        )
