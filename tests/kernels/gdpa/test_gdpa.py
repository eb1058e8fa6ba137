"""`gdpa` on the CPU: activations, the reference against loops over rows, arguments, registration of operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.core import activations
from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows, place_in_row
from kernels.gdpa import ACTIVATIONS, gdpa, padded, reference
from kernels.gdpa.operator import gdpa_operator
from kernels.testing import check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import STRUCTURES, with_targets
from tests.kernels.attention.test_jagged_attention import LENGTHS
from tests.kernels.gdpa.gdpa_cases import DEFINITIONS, EXACT, EXACT_POLYNOMIAL, gradients, inputs_of, oracle, outputs
from tests.kernels.jagged.jagged_problems import offsets_of
from tools import gelu_plot

# No activation has a corner at any of these, which lie on both sides of every limit.
POINTS = torch.cat([torch.linspace(-12.05, 12.05, 999), torch.tensor([-300.0, -3.7001, 3.6999, 300.0])]).double()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_derivatives(name: str) -> None:
    x = POINTS.clone().requires_grad_()
    value = activations.activate(name, x)
    torch.testing.assert_close(value, DEFINITIONS[name](x), rtol=1e-12, atol=1e-12)
    (by_autograd,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(activations.derivative(name, POINTS), by_autograd, rtol=1e-9, atol=1e-9)
    assert activations.activate(name, torch.zeros(1)).item() == 0.0


def test_derivatives_at_corners_are_those_of_autograd() -> None:
    for name in ("relu", "leaky_relu"):
        x = torch.zeros(1, requires_grad=True)
        (by_autograd,) = torch.autograd.grad(activations.activate(name, x).sum(), x)
        assert torch.equal(activations.derivative(name, x.detach()), by_autograd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polynomial_gelu_is_close_everywhere(dtype: torch.dtype) -> None:
    """Also far outside, where a polynomial without limits explodes: the factor is 0 or 1 but for roundings."""
    far = torch.tensor([-1e4, -50.0, 50.0, 1e4], dtype=dtype)
    for x in (POINTS.to(dtype), far):
        value, slope = activations.activate("gelu_poly", x), activations.derivative("gelu_poly", x)
        allowed = 5.5e-4 + 1e-6 * x.abs()
        assert ((value - activations.activate("gelu", x)).abs() <= allowed).all()
        assert ((slope - activations.derivative("gelu", x)).abs() <= 5.1e-3).all()


def test_errors_are_plotted(tmp_path: Path) -> None:
    gelu_plot.main(str(tmp_path / "errors.png"))
    assert (tmp_path / "errors.png").stat().st_size > 10_000


def test_gelu_through_one_tanh() -> None:
    square = POINTS.square().clamp(max=activations.GELU_AS_TANH_LIMIT)
    first, second, third = activations.GELU_AS_TANH
    value = POINTS * (0.5 + 0.5 * torch.tanh(POINTS * (first + square * (second + square * third))))
    assert ((value - activations.activate("gelu", POINTS)).abs() <= 2.6e-5).all()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4),
    window=st.sampled_from([(-1, -1), (0, 0), (1, -1), (-1, 0), (2, 1)]),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    names=st.lists(st.sampled_from(ACTIVATIONS), min_size=4, max_size=4),
    slack=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_reference(
    pairs: list[tuple[int, int]], window: tuple[int, int], heads: tuple[int, int], names: list[str], slack: int
) -> None:
    q_offsets, k_offsets = offsets_of([q for q, _ in pairs]), offsets_of([k for _, k in pairs], torch.int32)
    max_q, max_k = (max((pair[side] for pair in pairs), default=0) + slack for side in (0, 1))
    arguments: dict[str, Any] = {"q_offsets": q_offsets, "k_offsets": k_offsets, "score_scale": 0.7, "out_scale": -0.3}
    arguments |= {"window": window, "activation": names[: heads[0]]}
    check_gradients(
        partial(gdpa, max_q=max_q, max_k=max_k, **arguments),
        partial(oracle, **arguments),
        inputs_of(q_offsets, k_offsets, heads, (3, 2)),
        EXACT_POLYNOMIAL if "gelu_poly" in arguments["activation"] else EXACT,
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_rows_of_several_kinds_of_tokens(name: str) -> None:
    for lengths in LENGTHS:
        offsets = {"q_offsets": offsets_of(lengths[0]), "k_offsets": offsets_of(lengths[1])}
        call: dict[str, Any] = offsets | with_targets(STRUCTURES[name], offsets["k_offsets"]) | {"score_scale": 0.7}
        inputs = inputs_of(**offsets, heads=(2, 1), widths=(3, 2))
        check_gradients(partial(gdpa, max_q=9, max_k=9, **call), partial(oracle, **call), inputs, EXACT)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_dtypes(name: str, dtype: torch.dtype) -> None:
    offsets = {"q_offsets": offsets_of([0, 7, 1, 20]), "k_offsets": offsets_of([4, 7, 0, 20])}
    arguments: dict[str, Any] = {**offsets, "activation": name, "score_scale": 0.2, "out_scale": 0.5}
    # The reference rounds scores to their dtype, which kinks and powers answer with errors of that size.
    check_gradients(
        partial(gdpa, max_q=20, max_k=20, **arguments),
        partial(oracle, **arguments),
        inputs_of(**offsets, heads=(2, 2), widths=(8, 8), dtype=dtype),
        outputs(20),
        gradients(300),
    )


def test_padded_is_the_reference_between_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the compiler, which is asked for on GPUs only."""
    monkeypatch.setattr(padded, "compiled", lambda function: function)
    offsets = {"q_offsets": offsets_of([0, 7, 1, 4]), "k_offsets": offsets_of([4, 5, 0, 6])}
    inputs = inputs_of(**offsets, heads=(4, 2), widths=(8, 6))
    rows = Rows(offsets["q_offsets"], 7), Rows(offsets["k_offsets"], 8)
    arguments = *inputs.values(), *rows, ("silu", "gelu", "relu", "gelu"), 0.2, 0.5, Mask(False, 2, 1)
    assert torch.equal(padded.gdpa(*arguments), reference.gdpa(*arguments))


@pytest.mark.parametrize("operator", [partial(gdpa, score_scale=0.3), jagged_attention])
@pytest.mark.parametrize(
    ("window", "sides"), [(2, (2, 2)), ((None, 1), (-1, 1)), (None, (-1, -1)), (-1, (None, None))], ids=str
)
def test_a_window_is_written_alike_for_gdpa_and_attention(
    operator: Callable[..., Tensor], window: Any, sides: Any
) -> None:
    offsets = torch.tensor([0, 3, 9])
    inputs = inputs_of(offsets, offsets, (2, 2), (4, 4))
    attend = partial(operator, **inputs, q_offsets=offsets, k_offsets=offsets, max_q=6, max_k=6)
    assert torch.equal(attend(window=window), attend(window=sides))


def test_rows_without_keys_or_queries_give_zeros() -> None:
    q_offsets, k_offsets = torch.tensor([0, 2, 5, 5]), torch.tensor([0, 0, 1, 4])
    inputs = inputs_of(q_offsets, k_offsets, (2, 2), (4, 4))
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    with poisoned_empty():
        out = gdpa(**inputs, q_offsets=q_offsets, k_offsets=k_offsets, max_q=3, max_k=4, score_scale=1.0, window=(0, 0))
        grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves)
    # Row 0 has no keys; in row 1 the window hides the only key from queries 1 and 2; row 2 has no queries.
    blind = [0, 1, 3, 4]
    assert (out[blind] == 0).all()
    assert (grads[0][blind] == 0).all()
    assert (out[2] != 0).all()
    assert all((grad[1:] == 0).all() for grad in grads[1:])


def test_dense_keys_and_values() -> None:
    q_offsets = offsets_of([3, 0, 5])
    # [B, Lk, k v interleaved, H, d]: what a projection of dense tokens gives.
    packed = torch.randn(3, 4, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    q = torch.randn(8, 2, 6, dtype=torch.float64)
    k, v = packed.unbind(2)
    assert k.flatten(0, 1).data_ptr() == packed.data_ptr(), "the inputs should be read where they are"
    call = partial(gdpa, q, max_q=5, max_k=4, score_scale=0.3)
    dense = call(k, v, q_offsets, None)
    jagged = call(k.flatten(0, 1), v.flatten(0, 1), q_offsets, torch.arange(4) * 4)
    assert torch.equal(dense, jagged)
    assert torch.equal(*(torch.autograd.grad(out.sum(), packed)[0] for out in (dense, jagged)))


def test_queries_that_all_rows_share() -> None:
    k_offsets = offsets_of([3, 0, 5])
    inputs = inputs_of(torch.tensor([0, 2]), k_offsets, (2, 1), (4, 3))
    tiled = offsets_of([2, 2, 2])

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(q, k, v, None, k_offsets, max_q=2, max_k=5, score_scale=0.5)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle(q.repeat(3, 1, 1), k, v, q_offsets=tiled, k_offsets=k_offsets, score_scale=0.5)

    check_gradients(shared, repeated, inputs, EXACT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_many_rows_of_queries_share_keys(dtype: torch.dtype) -> None:
    q_lengths, k_lengths, index = [2, 0, 3, 1, 2], [4, 3, 0, 5, 2], [0, 0, 1, 3, 3]
    q_offsets, k_offsets = offsets_of(q_lengths), offsets_of(k_lengths, dtype)

    def indexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv_index = torch.tensor(index, dtype=dtype)
        return gdpa(q, k, v, q_offsets, k_offsets, max_q=4, max_k=5, score_scale=0.5, kv_index=kv_index)

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [list(range(int(k_offsets[r]), int(k_offsets[r + 1]))) for r in index]
        where = [position for row in rows for position in row]
        own = offsets_of([len(row) for row in rows])
        return oracle(q, k[where], v[where], q_offsets=q_offsets, k_offsets=own, score_scale=0.5)

    check_gradients(indexed, copied, inputs_of(q_offsets, k_offsets, (2, 1), (4, 3)), EXACT)


def test_shared_queries_and_shared_keys_at_once() -> None:
    k_offsets, index = offsets_of([4, 3]), torch.tensor([0, 0, 1])
    inputs = inputs_of(torch.tensor([0, 2]), k_offsets, (1, 1), (4, 4))
    call = partial(gdpa, **inputs, max_q=4, max_k=4, score_scale=0.5)
    out = call(q_offsets=None, k_offsets=k_offsets, kv_index=index)
    apart = call(q_offsets=None, k_offsets=k_offsets)
    assert torch.equal(out, torch.cat([apart[:2], apart]))


def test_no_index_without_rows() -> None:
    x, none = torch.randn(0, 1, 4), torch.zeros(0, dtype=torch.int64)
    out = gdpa(x, x, x, torch.tensor([0]), torch.tensor([0, 0]), max_q=1, max_k=1, score_scale=1.0, kv_index=none)
    assert out.shape == (0, 1, 4)


def test_scales_are_before_and_after_the_activation() -> None:
    offsets = torch.tensor([0, 1])
    q, k, v = torch.tensor([3.0, 5.0, 1.0]).view(3, 1, 1, 1).unbind(0)
    out = gdpa(q, k, v, offsets, offsets, max_q=1, max_k=1, activation="relu_squared", score_scale=0.2, out_scale=0.5)
    assert math.isclose(out.item(), 0.5 * 3.0**2, rel_tol=1e-6)


def test_non_contiguous_inputs() -> None:
    offsets = offsets_of([2, 0, 3])
    packed = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    q, k, v = packed.unbind(2)
    attend = partial(gdpa, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3, score_scale=0.5)
    assert torch.equal(attend(q, k, v), attend(q.contiguous(), k.contiguous(), v.contiguous()))


def test_autocast_gives_its_dtype() -> None:
    offsets, x = offsets_of([2, 1]), torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = gdpa(x, x.bfloat16(), x, offsets, offsets, max_q=2, max_k=2, score_scale=0.5)
    assert out.dtype is torch.bfloat16


def every_form(x: Tensor, offsets: Tensor, index: Tensor) -> list[Tensor]:
    """x [6, 2, 4] of three rows; jagged, dense, shared queries, an index, per-head activations with a window."""
    attend = partial(gdpa, max_q=6, max_k=6, score_scale=0.5)
    dense = x.view(3, 2, 2, 4)
    return [
        attend(x, x, x, offsets, offsets),
        attend(x, dense, dense, offsets, None, activation=("silu", "gelu_poly"), window=(1, 0)),
        attend(x[:2], x, x, None, offsets),
        attend(x, x, x, offsets, offsets, kv_index=index),
    ]


def test_no_host_sync_forward_or_backward() -> None:
    # Meta tensors have no data: whoever asks for a number of theirs gets an exception.
    x = torch.empty(6, 2, 4, device="meta", requires_grad=True)
    offsets, index = (torch.empty(n, device="meta", dtype=torch.int64) for n in (4, 3))
    torch.stack([out.sum() for out in every_form(x, offsets, index)]).sum().backward()
    assert x.grad is not None


def test_compiles_into_one_graph() -> None:
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    inputs = x, torch.tensor([0, 3, 4, 6]), torch.tensor([0, 1, 1])
    compiled = torch.compile(every_form, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(*inputs), every_form(*inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_bad_inputs_are_named() -> None:
    x, offsets = torch.zeros(5, 1, 4), torch.tensor([0, 2, 5])
    attend = partial(gdpa, max_q=3, max_k=3, score_scale=1.0)
    with pytest.raises(ValueError, match="row 1 has 3 values, more than max_k=2"):
        attend(x, x, x, offsets, offsets, max_k=2)
    with pytest.raises(ValueError, match=r"expected q \[Nq, H, d\], k \[Nk, Hkv, d\]"):
        attend(x, x.repeat(1, 2, 1), x, offsets, offsets)
    with pytest.raises(ValueError, match="H a multiple of Hkv"):
        attend(x, x[:, :0], x[:, :0], offsets, offsets)
    with pytest.raises(ValueError, match=r"expected q \[S, H, d\], k \[B, Lk, Hkv, d\]"):
        attend(x, x, x, None, None)
    with pytest.raises(ValueError, match="q has 2 rows and k has 1"):
        attend(x, x, x, offsets, torch.tensor([0, 5]), max_k=5)
    with pytest.raises(ValueError, match="rows have 5 values, more than max_k=3"):
        attend(x, x[None], x[None], torch.tensor([0, 5]), None)
    with pytest.raises(ValueError, match="must have one dtype"):
        attend(x, x.double(), x.double(), offsets, offsets)
    with pytest.raises(ValueError, match="activation must be one of gelu, .* got 'sigmoid'"):
        attend(x, x, x, offsets, offsets, activation="sigmoid")
    with pytest.raises(ValueError, match="got 2 activations for 1 heads"):
        attend(x, x, x, offsets, offsets, activation=["gelu", "silu"])
    with pytest.raises(ValueError, match=r"window=\(-2, 0\) must be w or \(left, right\)"):
        attend(x, x, x, offsets, offsets, window=(-2, 0))
    with pytest.raises(ValueError, match="kv_index with a window"):
        attend(x, x, x, offsets, offsets, window=(1, 1), kv_index=torch.tensor([0, 1]))
    for wrong in ([1, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="kv_index must not decrease and must name rows 0 to 1"):
            attend(x, x, x, offsets, offsets, max_q=5, kv_index=torch.tensor(wrong))


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    names: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
) -> tuple[Tensor, ...]:
    """The equations of the README over all pairs of one row, without a window."""
    group = q.shape[1] // k.shape[1]
    seen = place_in_row(queries.offsets, len(q))[0][:, None] == place_in_row(keys.offsets, len(k))[0]
    gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
    for head, name in enumerate(names):
        shared = head // group
        scores = score_scale * (q[:, head] @ k[:, shared].T)
        p = activations.activate(name, scores) * out_scale * seen
        ds = grad[:, head] @ v[:, shared].T * activations.derivative(name, scores) * out_scale * score_scale * seen
        gradients[0][:, head] = ds @ k[:, shared]
        gradients[1][:, shared] += ds.T @ q[:, head]
        gradients[2][:, shared] += p.T @ grad[:, head]
    return gradients


def test_operator_around_kernels() -> None:
    """Autograd, fake tensors and schemas of what `gdpa_operator` makes, with plain PyTorch as both kernels."""
    attend = gdpa_operator("tested", reference.gdpa, _plain_backward)
    offsets = {"q_offsets": offsets_of([2, 0, 3]), "k_offsets": offsets_of([3, 1, 2])}
    rows = [Rows(own, 3) for own in offsets.values()]
    inputs = inputs_of(**offsets, heads=(2, 1), widths=(4, 3))
    check_gradients(
        lambda q, k, v: attend(q, k, v, *rows, ("silu", "gelu"), 0.5, 2.0, NO_MASK),
        partial(oracle, **offsets, activation=("silu", "gelu"), score_scale=0.5, out_scale=2.0),
        inputs,
        EXACT,
    )
    leaves = [x.requires_grad_() for x in inputs.values()]
    operator = torch.ops.gemsmith.gdpa_tested.default
    torch.library.opcheck(operator, (*leaves, *offsets.values(), 3, 3, [3, 0], 0.5, 2.0, -1, -1))
