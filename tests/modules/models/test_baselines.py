"""The token assembly and the baselines against their formulas, one candidate and one id at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import FeatureSpec, RequestBatch, SparseFeature
from modules.config import ModelConfig, from_saved
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.feed_forward.mlp import TaskHeads
from modules.models import baselines, build
from modules.models.baselines import DIN, DLRM, DCNv2
from modules.precision import apply_recipe
from tests.modules.factories import random_batch, random_spec


@dataclasses.dataclass
class CandidateTokens:
    """What a candidate's logits are made of."""

    request: Tensor  # [n_u, d]
    candidate: Tensor  # [n_c, d]
    events: dict[str, Tensor]  # [T, fields, d] of each event type

    def all(self) -> Tensor:
        """[n, d], each history field as one token: the mean over its events."""
        means = [events.sum(0) / max(len(events), 1) for events in self.events.values()]
        return torch.cat([self.request, *means, self.candidate])


def build_model(config: ModelConfig, spec: FeatureSpec) -> tuple[FeatureEmbedding, Any]:
    torch.manual_seed(0)
    return FeatureEmbedding(spec, config.dim, "cpu"), build(config, spec)


def tokens_by_hand(embedding: FeatureEmbedding, spec: FeatureSpec, batch: RequestBatch) -> list[CandidateTokens]:
    tables, assemble = embedding.collection.embeddings, embedding.assemble

    def looked_up(features: KeyedJaggedTensor, key: str, table: str, row: int) -> Tensor:
        ids = features[key].values().split(features[key].lengths().tolist())[row]
        return tables[table].weight[ids]

    def side(
        features: KeyedJaggedTensor, specs: tuple[SparseFeature, ...], row: int, numbers: Tensor, linear: nn.Linear
    ) -> Tensor:
        rows = [looked_up(features, feature.name, feature.table, row) for feature in specs]
        return torch.stack([*(ids.sum(0) / max(len(ids), 1) for ids in rows), linear(numbers[row])])

    result = []
    for c, r in enumerate(batch.owner.tolist()):
        events = {
            event.name: torch.stack(
                [looked_up(batch.histories, event.key(field), field.table, r) for field in event.fields], 1
            )
            for event in spec.histories
        }
        request = side(batch.request_sparse, spec.request, r, batch.request_dense, assemble.request_dense)
        candidate = side(batch.candidate_sparse, spec.candidate, c, batch.candidate_dense, assemble.candidate_dense)
        result.append(CandidateTokens(request, candidate, events))
    return result


def scores(heads: TaskHeads, features: Tensor) -> Tensor:
    """Logits of a head for each task over all features of each candidate, the request's copied to it."""
    pairs = zip(heads.first, heads.trunks, strict=True)
    return torch.cat([trunk(first.own(features)) for first, trunk in pairs], dim=1)


def test_tokens_are_the_looked_up_rows() -> None:
    spec = random_spec()
    embedding, batch = FeatureEmbedding(spec, 8, "cpu"), random_batch(spec)
    tokens = embedding(batch)
    for c, expected in enumerate(tokens_by_hand(embedding, spec, batch)):
        r = batch.owner[c]
        torch.testing.assert_close(tokens.candidate[c], expected.candidate)
        torch.testing.assert_close(tokens.request[r], expected.request)
        for name, events in expected.events.items():
            history = tokens.histories[name]
            mine = history.values[history.offsets[r] : history.offsets[r + 1]]
            torch.testing.assert_close(mine, events.flatten(1))


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_din_weighs_events_by_an_mlp_of_candidate_and_event(recipe: str) -> None:
    spec = random_spec(num_events=1)
    # A field of the event that no candidate feature shares its table with is held against the mean token.
    spec = dataclasses.replace(spec, candidate=spec.candidate[:1])
    embedding, din = build_model(DIN.Config(dim=8, hidden=[16]), spec)
    batch, expected = random_batch(spec), []
    (unit,) = din.units
    if recipe != "none":
        apply_recipe(unit, recipe, ["score.0"])
    for tokens in tokens_by_hand(embedding, spec, batch):
        query = torch.cat([tokens.candidate[0], tokens.candidate.mean(0)])
        pooled = torch.zeros(16)
        for key in tokens.events["event0"].flatten(1):
            pooled = pooled + unit.score(torch.cat([query, key, query - key, query * key])) * key
        features = torch.cat([tokens.request.flatten(), tokens.candidate.flatten(), pooled])
        expected.append(scores(din.heads, features[None])[0])
    torch.testing.assert_close(din(embedding(batch), batch), torch.stack(expected))


@pytest.mark.parametrize(("layers", "hidden"), [(3, [16]), (1, [16, 8]), (0, [])], ids=str)
def test_dcnv2_is_a_cross_network_beside_an_mlp(layers: int, hidden: list[int]) -> None:
    spec = random_spec()
    embedding, dcnv2 = build_model(DCNv2.Config(dim=8, rank=4, num_layers=layers, hidden=hidden), spec)
    batch = random_batch(spec)
    x = torch.stack([tokens.all().flatten() for tokens in tokens_by_hand(embedding, spec, batch)])
    expected = dcnv2.heads(torch.cat([dcnv2.cross(x), dcnv2.deep(x)], 1))
    torch.testing.assert_close(dcnv2(embedding(batch), batch), expected)


def test_a_saved_configuration_may_have_the_names_of_before() -> None:
    assert from_saved(DCNv2.Config, {"num_cross_layers": 2}, "model").num_layers == 2
    assert from_saved(DLRM.Config, {"top_hidden": [7], "bottom_hidden": [64]}, "model").hidden == [7]


@pytest.mark.parametrize("sides", [("request", "candidate"), ("request",), ("candidate",), ()], ids=str)
def test_dlrm_is_inner_products_of_all_pairs_beside_the_dense_token(sides: tuple[str, ...]) -> None:
    spec = random_spec()
    spec = dataclasses.replace(spec, **{f"{side}_dense": () for side in {"request", "candidate"} - set(sides)})
    embedding, dlrm = build_model(DLRM.Config(dim=8, hidden=[16]), spec)
    batch = random_batch(spec)
    tokens, expected = embedding(batch), []
    for c, r in enumerate(batch.owner.tolist()):
        request, candidate = tokens.request[r], tokens.candidate[c]
        numbers = [request[-1]] * ("request" in sides) + [candidate[-1]] * ("candidate" in sides)
        request = request[:-1] if "request" in sides else request
        candidate = candidate[:-1] if "candidate" in sides else candidate
        events = {
            name: history.values[history.offsets[r] : history.offsets[r + 1]].unflatten(1, (2, 8))
            for name, history in tokens.histories.items()
        }
        met = CandidateTokens(request, candidate, events).all()
        dense = [dlrm.bottom(torch.cat(numbers))] if numbers else []
        met = torch.cat([*(x[None] for x in dense), met])
        pairs = [met[i] @ met[j] for i in range(len(met)) for j in range(i + 1, len(met))]
        expected.append(scores(dlrm.heads, torch.cat([*dense, torch.stack(pairs)])[None])[0])
    torch.testing.assert_close(dlrm(tokens, batch), torch.stack(expected))


def test_din_in_pieces_equals_din_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = random_spec(num_events=1)
    embedding, din = build_model(DIN.Config(dim=8, hidden=[]), spec)
    batch = random_batch(spec, (4, 0, 3, 4, 2), (6, 2, 0, 5, 1))
    results = []
    for least in (baselines.LEAST_PAIRS, 0):
        monkeypatch.setattr(baselines, "LEAST_PAIRS", least)
        monkeypatch.setattr(baselines, "MOST_PAIRS", 1)
        logits = din(embedding(batch), batch)
        parameters = [*din.parameters(), *embedding.parameters()]
        results.append([logits, *torch.autograd.grad(logits.square().sum(), parameters)])
    for at_once, in_pieces in zip(*results, strict=True):
        torch.testing.assert_close(in_pieces, at_once)  # sums over candidates in another order


@pytest.mark.parametrize("ends", [[0], [0, 0, 0], [0, 5, 5, 9, 9], [0, 1, 2, 3, 8], [0, 7]], ids=str)
def test_pieces_cover_all_candidates_and_are_small(ends: list[int]) -> None:
    pieces = baselines._pieces(ends, 5)
    assert [candidate for piece in pieces for candidate in range(*piece)] == list(range(len(ends) - 1))
    assert all(ends[end] - ends[begin] <= 5 or end == begin + 1 for begin, end in pieces)
