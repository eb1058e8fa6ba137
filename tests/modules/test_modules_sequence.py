"""Attention, pooling, MaskNet and the merge of event types, each against a loop over rows in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from modules.layers.attention.gdpa import GDPASelfAttention
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import rotate, rotation
from modules.layers.attention.target_attention import SelfAndTargetAttention, TargetAttention
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.pooling.pma import PMA
from modules.layers.sequence.history import HistoryEncoder, merge_by_time
from modules.layers.sequence.masknet import MaskNet
from modules.precision import apply_recipe
from tests.modules.factories import random_spec

DIM, HEADS, HEAD_DIM = 8, 2, 4


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return pad(torch.tensor(lengths).cumsum(0), (1, 0))


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax attention of one row: [Tq, H, d], [Tk, H, d] -> [Tq, H * d]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def assert_same_gradients(actual, expected, inputs):
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected)
    pairs = zip(
        torch.autograd.grad(actual, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 0], [6]])
def test_self_attention_matches_attention_row_by_row(lengths, window):
    torch.manual_seed(0)
    attention = JaggedSelfAttention(DIM, HEADS, max_length=6, window=window).double()
    x = torch.randn(sum(lengths), DIM, dtype=torch.float64, requires_grad=True)
    angles = rotation(torch.randint(9, (sum(lengths),)), HEAD_DIM)

    rows, start = [x.new_zeros(0, DIM)], 0
    for n in lengths:
        part, cos, sin = x[start : start + n], angles[0][start : start + n], angles[1][start : start + n]
        q, k, v = attention.query_key_value(part).view(n, 3, HEADS, HEAD_DIM).unbind(1)
        index = torch.arange(n)
        seen = None if window is None else (index[:, None] - index).abs() <= window
        rows.append(attention.output(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, seen)))
        start += n
    actual = attention(x, offsets_of(lengths), angles)
    assert_same_gradients(actual, torch.cat(rows), (x, *attention.parameters()) if sum(lengths) else (x,))


@pytest.mark.parametrize("kind", [JaggedSelfAttention, GDPASelfAttention])
@pytest.mark.parametrize("window", [None, 2])
def test_causal_attention_is_what_the_last_token_of_each_beginning_sees(kind, window):
    torch.manual_seed(0)
    options = {"max_length": 5, "window": window}
    causal, full = kind(DIM, HEADS, causal=True, **options).double(), kind(DIM, HEADS, **options).double()
    full.load_state_dict(causal.state_dict())
    x = torch.randn(7, DIM, dtype=torch.float64)
    out = causal(x, offsets_of([2, 5]))
    for start, end in [(0, 1), (0, 2), (2, 3), (2, 4), (2, 5), (2, 6), (2, 7)]:
        torch.testing.assert_close(out[end - 1], full(x[start:end], offsets_of([end - start]))[-1])


def test_without_rotation_the_order_of_tokens_has_no_effect():
    attention = JaggedSelfAttention(DIM, HEADS, max_length=5).double()
    x, order = torch.randn(5, DIM, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(attention(x[order], offsets_of([5])), attention(x, offsets_of([5]))[order])


def test_heads_may_look_away_to_their_sinks():
    attention = JaggedSelfAttention(DIM, HEADS, max_length=2, sinks=True)
    x = torch.randn(3, DIM)
    # One score beside a sink that is as high.
    attention.query_key_value.weight.data[: 2 * DIM] = 0
    value = attention.query_key_value(x).view(3, 3, DIM)[:, 2]
    torch.testing.assert_close(attention(x, offsets_of([1, 1, 1])), attention.output(value / 2))
    attention(x, offsets_of([1, 2])).square().sum().backward()
    assert attention.sinks.grad.abs().min() > 0


def test_heads_that_do_not_divide_the_width_are_an_error():
    with pytest.raises(ValueError, match=r"dim=12 must be a multiple of 2 \* num_heads=8"):
        JaggedSelfAttention(12, 4, max_length=3)


def activated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, H, d] over [T, H, d], keys and values: SiLU of the scores over a length of 4."""
    weights = torch.nn.functional.silu(torch.einsum("shd,thd->hst", q, k) / 4)
    return torch.einsum("hst,thd->shd", weights, v).flatten(1)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_target_attention_matches_attention_candidate_by_candidate(activation: str | None):
    torch.manual_seed(0)
    candidates, lengths, num_queries = [2, 0, 1, 2], [3, 2, 0, 4], 2
    options = {"max_candidates": 2, "max_length": 4, "activation": activation}
    attention = TargetAttention(DIM, HEADS, num_queries, **options).double()
    one_row = attend if activation is None else activated
    queries = torch.randn(sum(candidates), num_queries, DIM, dtype=torch.float64, requires_grad=True)
    x = torch.randn(sum(lengths), DIM, dtype=torch.float64, requires_grad=True)
    candidate_offsets, offsets = offsets_of(candidates), offsets_of(lengths)

    expected = []
    for candidate in range(sum(candidates)):
        row = int(torch.searchsorted(candidate_offsets, candidate, right=True)) - 1
        events = x[offsets[row] : offsets[row + 1]]
        k, v = attention.key_value(events).view(-1, 2, HEADS, HEAD_DIM).unbind(1)
        q = attention.query(queries[candidate]).view(num_queries, HEADS, HEAD_DIM)
        # A request without events: zeros in, and the output layer has no bias.
        attended = one_row(q, k, v) if len(events) else queries.new_zeros(num_queries, DIM)
        expected.append(attention.output(attended))
    actual = attention(queries, candidate_offsets, x, offsets)
    assert_same_gradients(actual, torch.stack(expected), (queries, x, *attention.parameters()))


def test_self_and_target_attention_are_two_attentions_over_the_same_keys():
    torch.manual_seed(0)
    candidates, lengths = [2, 0, 3], [3, 2, 1]
    both = SelfAndTargetAttention(DIM, HEADS, 2, max_candidates=3, max_length=3).double()
    queries = torch.randn(sum(candidates), 2, DIM, dtype=torch.float64, requires_grad=True)
    x = torch.randn(sum(lengths), DIM, dtype=torch.float64, requires_grad=True)
    candidate_offsets, offsets = offsets_of(candidates), offsets_of(lengths)
    own, target = both(queries, candidate_offsets, x, offsets)
    assert (own.shape, target.shape) == (x.shape, queries.shape)

    expected_own, expected_target = [], []
    for row in range(len(lengths)):
        events = x[offsets[row] : offsets[row + 1]]
        k, v = both.key_value(events).view(-1, 2, HEADS, HEAD_DIM).unbind(1)
        expected_own.append(both.output(attend(both.query(events).view(-1, HEADS, HEAD_DIM), k, v)))
        rows = queries[candidate_offsets[row] : candidate_offsets[row + 1]].flatten(0, 1)
        attended = attend(both.target_query(rows).view(-1, HEADS, HEAD_DIM), k, v)
        expected_target.append(both.target_output(attended))
    actual = torch.cat([own, target.flatten(0, 1)])
    assert_same_gradients(actual, torch.cat(expected_own + expected_target), (queries, x, *both.parameters()))


@pytest.mark.parametrize("kind", [TargetAttention, SelfAndTargetAttention])
def test_candidates_may_be_leaves_of_a_tree(kind):
    torch.manual_seed(0)
    attention = kind(DIM, HEADS, 2, max_candidates=4, max_length=3)
    queries, x, offsets = torch.randn(6, 2, DIM), torch.randn(5, DIM), offsets_of([2, 3])
    vendors, ads = offsets_of([2, 1]), offsets_of([1, 3, 2])  # of users, of vendors
    for actual, expected in zip(
        attention(queries, (vendors, ads), x, offsets), attention(queries, offsets_of([4, 2]), x, offsets), strict=True
    ):
        assert torch.equal(actual, expected)


def test_pma_asks_its_seeds_plus_the_condition_and_an_empty_sequence_gives_zeros():
    torch.manual_seed(0)
    pma = PMA(DIM, HEADS, 3, max_candidates=2, max_length=4).double()
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    candidate_offsets, offsets = offsets_of([1, 2, 1]), offsets_of([4, 0, 0])
    condition = torch.randn(4, 3, DIM, dtype=torch.float64)
    out = pma(condition, candidate_offsets, x, offsets)
    torch.testing.assert_close(out, pma.attention(pma.seeds + condition, candidate_offsets, x, offsets))
    assert (out[1:] == 0).all()
    assert out[0].abs().sum() > 0

    empty = torch.zeros(0, DIM, dtype=torch.float64, requires_grad=True)
    out = pma(condition, candidate_offsets, empty, offsets_of([0, 0, 0]))
    out.sum().backward()
    assert (out == 0).all()
    assert all((p.grad == 0).all() for p in pma.parameters())


def test_masknet_is_the_formula_of_the_paper():
    masknet = MaskNet(num_fields=3, dim=4).double()
    values = torch.randn(5, 12, dtype=torch.float64)
    fields = values.split(4, dim=1)
    s = torch.cat([field / (field.square().mean(1, keepdim=True) + 0.1**2).sqrt() for field in fields], dim=1)
    first, _, _, second = masknet.mask
    mask = second(torch.nn.functional.silu(first(s)))
    torch.testing.assert_close(masknet(values), masknet.output(s * mask))


def sequence(rows: list[list[tuple[int, float]]]) -> JaggedSequence:
    """From rows of (time, value)."""
    flat = [event for row in rows for event in row]
    return JaggedSequence(
        torch.tensor([[value] for _, value in flat]).view(-1, 1),
        offsets_of([len(row) for row in rows]),
        torch.tensor([time for time, _ in flat], dtype=torch.int64),
    )


def test_event_types_merge_along_time_and_ties_keep_their_order():
    # Event types are not aligned with each other (their k-th events are different events), hence a merge by time.
    clicks = sequence([[(1, 1.0), (5, 2.0)], [], [(2**40, 3.0)]])
    views = sequence([[(0, 4.0), (5, 5.0), (9, 6.0)], [(7, 7.0)], [(3, 8.0)]])
    merged = merge_by_time([clicks, views])
    assert merged.offsets.tolist() == [0, 5, 6, 8]
    assert merged.values.flatten().tolist() == [4, 1, 2, 5, 6, 7, 8, 3]
    assert merged.times.tolist() == [0, 1, 5, 5, 9, 7, 3, 2**40]
    assert merge_by_time([clicks]) is clicks


def test_history_encoder_keeps_event_types_apart_until_the_merge():
    spec = random_spec(num_events=2)
    encoder = HistoryEncoder(spec, dim=4)
    clicks = JaggedSequence(torch.randn(2, 8), offsets_of([1, 1]), torch.tensor([5, 5]))
    views = JaggedSequence(torch.randn(3, 8), offsets_of([2, 1]), torch.tensor([4, 6, 4]))
    request = torch.zeros(2, 1, 4)
    values, offsets = encoder(Tokens(request, request, {"event0": clicks, "event1": views}))
    click, view = encoder.masks[0](clicks.values), encoder.masks[1](views.values)
    assert offsets.tolist() == [0, 3, 5]
    torch.testing.assert_close(values, torch.stack([view[0], click[0], view[1], view[2], click[1]]))
    front = torch.randn(2, 2, 4)
    values, offsets = encoder(Tokens(request, request, {"event0": clicks, "event1": views}), front)
    assert offsets.tolist() == [0, 5, 9]
    rows = [*front[0], view[0], click[0], view[1], *front[1], view[2], click[1]]
    torch.testing.assert_close(values, torch.stack(rows))


def test_history_encoder_without_histories_gives_empty_rows():
    tokens = Tokens(torch.zeros(3, 2, 4), torch.zeros(5, 1, 4), {})
    values, offsets = HistoryEncoder(random_spec(num_events=0), 4)(tokens)
    assert values.shape == (0, 4)
    assert offsets.tolist() == [0, 0, 0, 0]
    values, offsets = HistoryEncoder(random_spec(num_events=0), 4)(tokens, torch.ones(3, 2, 4))
    assert torch.equal(values, torch.ones(6, 4))
    assert offsets.tolist() == [0, 2, 4, 6]


def test_history_encoder_puts_tokens_before_the_events_of_one_type():
    encoder = HistoryEncoder(random_spec(num_events=1), dim=4)
    events = JaggedSequence(torch.randn(3, 8), offsets_of([0, 3, 0]), torch.tensor([4, 6, 7]))
    request, front = torch.zeros(3, 1, 4), torch.randn(3, 1, 4)
    values, offsets = encoder(Tokens(request, request, {"event0": events}), front)
    assert offsets.tolist() == [0, 1, 5, 6]
    torch.testing.assert_close(values, torch.cat([front[0], front[1], encoder.masks[0](events.values), front[2]]))


def test_projections_with_a_recipe_of_their_own_run_it():
    both = torch.nn.ModuleDict({"a": SelfAndTargetAttention(64, 2, 2, max_candidates=3, max_length=5)})
    apply_recipe(both, "mxfp8", ["a.target_query"])
    called = []
    both["a"].target_query.register_forward_hook(lambda *_: called.append(True))
    both["a"](torch.randn(3, 2, 64), torch.tensor([0, 3]), torch.randn(5, 64), torch.tensor([0, 5]))
    assert called == [True]
