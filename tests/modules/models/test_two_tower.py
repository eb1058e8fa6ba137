"""Two towers: products of both sides, places of a training step, gradients, and that it learns what users take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from modules.batch import FeatureSpec, RequestBatch, SparseFeature
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.loss import TaskLosses
from modules.loss.next_item import ItemShares
from modules.models.retrieval import NextItems, Vectors
from modules.models.two_tower import TwoTower
from tests.modules.factories import random_batch
from tests.modules.models.test_models import DoubleLookup
from tests.modules.models.test_sequential import SPEC as SEQUENCES

SPEC: FeatureSpec = dataclasses.replace(
    SEQUENCES, tables={"item": 30, "user": 9}, request=(SparseFeature("user", "user"),), request_dense=("age",)
)


def model(**options: Any) -> tuple[FeatureEmbedding, TwoTower]:
    torch.manual_seed(0)
    return FeatureEmbedding(SPEC, 8, "cpu"), TwoTower(SPEC, TwoTower.Config(dim=8, **options))


def batch(candidates: tuple[int, ...] = (2, 0, 3, 1), negatives: int = 0) -> RequestBatch:
    """Requests all of whose candidates are targets, and one with negatives."""
    made = random_batch(SPEC, (*candidates, *[negatives] * (negatives > 0)))
    made.candidate_sparse.values().clamp_(min=1)
    labels = torch.tensor([1.0] * sum(candidates) + [torch.nan] * negatives)[:, None]
    return dataclasses.replace(made, labels=labels)


def by_hand(embedding: FeatureEmbedding, own: TwoTower, made: RequestBatch) -> tuple[Tensor, Tensor]:
    """Vectors of requests and of candidates."""
    tokens = embedding(made)
    user, item = tokens.request, tokens.candidate[:, 0]
    user = own.user_tower(user.flatten(1)) if own.user_tower else user.mean(1)
    user, item = user + own.shared, own.item_tower(item) if own.item_tower else item
    if own.score == "cosine":
        user, item = normalize(user, dim=1), normalize(item, dim=1)
    return user / own.temperature, item


@pytest.mark.parametrize("options", [{}, {"hidden": [6], "score": "cosine", "temperature": 0.1}], ids=str)
def test_scores_are_products_of_the_two_sides(options: dict[str, Any]) -> None:
    embedding, own = model(**options)
    torch.nn.init.normal_(own.shared)
    made = batch()
    user, item = by_hand(embedding, own, made)
    scores = (user[made.owner] * item).sum(1, keepdim=True)
    torch.testing.assert_close(own(embedding(made), made), scores)
    own.eval().gives_vectors = True
    found = own(embedding(made), made)
    assert isinstance(found, Vectors)
    torch.testing.assert_close(found, Vectors(user, item))


def test_places_of_a_step_are_the_candidates_without_the_negatives() -> None:
    embedding, own = model()
    own.trains_on_places, own.num_negatives = True, 4
    made = batch(negatives=4)
    made.candidate_sparse.values()[1] = 0  # unknown
    user, item = by_hand(embedding, own, made)
    places = own(embedding(made), made)
    assert isinstance(places, NextItems)
    torch.testing.assert_close(places.query, user[made.owner[:6]])
    torch.testing.assert_close(places.target, item[:6])
    assert torch.equal(places.target_ids, made.candidate_sparse.values()[:6])
    assert places.weights.tolist() == [1, 0, 1, 1, 1, 1]
    torch.testing.assert_close(places.candidates, item)


@pytest.mark.parametrize("options", [{}, {"hidden": [6]}], ids=str)
def test_a_request_batch_and_its_expanded_twin_agree_in_loss_and_every_gradient(options: dict[str, Any]) -> None:
    embedding, own = model(**options)
    embedding.collection = DoubleLookup(embedding.collection)
    embedding, own = embedding.double(), own.double()
    own._scored = lambda vectors: vectors  # in float32 otherwise
    made = dataclasses.replace(random_batch(SPEC), request_dense=torch.randn(5, 1).double())
    parameters = [*embedding.parameters(), *own.parameters()]
    results = []
    for twin in (made, made.expand()):
        loss = binary_cross_entropy_with_logits(own(embedding(twin), twin), twin.labels.double())
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)  # sums in another order
    assert all(gradient.any() for gradient in results[0])


@pytest.mark.parametrize("loss", ["softmax", "gbce", "bpr", "in batch"])
@pytest.mark.parametrize("hidden", [[], [16]], ids=str)
def test_each_loss_teaches_which_items_are_whose(loss: str, hidden: list[int]) -> None:
    embedding, own = model(hidden=hidden)
    own.trains_on_places, own.num_negatives = True, 29
    made = batch((2, 1, 3, 2), negatives=29)
    made.request_sparse.values()[:4] = torch.arange(1, 5)
    made.candidate_sparse.values()[:8] = torch.arange(1, 9)
    made.candidate_sparse.values()[8:] = torch.arange(1, 30)  # all items
    config = {"loss": loss, "uniform": 29} if loss != "in batch" else {"loss": "softmax", "uniform": 29, "in_batch": 16}
    losses = TaskLosses({"next": config}, ("next",))
    losses.known = ItemShares(29, torch.full((30,), 1 / 29))
    optimizer = torch.optim.Adam([*embedding.parameters(), *own.parameters()], lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        losses(own(embedding(made), made), made, SPEC, None)[0].backward()
        optimizer.step()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in own.parameters())
    own.eval().gives_vectors = True
    queries, items = own(embedding(made), made)
    scores = queries[:4] @ items[8:].T
    for request, wanted in enumerate([{1, 2}, {3}, {4, 5, 6}, {7, 8}]):
        assert {int(item) + 1 for item in scores[request].topk(len(wanted)).indices} == wanted
