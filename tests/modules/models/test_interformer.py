"""The arches of InterFormer against loops, and the points where implementations of it go wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.broadcast import CandidateRows
from modules.layers.attention.rotary import rotation
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.feed_forward.mlp import MLP
from modules.layers.norms import add_rms_norm, rms_norm
from modules.models import build
from modules.models.interformer import InterFormer
from modules.models.interformer.arches import (
    Gating,
    LinearPersonalizedFFN,
    SequenceArch,
    SequenceSummary,
    SequenceTokens,
    Summary,
    places_of_ends,
)
from modules.models.interformer.model import _positions, _prepend
from tests.modules.factories import random_batch, random_spec

DIM = 8


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return pad(torch.tensor(lengths).cumsum(0), (1, 0))


def sequence_tokens(values: torch.Tensor, offsets: torch.Tensor, num_cls: int, num_recent: int) -> SequenceTokens:
    return SequenceTokens(*add_rms_norm(values, None, places_of_ends(offsets, num_cls, num_recent), twice=True))


def interformer(spec, **changes) -> InterFormer:
    torch.manual_seed(0)
    small = {"dim": DIM, "interaction_hidden": [8], "head_hidden": [8]}
    return build(InterFormer.Config(**small, **changes), spec)


def test_gating_is_the_product_with_an_mlp_of_what_is_normalised():
    gating = Gating(DIM).double()
    z = torch.randn(4, 3, DIM, dtype=torch.float64)
    torch.testing.assert_close(gating(z), z * gating.output(gating.hidden(rms_norm(z))))
    assert (gating(torch.zeros(1, DIM, dtype=torch.float64)) == 0).all()  # what a missing recent token stays


def test_gating_starts_by_letting_tokens_pass():
    torch.manual_seed(0)
    z = torch.randn(100, 32)
    assert torch.nn.functional.cosine_similarity(Gating(32)(z), z).min() > 0.8


def test_pffn_is_a_matrix_of_each_row_made_from_its_summary():
    pffn = LinearPersonalizedFFN(3, DIM, max_length=4).double()
    lengths = [2, 0, 4]
    summary = torch.randn(3, 3, DIM, dtype=torch.float64, requires_grad=True)
    values = torch.randn(6, DIM, dtype=torch.float64, requires_grad=True)
    matrices = torch.einsum("bnd,en->bde", summary, pffn.output.weight)
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    expected = torch.einsum("td,tde->te", values, matrices[row])
    actual = pffn(values, offsets_of(lengths), summary)
    torch.testing.assert_close(actual, expected)
    inputs = (summary, values, pffn.output.weight)
    cotangent = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_pffn_calls_a_layer_that_is_not_plain():
    pffn, offsets = LinearPersonalizedFFN(3, DIM, max_length=4), offsets_of([2, 4])
    values, summary = torch.randn(6, DIM), torch.randn(2, 3, DIM)
    expected = pffn(values, offsets, summary)
    pffn.output.register_forward_hook(lambda layer, inputs, out: 2 * out)
    torch.testing.assert_close(pffn(values, offsets, summary), 2 * expected)


def test_pffn_branch_starts_near_the_identity():
    torch.manual_seed(0)
    pffn, values = LinearPersonalizedFFN(4, 64, max_length=50), rms_norm(torch.randn(50, 64))
    out = pffn(values, offsets_of([50]), rms_norm(torch.randn(1, 4, 64)))
    assert 0.02 < out.norm() / values.norm() < 0.3


def test_sequence_summary_is_cls_then_recent_events_without_cls_then_pma():
    torch.manual_seed(0)
    num_cls, num_recent = 2, 3
    cross = SequenceSummary(
        4,
        0,
        SequenceSummary.Config(dim=DIM, num_cls=num_cls, num_pma=1, num_recent=num_recent),
        max_candidates=2,
        max_length=7,
    ).double()
    lengths = [5, 0, 1]
    offsets = offsets_of([n + num_cls for n in lengths])
    values = torch.randn(int(offsets[-1]), DIM, dtype=torch.float64)
    rows = CandidateRows(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 3, 4]))
    x = torch.randn(4, 4, DIM, dtype=torch.float64)
    shared, own = cross(rms_norm(x), None, sequence_tokens(values, offsets, num_cls, num_recent), offsets, rows)

    pooled = cross.pma(cross.condition(rms_norm(x)), rows.offsets, rms_norm(values), offsets)
    torch.testing.assert_close(own, cross.gating(pooled))
    expected = []
    for row in range(3):
        tokens = values[offsets[row] : offsets[row + 1]]
        cls, events = tokens[:num_cls], tokens[num_cls:]
        recent = torch.zeros(num_recent, DIM, dtype=torch.float64)
        if len(events):
            kept = events[-num_recent:]
            recent[num_recent - len(kept) :] = kept  # right-aligned: the newest event has a slot of its own
        expected.append(cross.gating(torch.cat([cls, recent])))
    torch.testing.assert_close(shared, torch.stack(expected))
    assert shared.shape[1] + own.shape[1] == num_cls + 1 + num_recent


def test_first_layer_condition_splits_into_request_and_candidate():
    cross = SequenceSummary(
        3,
        2,
        SequenceSummary.Config(dim=DIM, num_cls=1, num_pma=2, num_recent=1),
        max_candidates=2,
        max_length=3,
    ).double()
    rows = CandidateRows(torch.tensor([0, 0, 1]), torch.tensor([0, 2, 3]))
    request, candidate = torch.randn(2, 2, DIM).double(), torch.randn(3, 3, DIM).double()
    values, offsets = torch.randn(4, DIM).double(), offsets_of([3, 1])
    each = CandidateRows.identity(3, candidate.device)
    shared, own = cross(candidate, request, sequence_tokens(values, offsets, 1, 1), offsets, rows)
    values, offsets = values[[0, 1, 2, 0, 1, 2, 3]], offsets_of([3, 3, 1])
    expanded = cross(candidate, request[rows.owner], sequence_tokens(values, offsets, 1, 1), offsets, each)
    torch.testing.assert_close((shared[rows.owner], own), expanded)


def test_summary_mixes_tokens_then_gates():
    summary = Summary(3, SequenceSummary.Config(dim=DIM, num_cls=2)).double()
    tokens = torch.randn(4, 3, DIM, dtype=torch.float64)
    torch.testing.assert_close(summary(tokens), summary.gating(summary.lce(tokens)))


def test_cls_tokens_come_first_and_have_no_position():
    summary, values = torch.arange(6.0).view(3, 2, 1), torch.arange(10.0, 14.0).view(4, 1)
    values, offsets = _prepend(summary, values, offsets_of([3, 0, 1]))
    assert values.flatten().tolist() == [0, 1, 10, 11, 12, 2, 3, 4, 5, 13]
    assert offsets.tolist() == [0, 5, 7, 10]
    assert _positions(offsets, 2, 10).tolist() == [0, 0, 3, 2, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("flow", ["both", "s2n", "n2s", "none"])
@pytest.mark.parametrize("context", ["request", "candidate"])
def test_information_flows_between_the_arches_as_the_key_says(flow, context):
    """What an arch of the second layer reads depends on what the other one was given in the first."""
    spec = random_spec()
    model = interformer(spec, information_flow=flow, sequence_context=context).eval()
    embedding, batch = FeatureEmbedding(spec, DIM, device="cpu"), random_batch(spec, (2, 3), (3, 4))
    made = {}
    model.layers[1].interaction.register_forward_hook(lambda *call: made.update(features=call[2]))
    model.layers[1].sequence.register_forward_hook(lambda *call: made.update(sequence=call[2].values))

    def results(change):
        tokens = embedding(batch)
        if change == "sequence":
            tokens = dataclasses.replace(
                tokens, histories={k: dataclasses.replace(h, values=-h.values) for k, h in tokens.histories.items()}
            )
        elif change == "features":
            tokens = dataclasses.replace(tokens, request=-tokens.request, candidate=-tokens.candidate)
        model(tokens, batch)
        return dict(made)

    before = results("nothing")
    assert torch.equal(results("sequence")["features"], before["features"]) == (flow in ("n2s", "none"))
    assert torch.equal(results("features")["sequence"], before["sequence"]) == (flow in ("s2n", "none"))


@pytest.mark.parametrize(
    ("changes", "gone", "there"),
    [
        ({"information_flow": "s2n"}, "layers.0.summary.lce", "layers.0.summary.tokens"),
        ({"information_flow": "n2s"}, "layers.0.cross", "layers.0.summary.lce"),
        ({"information_flow": "none"}, "layers.0.cross", "layers.0.summary.tokens"),
        ({"interaction": "dot"}, "dhen.0.down", "dot.0.dot_hidden"),
        ({"interaction": "dcnv2"}, "dhen.0.dot_hidden", "dcnv2.0.down"),
        ({"interaction": "wukong"}, "dhen", "wukong.0.fmb"),
        ({"jagged_interaction": True}, None, "interaction.targets"),
    ],
    ids=str,
)
def test_an_ablation_is_one_key_that_changes_the_loss(changes, gone, there):
    spec = random_spec()
    batch, losses, names = random_batch(spec, lengths=[6] * 5), [], []
    for each in ({}, changes):
        model, embedding = interformer(spec, **each), FeatureEmbedding(spec, DIM, device="cpu")
        losses.append(binary_cross_entropy_with_logits(model(embedding(batch), batch), batch.labels))
        names.append(" ".join(dict(model.named_parameters())))
    assert (losses[0] - losses[1]).abs() > 1e-4
    assert gone is None or (gone in names[0] and gone not in names[1])
    assert there in names[1]


@pytest.mark.parametrize(("pffn", "attention"), [("linear", "softmax"), ("gdpa", "gdpa")])
def test_sequence_arch_is_pffn_then_attention_then_feed_forward_with_residuals(pffn, attention):
    config = SequenceArch.Config(
        dim=DIM,
        num_cls=2,
        pffn=pffn,
        pffn_hidden=6,
        sequence_attention=attention,
    )
    arch = SequenceArch(config, max_length=4, feed_forward=MLP(DIM, [16], DIM)).double()
    summary, values = torch.randn(2, 2, DIM).double(), torch.randn(6, DIM).double()
    offsets = offsets_of([4, 2])
    angles = rotation(torch.arange(6), DIM // 2)
    s = values + arch.pffn(rms_norm(values), offsets, summary)
    s = s + arch.attention(rms_norm(s), offsets, angles)
    s = s + arch.feed_forward(rms_norm(s))
    for ends in (None, torch.tensor([[5, -1], [0, 3]])):
        out = arch(summary, sequence_tokens(values, offsets, 1, 1), offsets, angles, ends)
        torch.testing.assert_close((out.values, out.normed), (s, rms_norm(s)))
    torch.testing.assert_close(out.ends, torch.stack([s[5], 0 * s[0], s[0], s[3]]).view(2, 2, DIM))


@pytest.mark.parametrize(("context", "expected_rows"), [("request", 2), ("candidate", 5)])
def test_request_context_keeps_the_sequence_at_request_rows(context, expected_rows):
    spec = random_spec()
    model = interformer(spec, sequence_context=context)
    batch = random_batch(spec, (4, 1), (5, 5))
    seen = []
    for layer in model.layers:
        layer.sequence.register_forward_hook(lambda module, args, out: seen.append((len(args[0]), len(out.values))))
    model(FeatureEmbedding(spec, DIM, "cpu")(batch), batch)
    assert seen == [(expected_rows, expected_rows * (2 * 5 + 4))] * 2


def test_the_order_of_old_events_counts():
    spec = random_spec(num_events=1)
    model, embedding, batch = interformer(spec), FeatureEmbedding(spec, DIM, "cpu"), random_batch(spec, (2,), (6,))
    ids = batch.histories.values().clone()
    ids[[0, 1, 6, 7]] = ids[[1, 0, 7, 6]]  # both fields of the two oldest events
    assert not torch.equal(ids, batch.histories.values())
    histories = KeyedJaggedTensor(keys=batch.histories.keys(), values=ids, lengths=batch.histories.lengths())
    swapped = dataclasses.replace(batch, histories=histories)
    assert (model(embedding(swapped), swapped) - model(embedding(batch), batch)).abs().min() > 1e-6


def test_number_of_summary_tokens_is_the_papers():
    model = interformer(random_spec())
    first = model.heads.first[0]
    # CLS of X and PMA of each candidate; CLS and recent events of its request.
    assert (first.own.in_features, first.shared.in_features) == ((4 + 2) * DIM, (4 + 2) * DIM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pffn": "relu"}, "model.pffn=relu is not known; choose from linear, gdpa"),
        ({"pffn": "gpda"}, "model.pffn=gpda is not known; choose from linear, gdpa"),
        ({"sequence_attention": "none"}, "model.sequence_attention=none is not known; choose from softmax, gdpa"),
        ({"feed_forward": "big"}, "model.feed_forward=big is not known; choose from none, dense, moe"),
        ({"sequence_context": "user"}, "model.sequence_context=user is not known; choose from request, candidate"),
        ({"num_pma": 0}, "model.num_pma=0 must be at least 1"),
        ({"layers": [{"num_pma": 0}, {}]}, r"model\.layers\.0\.num_pma=0 must be at least 1"),
        ({"layers": [{"pffn": "mlp"}, {}]}, r"model\.layers\.0\.pffn=mlp is not known; choose from linear, gdpa"),
        (
            {"layers": [{}, {"num_cls": 2}]},
            r"model\.layers\.1\.num_cls is no key of a layer; set model\.num_cls for all",
        ),
        ({"layers": [{}, {"num_heads": 3}]}, r"model\.layers\.1: model\.dim=8 must be a multiple of 2 \* model"),
        ({"num_heads": 3}, r"model.dim=8 must be a multiple of 2 \* model.num_heads=6"),
    ],
)
def test_wrong_fields_are_errors_that_name_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        interformer(random_spec(), **changes)


def test_layers_of_a_list_differ_where_it_says_so():
    layers = [{"sequence_attention": "gdpa", "attention_gdpa": {"activation": "silu"}}, {"feed_forward": "dense"}]
    first, second = (layer.sequence for layer in interformer(random_spec(), layers=layers).layers)
    assert (first.attention.activation, first.feed_forward) == ("silu", None)
    assert not hasattr(second.attention, "activation")
    assert second.feed_forward is not None


def test_more_candidates_than_the_spec_allows_is_an_error():
    spec = random_spec()
    model, batch = interformer(spec), random_batch(spec, (5,), (2,))
    with pytest.raises(ValueError, match="more than max_candidates=4"):
        model(FeatureEmbedding(spec, DIM, "cpu")(batch), batch)
