"""Layers that absorb the projections of keys and values: the same function as with them, and when they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import modules.layers.attention.absorbed
from modules.costs.flops import FlopCounter
from modules.layers.attention.absorbed import AbsorbingAttention
from modules.layers.attention.target_attention import TargetAttention
from modules.layers.pooling.pma import PMA
from modules.layers.pooling.seed_pooling import SeedPooling
from modules.precision import ABSORBED, MXLinear, apply_recipe
from tests.modules.test_modules_sequence import offsets_of

DIM, HEADS = 16, 2
LIMITS = {"max_candidates": 2, "max_length": 64}
CANDIDATES, LENGTHS = [2, 0, 1, 2], [37, 5, 0, 1]


def target(**options: object) -> TargetAttention:
    torch.manual_seed(0)
    return TargetAttention(DIM, HEADS, 2, **LIMITS | options).double()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    queries, values = torch.randn(sum(CANDIDATES), 2, DIM), torch.randn(sum(LENGTHS), DIM)
    return queries.to(dtype).requires_grad_(), values.to(dtype).requires_grad_()


def called(layer: AbsorbingAttention) -> list[bool]:
    """Grows with each call of the projection, which absorbing does without."""
    calls, forward = [], nn.Linear.forward

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self is layer.key_value:
                calls.append(True)
            return forward(self, input)

    nn.Linear.forward = Watched.forward  # type: ignore[method-assign]
    return calls


@pytest.fixture(autouse=True)
def restored() -> object:
    forward = nn.Linear.forward
    yield
    nn.Linear.forward = forward  # type: ignore[method-assign]


def compare(layer: AbsorbingAttention, leaves: tuple[Tensor, ...], call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients with the projections absorbed are those with a projected sequence, to rounding."""
    leaves = (*leaves, *layer.parameters())
    calls = called(layer)
    out = call(layer)
    assert not calls
    cotangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    monkeypatch.setattr(modules.layers.attention.absorbed, "pools", lambda *_: False)
    expected = call(layer)
    assert calls
    for a, b in zip((out, *gradients), (expected, *torch.autograd.grad(expected, leaves, cotangent)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("score_scale", [None, 0.7])
def test_target_attention_is_the_same_function(score_scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, values = inputs()
    offsets = offsets_of(CANDIDATES), offsets_of(LENGTHS)

    def call(layer: AbsorbingAttention) -> Tensor:
        out = layer(queries, offsets[0], values, offsets[1])
        assert not out[2].any()  # its request has no events
        return out

    compare(target(score_scale=score_scale), (queries, values), call, monkeypatch)


def test_candidates_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, values = inputs()
    tree = offsets_of([1, 0, 1, 2]), offsets_of([2, 1, 1, 1])  # vendors of users, ads of vendors
    compare(target(), (queries, values), lambda layer: layer(queries, tree, values, offsets_of(LENGTHS)), monkeypatch)


def test_pooling_of_empty_sequences_is_zeros_with_zero_gradients() -> None:
    pma = PMA(DIM, HEADS, 2, **LIMITS)
    calls = called(pma.attention)
    empty = torch.zeros(0, DIM, requires_grad=True)
    out = pma(torch.randn(3, 2, DIM), offsets_of([1, 2]), empty, offsets_of([0, 0]))
    out.sum().backward()
    assert not calls
    assert not out.any()
    assert not any(parameter.grad.any() for parameter in pma.parameters())


@pytest.mark.parametrize("terms", [0, 2])
def test_seed_pooling_is_the_same_function(terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = SeedPooling(DIM, HEADS, num_seeds=4, num_tokens=4, terms=terms, max_length=64, out_dim=6).double()
    values = inputs()[1]
    compare(layer, (values,), lambda layer: layer(values, offsets_of(LENGTHS)), monkeypatch)


def test_a_projection_that_must_be_called_is() -> None:
    offsets = offsets_of(CANDIDATES), offsets_of(LENGTHS)
    layer, seen = target(), []
    layer.key_value.register_forward_hook(lambda *_: seen.append(True))
    layer(inputs()[0], offsets[0], inputs()[1], offsets[1])
    assert seen == [True]
    biased = target()
    biased.key_value = nn.Linear(DIM, 2 * DIM).double()
    assert not biased.absorbs(inputs()[1])
    assert target().absorbs(inputs()[1])


def test_what_is_cheaper_is_taken() -> None:
    like = torch.empty(0)
    wide = {"max_length": 1000, "num_queries": 2}
    assert TargetAttention(128, 4, max_candidates=4, **wide).absorbs(like)  # 32 rows of queries and heads
    assert not TargetAttention(128, 4, max_candidates=5, **wide).absorbs(like)  # more than a tile of the kernel holds
    assert not target(max_length=4).absorbs(like)
    assert not target(activation="silu", max_length=64).absorbs(like)
    few, offsets = inputs(torch.float32), (offsets_of(CANDIDATES), offsets_of(LENGTHS))
    counts = {}
    for length in (40, 37):
        layer = TargetAttention(DIM, HEADS, 2, max_candidates=2, max_length=length)
        for name in ("absorbed", "projected"):
            with FlopCounter() as counter, pytest.MonkeyPatch.context() as patch:
                if name == "projected":
                    patch.setattr(modules.layers.attention.absorbed, "pools", lambda *_: False)
                layer(few[0], offsets[0], few[1], offsets[1])
            counts[name] = counter.total
    assert counts["absorbed"] < counts["projected"]
    # The projections of queries and results; 2 x (one of keys, one of values); scores and sums of each head.
    pairs = sum(2 * c * n for c, n in zip(CANDIDATES, LENGTHS, strict=True))
    rows, events = 2 * sum(CANDIDATES), sum(LENGTHS)
    ends = 2 * 2 * rows * DIM * DIM
    assert counts["projected"] == ends + 4 * events * DIM * DIM + 4 * pairs * DIM
    assert counts["absorbed"] == ends + 4 * rows * DIM * DIM + 4 * pairs * HEADS * DIM


def test_compiles_into_one_graph_and_exports() -> None:
    layer, (queries, values) = target(), inputs()
    arguments = queries.detach(), offsets_of(CANDIDATES), values.detach(), offsets_of(LENGTHS)
    expected = layer(*arguments)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), expected)
    exported = torch.export.export(layer, arguments).module()
    torch.testing.assert_close(exported(*arguments), expected)


def test_auto_does_not_quantise_what_is_absorbed() -> None:
    pytest.importorskip("triton")
    options = {"max_candidates": 1, "max_length": 1000}

    def model() -> nn.ModuleDict:
        layers = {"few": TargetAttention(1024, 8, 2, **options), "many": TargetAttention(1024, 8, 8, **options)}
        return nn.ModuleDict({"arch": nn.ModuleDict(layers)})

    by_name = model()
    apply_recipe(by_name, "mxfp8_g128", ["*.few.key_value"])
    assert type(by_name["arch"]["few"].key_value) is MXLinear
    assert not by_name["arch"]["few"].absorbs(torch.empty(0))

    rows = {row.name: row for row in apply_recipe(model(), "mxfp8_g128", ["auto"], capability=(9, 0))}
    assert rows["arch.many.key_value"].recipe == "mxfp8_g128"
    assert rows["arch.few.key_value"].recipe == "bf16 autocast"
    assert rows["arch.few.key_value"].note == ABSORBED
