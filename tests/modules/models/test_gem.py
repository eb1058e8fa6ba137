"""The parts that only GEM has: attention between layers, levels of a pyramid, heads of domains."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.batch import FeatureSpec, RequestBatch, SparseFeature
from modules.layers.attention.cross_layer import CrossLayerAttention
from modules.layers.attention.gdpa import PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import from_end, rotation
from modules.layers.attention.target_attention import TargetAttention
from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
from modules.layers.interaction.wukong import WukongConfig
from modules.layers.norms import rms_norm
from modules.layers.sequence.pyramid import PyramidLevel, coarser, pieces
from modules.models import build
from modules.models.gem import GEM
from modules.models.ranking import RankingModel
from tests.modules import padded
from tests.modules.factories import random_batch, random_spec
from train.commands.export import export_arch

DIM = 8
SMALL: dict[str, Any] = {
    "dim": DIM,
    "wukong": WukongConfig(rank=3),
    "interaction_hidden": [16],
    "head_hidden": [16],
    "pffn_hidden": 6,
    "window": 2,
    "levels": [3, 2],
}


def gem(spec: FeatureSpec | None = None, **changes: Any) -> tuple[GEM, FeatureEmbedding]:
    torch.manual_seed(0)
    spec = spec or random_spec()
    model = build(GEM.Config(**SMALL | changes), spec)
    assert isinstance(model, GEM)
    return model, FeatureEmbedding(spec, DIM, "cpu")


def test_a_row_is_cut_into_pieces_of_equal_length() -> None:
    offsets = torch.tensor([0, 7, 7, 9])
    cuts = pieces(offsets, 3)
    assert cuts.tolist() == [0, 2, 4, 7, 7, 7, 7, 7, 8, 9]
    values = torch.arange(9.0)[:, None]
    means, rows = coarser(values, offsets, 3)
    assert means.flatten().tolist() == [0.5, 2.5, 5.0, 0, 0, 0, 0, 7, 8]
    assert rows.tolist() == [0, 3, 6, 9]


def test_empty_pieces_have_no_effect_and_stay_empty() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_context": 2, "hidden": 5, "num_tokens": 2, "max_length": 5, "dropout": 0.0}
    level = PyramidLevel(DIM, 2, window=None, **options).double()
    full = torch.randn(5, DIM, dtype=torch.float64)
    full[[1, 3]] = 0
    context = torch.randn(1, 2, DIM, dtype=torch.float64)
    angles = rotation(torch.arange(5, 0, -1), DIM // 2)
    kept = torch.tensor([0, 2, 4])
    values, _, summary = level(full, torch.tensor([0, 5]), angles, context)
    alone = (angles[0][kept], angles[1][kept])
    expected, _, expected_summary = level(full[kept], torch.tensor([0, 3]), alone, context)
    torch.testing.assert_close(values[kept], expected)
    torch.testing.assert_close(summary, expected_summary)
    assert not values[[1, 3]].any()


def test_cross_layer_attention_is_softmax_attention_of_each_candidate() -> None:
    torch.manual_seed(0)
    module = CrossLayerAttention(DIM, 2).double()
    x, memory = (torch.randn(3, n, DIM, dtype=torch.float64, requires_grad=True) for n in (2, 5))

    def heads(y: Tensor) -> Tensor:
        return y.view(3, -1, 2, DIM // 2).transpose(1, 2)

    q = heads(module.query(x))
    k, v = (heads(each) for each in module.key_value(memory).chunk(2, -1))
    weights = (q @ k.mT / (DIM // 2) ** 0.5).softmax(-1)
    expected = rms_norm(x + module.output((weights @ v).transpose(1, 2).reshape(3, 2, DIM)))
    actual = module(x, memory)
    torch.testing.assert_close(actual, expected)
    inputs, cotangent = (x, memory, *module.parameters()), torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_attends_to_all_earlier_ones() -> None:
    model, embedding = gem(num_layers=3)
    seen: list[int] = []
    for layer in model.layers:
        if layer.cross is not None:
            layer.cross.register_forward_hook(lambda module, args, out: seen.append(args[1].shape[1]))
    batch = random_batch(random_spec())
    model(embedding(batch), batch)
    made = 8 + 8
    assert seen == [made, 2 * made]


def test_coarse_levels_see_what_the_window_of_the_finest_does_not() -> None:
    """Each level's own part: taking one out changes the logits."""
    batch = random_batch(random_spec(), lengths=[6] * 5)
    logits = []
    for levels in ([3, 2], [3], []):
        model, embedding = gem(levels=levels)
        assert len(model.layers[0].levels) == 1 + len(levels)
        logits.append(model(embedding(batch), batch))
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    assert (logits[1] - logits[2]).abs().max() > 1e-4


MIXED: list[dict[str, Any]] = [
    {"num_tokens": 3, "wukong": {"num_fmb": 5}, "num_context": 3, "pffn_gdpa": {"out_scale": 0.5}},
    {"window": 1, "num_target": 1, "wukong": {"rank": 2}, "pffn_hidden": 4},
    {"wukong": {"num_lcb": 3}},
    {},
]


class Padded:
    """Every equation of docs/gem.md on tensors [C, longest, d], a copy of a request's for each candidate."""

    def __init__(self, model: GEM, tokens: Tokens, batch: RequestBatch) -> None:
        self.model, self.tokens, self.owner = model, tokens, batch.owner

    def logits(self) -> Tensor:
        request, x = (padded.norm(each) for each in (self.tokens.request[self.owner], self.tokens.candidate))
        levels = self.levels()
        known: list[Tensor] = []
        earlier: list[Tensor] = []
        x = torch.cat([request, x], 1)
        for layer in self.model.layers:
            assert layer.context is not None
            mixed = padded.weight_of(layer.context) @ torch.cat([request, *known], 1)
            context = padded.norm(mixed)
            queries = layer.seeds + padded.norm(padded.weight_of(layer.queries) @ x)
            known = []
            for index, (level, (s, exists, angles)) in enumerate(zip(layer.levels, levels, strict=True)):
                s, normed, summary = self.level(level, s, exists, angles, context)
                levels[index] = (s, exists, angles)
                known.append(summary)
                if index == 0:
                    target = self.target(layer.target, queries, normed, exists)
            # As the layer has them: tokens of the request, summaries, tokens of the candidate, target.
            num_request = 0 if earlier else request.shape[1]
            x = padded.wukong(layer.wukong, torch.cat([x[:, :num_request], *known, x[:, num_request:], target], 1))
            if layer.cross is not None:
                x = layer.cross(x, torch.cat(earlier, 1))
            earlier.append(x)
        return self.model.heads.shared(x.flatten(1))

    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Values [C, L, d], which of them exist [C, L] and angles, of all events and of each coarser level."""
        assert self.model.history is not None
        values, offsets = self.model.history(self.tokens)
        rows = [values[offsets[row] : offsets[row + 1]] for row in self.owner.tolist()]
        found = [self.padded(rows, 12)]
        for count in self.model.pieces:
            pooled = []
            for events in rows:
                cuts = [index * len(events) // count for index in range(count + 1)]
                means = [events[a:b].sum(0) / max(1, b - a) for a, b in pairwise(cuts)]
                pooled.append(torch.stack(means))
            found.append(self.padded(pooled, count))
        return found

    def padded(self, rows: list[Tensor], longest: int) -> tuple[Tensor, Tensor, Tensor]:
        (head_dim,) = self.model.head_dims
        half = head_dim // 2
        values, exists = torch.zeros(len(rows), longest, DIM), torch.zeros(len(rows), longest, dtype=torch.bool)
        places = torch.zeros(len(rows), longest)
        for index, row in enumerate(rows):
            values[index, : len(row)], exists[index, : len(row)] = row, True
            places[index, : len(row)] = torch.arange(len(row), 0, -1)
        return values, exists, places[..., None] * 10_000.0 ** (-torch.arange(half) / half)

    def level(
        self, level: PyramidLevel, s: Tensor, exists: Tensor, angles: Tensor, context: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        pffn, attention, pooling = level.pffn.attention, level.attention, level.pooling
        assert isinstance(pffn, PersonalizedFFN)
        s = padded.block(pffn, s, context)
        normed = padded.norm(s)
        q, k, v = (padded.heads(each, attention.num_heads) for each in attention.query_key_value(normed).chunk(3, -1))
        if isinstance(attention, JaggedSelfAttention):
            index = torch.arange(s.shape[1])
            assert attention.window is not None
            seen = ((index[:, None] - index).abs() <= attention.window) & exists[:, None, :]
            attended = padded.softmax_attention(padded.turned(q, angles), padded.turned(k, angles), v, seen)
        else:
            attended = padded.gdpa(padded.turned(q, angles), padded.turned(k, angles), v, attention)
        s = s + attention.output(attended) * exists[..., None]
        k, v = (padded.heads(each, pooling.num_heads) for each in pooling.key_value(padded.norm(s)).chunk(2, -1))
        q = padded.heads(pooling.query(pooling.seeds), pooling.num_heads)
        return s, normed, padded.norm(pooling.output(padded.gdpa(q, k, v, pooling)))

    def target(self, target: TargetAttention, queries: Tensor, normed: Tensor, exists: Tensor) -> Tensor:
        k, v = (padded.heads(each, target.num_heads) for each in target.key_value(normed).chunk(2, -1))
        seen = exists[:, None, :].expand(-1, queries.shape[1], -1)
        q = padded.heads(target.query(queries), target.num_heads)
        return padded.norm(target.output(padded.softmax_attention(q, k, v, seen)))


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 3, "levels": [8]}, {"layers": MIXED}], ids=["two", "empty", "own"]
)
def test_equals_the_equations_on_padded_tensors(changes: dict[str, Any]) -> None:
    model, embedding = gem(**changes)
    batch = random_batch(random_spec(), (2, 0, 1, 3, 1))
    tokens = embedding(batch)
    # Float32 sums in another order, on logits near 1.
    torch.testing.assert_close(model(tokens, batch), Padded(model, tokens, batch).logits(), atol=1e-5, rtol=1e-4)


def domains() -> FeatureSpec:
    spec = random_spec()
    return dataclasses.replace(
        spec, tables={**spec.tables, "surface": 4}, request=(*spec.request, SparseFeature("surface", "surface"))
    )


def test_domains_have_heads_of_their_own_on_one_trunk() -> None:
    spec = domains()
    model, embedding = gem(spec, domain_feature="surface")
    batch = random_batch(spec, (2, 1, 1, 2))
    surface = batch.request_sparse["surface"].values()
    surface.copy_(torch.tensor([0, 1, 2, 1]))
    seen: list[Tensor] = []
    model.heads.shared.register_forward_hook(lambda module, args, out: seen.extend([args[0], out]))
    logits = model(embedding(batch), batch)
    x, shared = seen
    assert model.heads.own is not None
    own = model.heads.own(x).view(6, 3, 2)
    torch.testing.assert_close(logits[:2], shared[:2])  # an unknown surface
    torch.testing.assert_close(logits[2], shared[2] + own[2, 0])
    torch.testing.assert_close(logits[3], shared[3] + own[3, 1])
    torch.testing.assert_close(logits[4:], shared[4:] + own[4:, 0])
    logits.square().sum().backward()
    learned = [bool(head.weight.grad.any()) for head in (trunk[-1] for trunk in model.heads.own.trunks)]
    assert learned == [True] * 4 + [False] * 2  # no request of the third surface
    expanded = batch.expand()
    torch.testing.assert_close(model(embedding(expanded), expanded), logits)


def test_domains_score_all_classes_of_a_task() -> None:
    spec = dataclasses.replace(domains(), outputs=(1, 5))
    model, embedding = gem(spec, domain_feature="surface")
    batch = random_batch(spec, (2, 1))
    assert model(embedding(batch), batch).shape == (3, 6)


def test_domains_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="domain_feature='item' is no categorical feature of requests; there are user"):
        gem(domain_feature="item")
    with pytest.raises(ValueError, match=r"domain_feature='user' has 99 values"):
        gem(dataclasses.replace(random_spec(), tables={"user": 100, "item": 30, "tag": 10}), domain_feature="user")
    config = GEM.Config(domain_feature="user")
    assert "model.domain_feature=user" in (config.graphs_refusal() or "")
    assert GEM.Config().graphs_refusal() is None
    model, embedding = gem(domain_feature="user", num_layers=1, levels=[])  # of little to trace
    with pytest.raises(ValueError, match="reads the ids of requests, which traced programs are not given"):
        export_arch(RankingModel(embedding, model), random_batch(random_spec(), (3,), (4,)), torch.float32, 10)


def test_positions_of_coarse_levels_count_pieces_from_the_newest() -> None:
    assert from_end(torch.tensor([0, 3, 6]), 6).tolist() == [3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": [0]}, r"model.levels=\[0\] must be at least 1 each"),
        ({"num_heads": 3}, r"model.dim=8 must be a multiple of 2 \* model.num_heads=6"),
        (
            {"wukong": WukongConfig(rank=0)},
            "model.wukong.rank=0 must be at least 1",
        ),
    ],
)
def test_wrong_fields_are_errors_that_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gem(**changes)
