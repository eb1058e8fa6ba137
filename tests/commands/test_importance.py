"""Features are dealt out anew one at a time, and what the labels depend on is what turns out to be worth something."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from modules.batch import RequestBatch
from tests.modules.factories import random_batch, random_spec, vendor_spec
from train.build import Job
from train.commands import importance

SPEC = random_spec(tasks=("click",))


def values_by_feature(batch: RequestBatch) -> dict[str, list[Any]]:
    """Of each feature or event type the values of every request or candidate."""
    found: dict[str, list[Any]] = {}
    for keyed in (batch.request_sparse, batch.candidate_sparse, batch.histories, batch.history_times):
        for key in keyed.keys():
            rows = keyed[key].values().split(keyed[key].lengths().tolist())
            found.setdefault(key.split(".")[0], []).append([row.tolist() for row in rows])
    found |= dict(zip(SPEC.request_dense, batch.request_dense.T.tolist(), strict=True))
    return found | dict(zip(SPEC.candidate_dense, batch.candidate_dense.T.tolist(), strict=True))


@pytest.mark.parametrize("name", importance.features_of(SPEC))
def test_one_feature_is_dealt_out_anew_and_all_others_stay(name: str) -> None:
    batch = random_batch(SPEC, candidates=(2, 0, 1, 3, 1, 2, 2, 4), seed=1)
    before = values_by_feature(batch)
    after = values_by_feature(importance.permuted(batch, SPEC, name, torch.Generator().manual_seed(0)))
    assert before.keys() == after.keys() == set(importance.features_of(SPEC))
    assert [key for key in before if before[key] != after[key]] == [name]
    if name.startswith("event"):  # an event keeps its fields and its time
        assert sorted(zip(*before[name], strict=True)) == sorted(zip(*after[name], strict=True))
    elif name in (*SPEC.request_dense, *SPEC.candidate_dense):
        assert sorted(before[name]) == sorted(after[name])
    else:
        assert sorted(before[name][0]) == sorted(after[name][0])


def test_features_of_vendors_are_dealt_out_among_vendors() -> None:
    spec = vendor_spec()
    batch = random_batch(spec, (4, 4, 4))
    assert {feature.name for feature in spec.vendor} | {*spec.vendor_dense} < {*importance.features_of(spec)}
    shuffled = [importance.permuted(batch, spec, name, torch.Generator().manual_seed(0)) for name in ("shop", "fame")]
    for name, other in zip(("shop", "fame"), shuffled, strict=True):
        ids, numbers = other.vendors.sparse["shop"].values(), other.vendors.dense
        assert ids.sort().values.equal(batch.vendors.sparse["shop"].values().sort().values)
        assert numbers.sort(0).values.equal(batch.vendors.dense.sort(0).values)
        assert ids.equal(batch.vendors.sparse["shop"].values()) is (name != "shop")
        assert numbers.equal(batch.vendors.dense) is (name != "fame")
        assert other.vendors.sparse["shop_tags"].values().equal(batch.vendors.sparse["shop_tags"].values())
        assert other.candidate_sparse.values().equal(batch.candidate_sparse.values())


def test_a_number_and_its_indicator_are_one_feature() -> None:
    spec = replace(SPEC, candidate_dense=("price", "stock", "price.missing"))
    assert [name for name in importance.features_of(spec) if name in spec.candidate_dense] == ["price", "stock"]
    batch = random_batch(SPEC, candidates=(20,), seed=1)
    batch.candidate_dense = torch.arange(60.0).view(20, 3)
    after = importance.permuted(batch, spec, "price", torch.Generator().manual_seed(0)).candidate_dense
    assert not after[:, 0].equal(batch.candidate_dense[:, 0])
    assert (after[:, 2] == after[:, 0] + 2).all()
    assert after[:, 1].equal(batch.candidate_dense[:, 1])


class Priced(nn.Module):
    """Takes the price, the only numeric feature of candidates, for the logit."""

    def forward(self, batch: RequestBatch) -> Tensor:
        return 3 * batch.candidate_dense


def test_what_the_label_depends_on_is_worth_most(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [random_batch(SPEC, candidates=(4,) * 32, seed=seed) for seed in range(4)]
    for batch in batches:
        batch.labels.copy_((batch.candidate_dense > 0).float())
    monkeypatch.setattr(importance, "split_loader", lambda job, split: batches)
    model = Priced()
    job = SimpleNamespace(
        source=SimpleNamespace(spec=SPEC, label_rates=lambda: {"click": 0.5}),
        world=SimpleNamespace(device=torch.device("cpu")),
        model=model,
        ranking_model=model,
        autocast=nullcontext,
    )
    worth = importance.importance(cast(Job, job), "valid", steps=3)
    assert next(iter(worth)) == "price"
    assert worth["price"]["click/ne_rise_percent"] > 100
    assert worth["price"]["click/auc_fall"] == pytest.approx(0.5, abs=0.1)
    assert {value for name, values in worth.items() if name != "price" for value in values.values()} == {0}
