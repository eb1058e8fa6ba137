"""`jagged_attention` on the CPU: the reference against loops over rows, arguments, registration of operators."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import jagged_attention, padded, time_bucket
from kernels.attention.bias import Bias, position_index
from kernels.attention.operator import attention_operator
from kernels.core import dispatch
from kernels.core.mask import NO_MASK, Mask, checked_mask
from kernels.core.rows import Rows, place_in_row
from kernels.gdpa import gdpa
from kernels.testing import check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import (
    EXACT,
    EXACT_GRADIENTS,
    STRUCTURES,
    gradients,
    inputs_of,
    oracle,
    outputs,
    with_lse,
    with_targets,
)
from tests.kernels.jagged.jagged_problems import offsets_of


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4),
    causal=st.booleans(),
    window=st.sampled_from([None, 0, 1, (1, None), (None, 0), (2, 1)]),
    block_size=st.sampled_from([None, None, 2]),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    reach=st.sampled_from([None, 0, 2]),
    buckets=st.sampled_from([None, 1, 30]),
    slack=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_reference(
    pairs: list[tuple[int, int]],
    causal: bool,
    window: Any,
    block_size: int | None,
    heads: tuple[int, int],
    reach: int | None,
    buckets: int | None,
    slack: int,
) -> None:
    q_offsets, k_offsets = offsets_of([q for q, _ in pairs]), offsets_of([k for _, k in pairs], torch.int32)
    max_q, max_k = (max((pair[side] for pair in pairs), default=0) + slack for side in (0, 1))
    arguments = {"scale": 0.7, "causal": causal, "window": window, "block_size": block_size}
    offsets = {"q_offsets": q_offsets, "k_offsets": k_offsets}

    def with_tables(attend: Any) -> Any:
        # Tables whose entries all pairs share have a gradient of zero but for roundings: add one to compare it with.
        def total(**inputs: Any) -> Tensor:
            tables = [inputs[name] for name in ("position_bias", "time_bias") if name in inputs]
            return attend(**inputs) + sum(table.sum() for table in tables)

        return total

    check_gradients(
        with_tables(partial(jagged_attention, max_q=max_q, max_k=max_k, **offsets, **arguments)),
        with_tables(partial(oracle, **offsets, **arguments)),
        inputs_of(q_offsets, k_offsets, heads, (3, 2), reach=reach, buckets=buckets),
        EXACT,
        EXACT_GRADIENTS,
    )


LENGTHS = [([5, 0, 3, 7, 1], [5, 0, 3, 7, 1]), ([2, 4, 0, 9, 1], [5, 2, 3, 7, 0])]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", STRUCTURES)
def test_rows_of_several_kinds_of_tokens(name: str, lengths: tuple[list[int], list[int]]) -> None:
    offsets = {"q_offsets": offsets_of(lengths[0]), "k_offsets": offsets_of(lengths[1])}
    call = offsets | with_targets(STRUCTURES[name], offsets["k_offsets"])
    for reach in (None, 2):
        check_gradients(
            partial(jagged_attention, max_q=9, max_k=9, **call),
            partial(oracle, **call),
            inputs_of(**offsets, heads=(2, 1), widths=(3, 2), reach=reach),
            EXACT,
            EXACT_GRADIENTS,
        )


def test_arguments_of_structure_are_checked() -> None:
    x, offsets, targets = torch.zeros(5, 1, 4), torch.tensor([0, 2, 5]), torch.tensor([1, 3])
    for attend in (jagged_attention, partial(gdpa, score_scale=1.0)):
        call = partial(attend, x, x, x, offsets, offsets, max_q=3, max_k=3)
        for arguments, message in (
            ({"align": "right"}, "align='right' must be 'start' or 'end'"),
            ({"prefix": -1}, "prefix=-1 must be a number of a row's first tokens"),
            ({"contextual": -2}, "contextual=-2 must be"),
            ({"target_window": 3}, "target_window=3 must be at least 0 or None, and needs num_targets"),
            ({"num_targets": targets[:1]}, r"num_targets must be \[2\] int32 or int64"),
            ({"num_targets": targets.float()}, "got \\(2,\\) torch.float32"),
            ({"num_targets": targets + 1}, "num_targets must be from 0 to the number of keys"),
            ({"num_targets": -targets}, "num_targets must be from 0 to the number of keys"),
        ):
            with pytest.raises(ValueError, match=message):
                call(**arguments)
        nothing = call(contextual=0, prefix=2, align="end")
        assert torch.equal(nothing, call())
    with pytest.raises(ValueError, match="block_size is not served with num_targets"):
        jagged_attention(x, x, x, offsets, offsets, max_q=3, max_k=3, block_size=2, num_targets=targets)
    with pytest.raises(ValueError, match="kv_index with targets"):
        gdpa(x, x, x, offsets, offsets, max_q=5, max_k=3, score_scale=1.0, kv_index=torch.tensor([0, 1]), contextual=1)


@pytest.mark.parametrize("biased", [False, True])
def test_query_without_keys_gives_zeros_and_zero_gradients(biased: bool) -> None:
    q_offsets, k_offsets = torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1])
    inputs = inputs_of(q_offsets, k_offsets, (2, 2), (4, 4), reach=1 if biased else None)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    # Row 0 has no keys; in row 1 the window hides the only key from queries 1 and 2.
    with poisoned_empty():
        out = jagged_attention(**inputs, q_offsets=q_offsets, k_offsets=k_offsets, max_q=3, max_k=4, window=0)
        grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves)
    blind = [0, 1, 3, 4]
    assert (out[blind] == 0).all()
    assert torch.equal(out[[2]], inputs["v"])
    assert (grads[0][blind] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_scale_defaults_to_head_dimension() -> None:
    offsets = torch.tensor([0, 3])
    inputs = inputs_of(offsets, offsets, widths=(5, 5))
    attend = partial(jagged_attention, **inputs, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3)
    assert torch.equal(attend(scale=1 / math.sqrt(5)), attend())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_training_dtypes(dtype: torch.dtype, biased: bool) -> None:
    offsets = {"q_offsets": offsets_of([0, 7, 1, 20]), "k_offsets": offsets_of([0, 7, 1, 20])}
    check_gradients(
        partial(jagged_attention, max_q=20, max_k=20, **offsets),
        partial(oracle, **offsets),
        inputs_of(**offsets, heads=(2, 2), widths=(8, 8), dtype=dtype, reach=5 if biased else None),
        outputs(20),
        gradients(300),
    )


def test_non_contiguous_inputs() -> None:
    offsets = offsets_of([2, 0, 3])
    # [N, q k v interleaved after the head, ...]: views with strides of their own.
    packed = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    q, k, v = packed.unbind(2)
    assert not q.is_contiguous()
    attend = partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3)
    assert torch.equal(attend(q, k, v), attend(q.contiguous(), k.contiguous(), v.contiguous()))


def test_gradcheck_of_the_tables() -> None:
    offsets = torch.tensor([0, 3, 4, 6])
    inputs = inputs_of(offsets, offsets, (2, 1), (3, 3), reach=1, buckets=20)
    tables = [inputs.pop(name).requires_grad_() for name in ("position_bias", "time_bias")]
    attend = partial(jagged_attention, **inputs, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3)
    assert torch.autograd.gradcheck(lambda p, t: attend(position_bias=p, time_bias=t), tables)


def test_time_buckets() -> None:
    seconds = torch.tensor([0, 1, -1, 2, 3, 60, -3600, 86400, 2**31, 2**40, -(2**62)])
    expected = [0, 0, 0, 2, 3, 13, 27, 37, 71, 71, 71]
    assert time_bucket(seconds, 128, 0.301).tolist() == expected
    assert time_bucket(seconds, 20, 0.301).tolist() == [min(bucket, 19) for bucket in expected]
    assert time_bucket(seconds, 1, 0.301).tolist() == [0] * len(expected)
    many = torch.arange(1, 100_000)
    assert torch.equal(time_bucket(many, 500, 0.0713), (many.double().log() / 0.0713).floor().long())


def test_autocast_gives_its_dtype() -> None:
    offsets = offsets_of([2, 1])
    x, table = torch.randn(3, 2, 4), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        for bias in (None, table):
            out = jagged_attention(x, x.bfloat16(), x, offsets, offsets, max_q=2, max_k=2, position_bias=bias)
            assert out.dtype is torch.bfloat16


def test_bad_inputs_are_named() -> None:
    x, offsets = torch.zeros(5, 1, 4), torch.tensor([0, 2, 5])
    attend = partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_k=2"):
        jagged_attention(x, x, x, offsets, offsets, max_q=3, max_k=2)
    for q, k in ((x, x.repeat(1, 2, 1)), (x[:, 0], x), (x, x[:, 0])):
        with pytest.raises(ValueError, match=r"expected q \[Nq, H, d\]"):
            attend(q, k, x)
    with pytest.raises(ValueError, match="H a multiple of Hkv"):
        attend(x, x[:, :0], x[:, :0])
    with pytest.raises(ValueError, match="must have one dtype"):
        attend(x, x.double(), x.double())
    with pytest.raises(ValueError, match=r"window=-2 must be w or \(left, right\)"):
        attend(x, x, x, window=-2)
    with pytest.raises(ValueError, match=r"position_bias must be \[1, 2 P \+ 1\], got \(1, 2\)"):
        attend(x, x, x, position_bias=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"time_bias must be \[1, T\] with T at least 1, got \(2, 3\)"):
        attend(x, x, x, time_bias=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"needs integer k_times \[5\], got none"):
        attend(x, x, x, time_bias=torch.zeros(1, 3), q_times=torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("tables", "features", "beside"), [(True, True, with_lse), (False, True, partial), (False, False, with_lse)]
)
def test_operator_is_registered_soundly(tables: bool, features: bool, beside: Any) -> None:
    """`opcheck` of an operator around plain formulas: schema, fake tensors, autograd, compilation."""
    sinks = beside is with_lse
    name = f"test_{'biased' if tables else 'featured' if features else 'plain'}"
    attend = attention_operator(name, _forward, _backward, features=features)
    offsets = torch.tensor([0, 3, 4, 6])
    inputs = inputs_of(
        offsets,
        offsets,
        *((2, 1), (4, 3), torch.float32),
        reach=1 if tables else None,
        buckets=9 if tables else None,
        sinks=sinks,
    )
    leaves = {key: value.requires_grad_() if value.is_floating_point() else value for key, value in inputs.items()}
    bias = [leaves.get(key) for key in ("position_bias", "time_bias", "q_times", "k_times")]
    operator = getattr(torch.ops.gemsmith, f"jagged_attention_{name}").default
    values, sizes = [leaves[key] for key in "qkv"], (3, 3, 0.5, False, -1, -1)
    given = (*bias, None, 0.301, 0, 0, -1, False, *sizes, None) if features else sizes
    torch.library.opcheck(operator, (*values, offsets, offsets, *given, leaves.get("sinks")))
    call = partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3, scale=0.5)
    expected = beside(call)(**leaves)
    own = ({"bias": Bias(*bias)} if tables else {}) | ({"sinks": leaves["sinks"]} if sinks else {})
    actual = beside(partial(attend, *values, Rows(offsets, 3), Rows(offsets, 3), 0.5, NO_MASK, **own))()
    differentiated = [value for value in leaves.values() if value.requires_grad]
    torch.testing.assert_close(actual, expected)
    for loss in (lambda x: x.square().sum(), lambda x: x[:, :, -1].sum(), lambda x: x[:, :, :-1].sum()):
        found, wanted = (torch.autograd.grad(loss(x), differentiated, retain_graph=True) for x in (actual, expected))
        torch.testing.assert_close(found, wanted)


def _scores(q: Tensor, k: Tensor, q_offsets: Tensor, scale: float, bias: Bias | None = None) -> tuple[Tensor, ...]:
    """Scores [H, Nq, Nk] of one key head and the table columns that they read; only for equal offsets."""
    row, place = place_in_row(q_offsets, len(q))
    scores = torch.einsum("ihd,jd->hij", q, k[:, 0]) * scale
    index = []
    if bias is not None:
        index.append(position_index(place[:, None], place[None, :], bias.position.shape[1]))
        gap = bias.q_times[:, None] - bias.k_times[None, :]
        index.append(time_bucket(gap, bias.time.shape[1], bias.bucket_width))
        scores = scores + bias.position[:, index[0]] + bias.time[:, index[1]]
    return scores.masked_fill(row[:, None] != row[None, :], -torch.inf), *index


def _forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Rows, keys: Rows, scale: float, mask: Mask, *features: Any
) -> tuple[Tensor, Tensor]:
    scores, *_ = _scores(q, k, queries.offsets, scale, *features[:1])
    out = torch.einsum("hij,jd->ihd", scores.softmax(-1), v[:, 0])
    return out.contiguous(), scores.logsumexp(-1).float()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    bias: Bias | None = None,
    structure: object = None,
) -> tuple[Tensor, ...]:
    scores, *index = _scores(q, k, queries.offsets, scale, bias)
    p = (scores - lse[:, :, None]).exp()
    ds = p * (torch.einsum("ihd,jd->hij", grad, v[:, 0]) - (grad * out).sum(-1).t()[:, :, None])
    gradients = (
        torch.einsum("hij,jd->ihd", ds, k[:, 0]) * scale,
        torch.einsum("hij,ihd->jd", ds, q)[:, None] * scale,
        torch.einsum("hij,ihd->jd", p, grad)[:, None],
    )
    if bias is None:
        return gradients
    tables = (
        torch.zeros_like(table).index_add_(1, columns.flatten(), ds.flatten(1))
        for table, columns in zip((bias.position, bias.time), index, strict=True)
    )
    return *gradients, *tables


@pytest.mark.parametrize("dtype", dispatch.HALF)
def test_half_precision_on_a_cpu_is_float32_rounded_once(dtype: torch.dtype) -> None:
    """PyTorch's own backward in half precision took five times as long as in float32: bf16 trained slower than fp32."""
    offsets = offsets_of([3, 0, 5])

    def attended(compute: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v, grad = (torch.randn(8, 2, 4).to(dtype).to(compute) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype, enabled=compute is dtype):
            out = jagged_attention(q, k, v, offsets, offsets, max_q=5, max_k=5, causal=True)
        return [x.to(dtype) for x in (out, *torch.autograd.grad(out, inputs, grad))]

    for half, rounded in zip(attended(dtype), attended(torch.float32), strict=True):
        assert half.equal(rounded)


@pytest.mark.parametrize("arguments", [{}, {"window": (1, 0)}, {"window": 2}, {"causal": True}])
def test_padded_equals_the_reference(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled. Rows of padding must give no NaN, which gradients of the others would take over."""
    monkeypatch.setattr(padded, "compiled", lambda function: function)
    offsets, mask = offsets_of([3, 0, 5]), checked_mask(**arguments)
    inputs = [torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rows = Rows(offsets, 6)
    out = padded.jagged_attention(*inputs, rows, rows, 0.5, mask)
    expected = jagged_attention(
        *inputs, offsets, offsets, max_q=6, max_k=6, scale=0.5, backend="reference", **arguments
    )
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected)))
