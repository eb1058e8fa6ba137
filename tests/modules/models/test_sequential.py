"""SASRec and HSTU: what each place predicts, that none sees what comes after it, that both learn, HSTU's equation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from kernels.gdpa import gdpa
from modules.batch import EventType, FeatureSpec, RequestBatch, SparseFeature
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.loss import TaskLosses
from modules.loss.next_item import ItemShares
from modules.models.hstu import HSTU, HSTULayer
from modules.models.retrieval import NextItems
from modules.models.sasrec import SASRec
from modules.models.sequential import SequentialModel
from tests.modules.factories import random_batch
from tests.modules.models.test_models import DoubleLookup

ITEM = SparseFeature("item", "item")
SPEC = FeatureSpec(
    tables={"item": 30},
    request=(),
    candidate=(ITEM,),
    histories=(EventType("seen", (ITEM,), 6),),
    request_dense=(),
    candidate_dense=(),
    tasks=("next",),
    max_candidates=8,
)
SETTINGS: dict[str, Any] = {"dropout": 0.0, "num_layers": 2, "num_heads": 2, "score": "dot", "temperature": 1.0}
MODELS = ("sasrec", "hstu", "hstu-time")


def model(name: str, spec: FeatureSpec = SPEC, dim: int = 8) -> tuple[FeatureEmbedding, SequentialModel]:
    torch.manual_seed(0)
    embedding = FeatureEmbedding(spec, dim, "cpu")
    if name == "sasrec":
        return embedding, SASRec(spec, SASRec.Config(dim=dim, **SETTINGS, feed_forward_dim=16))
    own = HSTU(spec, HSTU.Config(dim=dim, **SETTINGS, time_buckets=4 if name == "hstu-time" else 0))
    for layer in own.layers:
        for table in (layer.position_bias, layer.time_bias):
            if table is not None:
                torch.nn.init.normal_(table)
    return embedding, own


def batch() -> RequestBatch:
    """Three users, one of whom has no history, one request without a candidate, and a request of negatives."""
    made = random_batch(SPEC, candidates=[1, 1, 1, 0, 8], lengths=[3, 0, 6, 2, 0], seed=1)
    made.histories.values().clamp_(min=1)
    made.candidate_sparse.values().clamp_(min=1)
    return dataclasses.replace(made, labels=torch.tensor([1.0] * 3 + [torch.nan] * 8)[:, None])


@pytest.mark.parametrize("name", MODELS)
def test_each_place_has_the_next_event_as_its_target_and_the_last_one_the_candidate(name: str) -> None:
    embedding, own = model(name)
    own.trains_on_places = True
    made = batch()
    items = own(embedding(made), made)
    assert isinstance(items, NextItems)
    events = list(made.histories.values().split([3, 0, 6, 2, 0]))
    candidates = made.candidate_sparse.values()
    expected = [*events[0], candidates[0], candidates[1], *events[2], candidates[2], *events[3]]
    weighed = items.weights > 0
    assert items.target_ids[weighed].tolist() == [int(item) for item in expected]
    assert weighed.sum() == len(expected)
    assert items.query.shape == (11 + 5, 8)  # an event each, and a place for each request's own token
    rows = embedding.collection.embeddings["item"].weight
    torch.testing.assert_close(items.target[weighed], rows[torch.stack(expected)])
    torch.testing.assert_close(items.candidates, rows[candidates])


@pytest.mark.parametrize("name", MODELS)
def test_as_rankers_a_request_batch_and_its_expanded_twin_agree_in_loss_and_every_gradient(name: str) -> None:
    embedding, own = model(name)
    embedding.collection = DoubleLookup(embedding.collection)
    embedding, own = embedding.double(), own.double().eval()  # scores of the last state
    own._scored = lambda vectors: vectors  # in float32 otherwise
    made = random_batch(SPEC, (2, 0, 3, 1), (3, 2, 0, 6))
    parameters = [*embedding.parameters(), *own.parameters()]
    results = []
    for twin in (made, made.expand()):
        loss = binary_cross_entropy_with_logits(own(embedding(twin), twin), twin.labels.double())
        results.append([loss, *torch.autograd.grad(loss, parameters)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)  # sums in another order


@pytest.mark.parametrize("name", MODELS)
def test_no_state_depends_on_later_events_or_on_other_requests(name: str) -> None:
    embedding, own = model(name)
    own.trains_on_places = True
    made = batch()
    before = own(embedding(made), made).query
    made.histories.values()[5] = made.histories.values()[5] % 29 + 1  # the third event of the third request
    made = dataclasses.replace(made)  # without the ids that were collected for the first lookup
    changed = (own(embedding(made), made).query - before).abs().amax(1) > 1e-7
    # Places: 4 of the first request, 1 of the second, then the third's token and its events.
    assert changed.tolist() == [False] * 8 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_logits_are_those_of_the_last_state(name: str) -> None:
    embedding, own = model(name)
    made = batch()
    logits = own(embedding(made), made)
    assert logits.shape == (11, 1)
    tokens = embedding(made)
    by_hand = own.queries(tokens)[made.owner] * own.item(tokens.candidate[:, 0])
    torch.testing.assert_close(logits[:, 0], by_hand.sum(1))
    own.trains_on_places = True
    losses = TaskLosses({"next": {"loss": "softmax", "uniform": 8}}, ("next",))
    losses.known = ItemShares(29)
    losses(own(embedding(made), made), made, SPEC, None)[0].backward()
    still = [
        n for n, p in [*own.named_parameters(), *embedding.named_parameters()] if p.grad is None or not p.grad.any()
    ]
    assert not still


@pytest.mark.parametrize(("name", "loss"), [("sasrec", "softmax"), ("hstu", "gbce"), ("hstu", "bpr")])
def test_a_model_learns_sequences_that_go_round(name: str, loss: str) -> None:
    embedding, own = model(name, dim=16)
    own.trains_on_places = True
    losses = TaskLosses({"next": {"loss": loss, "uniform": 8}}, ("next",))
    losses.known = ItemShares(29)
    optimizer = torch.optim.Adam([*own.parameters(), *embedding.parameters()], lr=0.02)
    for step in range(80):
        made = round_batch(step)
        optimizer.zero_grad()
        losses(own.train()(embedding(made), made), made, SPEC, None)[0].backward()
        optimizer.step()
    made = round_batch(1000)
    with torch.no_grad():
        scores = (
            own.eval().queries(embedding(made))[:8] @ own.item(embedding.collection.embeddings["item"].weight[1:]).T
        )
    right = scores.argmax(1) + 1 == made.candidate_sparse.values()[:8]
    assert right.float().mean() > 0.8


def round_batch(seed: int) -> RequestBatch:
    """Eight users, each of whom goes through the items 1 to 29 in turn from some item on, and eight negatives."""
    made = random_batch(SPEC, candidates=[1] * 8 + [8], lengths=[5] * 8 + [0], seed=seed)
    start = torch.randint(29, (8, 1), generator=torch.Generator().manual_seed(seed))
    turns = (start + torch.arange(6)) % 29 + 1
    made.histories.values().copy_(turns[:, :5].flatten())
    made.candidate_sparse.values()[:8] = turns[:, 5]
    made.candidate_sparse.values().clamp_(min=1)
    return dataclasses.replace(made, labels=torch.tensor([1.0] * 8 + [torch.nan] * 8)[:, None])


RESEARCH = {"scale": 1.0, "epsilon": 1e-6}
STATED = {
    "ours": {},
    "production": {"epsilon": 1e-6},
    "research": RESEARCH,
    "length": RESEARCH | {"divide_by": "length"},
}


@pytest.mark.parametrize("name", STATED)
def test_hstu_layer_is_the_published_equation_in_float64(name: str) -> None:
    """Rows of few of 200 events, where an epsilon counts."""
    torch.manual_seed(0)
    layer = HSTULayer(4, 2, max_length=200, dropout=0.0, time_buckets=3, **STATED[name]).double()
    for table in (layer.position_bias, layer.time_bias):
        assert table is not None
        torch.nn.init.normal_(table)
    x, times = torch.randn(5, 4, dtype=torch.float64), torch.tensor([3, 4, 9, 1, 500])
    following = torch.tensor([4, 9, 12, 500, 900])
    parts = slice(0, 3), slice(3, 5)
    rows = [plain_layer(layer, name, x[part], times[part], following[part]) for part in parts]
    out = layer(x, torch.tensor([0, 3, 5]), times, following)
    torch.testing.assert_close(out, torch.cat(rows), rtol=0, atol=1e-6)
    begun = layer(x[:2], torch.tensor([0, 2]), times[:2], following[:2])
    torch.testing.assert_close(begun, out[:2], rtol=0, atol=1e-9)  # how many events follow is not known yet
    other = HSTULayer(4, 2, max_length=200, dropout=0.0, time_buckets=3, epsilon=3e-6).double()
    other.load_state_dict(layer.state_dict())
    assert (other(x, torch.tensor([0, 3, 5]), times, following) - out).abs().max() > 1e-4


def test_a_place_knows_when_what_it_predicts_happens() -> None:
    embedding, own = model("hstu-time")
    made = batch()
    sequences = own.sequences(embedding(made))
    for row in range(made.num_requests):
        first, end = sequences.offsets[row : row + 2].tolist()
        assert sequences.next_times[first:end].tolist() == [*sequences.times[first + 1 : end].tolist(), 0]


def plain_layer(layer: HSTULayer, name: str, x: Tensor, times: Tensor, following: Tensor) -> Tensor:
    """One row, in loops over heads and places, with the constants of STATED."""
    epsilon, scale = 1e-5 if name == "ours" else 1e-6, 1.0 if name in ("research", "length") else 2**-0.5
    assert layer.position_bias is not None
    assert layer.time_bias is not None
    norm = partial(torch.nn.functional.layer_norm, eps=epsilon)
    gate, value, query, key = torch.nn.functional.silu(layer.project(norm(x, x.shape[1:]))).chunk(4, 1)
    out = torch.zeros_like(x)
    for head in range(2):
        part = slice(2 * head, 2 * head + 2)
        for i in range(len(x)):
            for j in range(i + 1):
                gap = max(abs(int(following[i] - times[j])), 1)
                bucket = min(int(torch.tensor(gap, dtype=torch.float64).log() / 0.301), 2)
                score = query[i, part] @ key[j, part] * scale
                score = score + layer.position_bias[head, j - i + 199] + layer.time_bias[head, bucket]
                out[i, part] += torch.nn.functional.silu(score) / (i + 1 if name == "length" else 200) * value[j, part]
    return x + layer.output(norm(out, out.shape[1:]) * gate)


def test_biases_of_gdpa_have_right_gradients() -> None:
    torch.manual_seed(0)
    offsets, times = torch.tensor([0, 2, 2, 5]), torch.tensor([1, 5, 2, 3, 400])
    operands = [torch.randn(5, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    tables = [torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (5, 3)]

    def call(*given: Tensor) -> Tensor:
        *qkv, position, time = given
        biases = {"position_bias": position, "time_bias": time, "q_times": times, "k_times": times}
        return gdpa(
            *qkv, offsets, offsets, max_q=3, max_k=3, activation="silu", score_scale=0.5, window=(None, 0), **biases
        )

    assert torch.autograd.gradcheck(call, [*operands, *tables])
    with pytest.raises(ValueError, match="biases need offsets of queries and keys"):
        gdpa(*(x[:4] for x in operands), None, offsets, max_q=4, max_k=3, score_scale=1.0, position_bias=tables[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": (ITEM, SparseFeature("tag", "item"))}, "candidates must have one feature"),
        ({"candidate_dense": ("price",)}, "candidates must have one feature"),
        ({"histories": ()}, "reads one event type whose first field has the candidates' table 'item'"),
    ],
)
def test_data_that_is_no_sequence_of_items_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model("sasrec", dataclasses.replace(SPEC, **change))
