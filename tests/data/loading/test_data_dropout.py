"""Ids and histories left out of training batches: shares, what stays, and that batches and workers do not decide it."""

from __future__ import annotations

import math

import pytest
import torch

from modules.batch import UNKNOWN_ID, RequestBatch
from tests.data.loading.test_data_sampling import load
from tests.modules.factories import random_batch, random_spec
from tests.modules.test_batch import assert_same
from train.config.schema import SyntheticConfig
from train.data import SyntheticSource
from train.data.loading.dropout import drop_histories, drop_ids

SPEC = random_spec()
SHARE = 0.3


@pytest.fixture(scope="module")
def batch() -> RequestBatch:
    made = random_batch(SPEC, [3, 1, 5, 2] * 100)
    made.row = torch.arange(len(made.row))
    return made


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(SyntheticConfig(num_requests=600, eval_requests=60, candidates=3, num_users=50))


def test_a_share_of_a_tables_ids_becomes_unknown_everywhere(batch: RequestBatch) -> None:
    dropped = drop_ids(batch, SPEC, {"item": SHARE}, seed=0, epoch=0)
    sides = [(batch.request_sparse, dropped.request_sparse), (batch.candidate_sparse, dropped.candidate_sparse)]
    for before, after in (*sides, (batch.histories, dropped.histories)):
        assert torch.equal(before.lengths(), after.lengths())
        for key in before.keys():
            known = before[key].values() != UNKNOWN_ID
            changed = before[key].values() != after[key].values()
            assert (after[key].values()[changed] == UNKNOWN_ID).all()
            if "item" in key:
                total = known.sum()
                error = 4 * math.sqrt(SHARE * (1 - SHARE) / total)
                assert (changed.sum() / total).item() == pytest.approx(SHARE, abs=error)
            else:
                assert not changed.any()


def test_whole_histories_of_a_share_of_requests_are_empty(batch: RequestBatch) -> None:
    dropped = drop_histories(batch, SHARE, seed=0, epoch=0)
    lengths, left = (each.histories.lengths().view(-1, batch.num_requests) for each in (batch, dropped))
    gone = (left == 0).all(0)
    assert torch.equal(left[:, ~gone], lengths[:, ~gone])
    had = (lengths > 0).any(0)
    assert (gone & had).sum() / had.sum() == pytest.approx(SHARE, abs=4 * math.sqrt(SHARE * (1 - SHARE) / had.sum()))
    for key in batch.histories.keys():
        before, after = batch.histories[key], dropped.histories[key]
        for request in (~gone).nonzero().squeeze(1)[:20].tolist():
            a, b = ((each.offsets()[request], each.offsets()[request + 1]) for each in (before, after))
            assert torch.equal(before.values()[a[0] : a[1]], after.values()[b[0] : b[1]])
    times = dropped.history_times
    assert torch.equal(times.lengths(), left[[0, 2]].flatten())  # events have two fields
    assert times.values().numel() == times.lengths().sum()


def test_neither_batches_nor_workers_decide_what_is_left_out(source: SyntheticSource) -> None:
    keys = {"negative_rate": 1, "id_dropout": {"item": SHARE}, "history_dropout": SHARE}
    whole, halves = load(source, **keys, batch_size=600), load(source, **keys, batch_size=300)
    ids = [torch.cat([batch.candidate_sparse["item"].values() for batch in each]) for each in (whole, halves)]
    assert torch.equal(*ids)
    lengths = [torch.cat([batch.histories[source.spec.histories[0].keys[0]].lengths() for batch in each])
               for each in (whole, halves)]  # fmt: skip
    assert torch.equal(*lengths)
    assert not torch.equal(ids[0], load(source, **keys, batch_size=600, epoch=1)[0].candidate_sparse["item"].values())
    for a, b in zip(load(source, **keys), load(source, **keys, num_workers=2), strict=True):
        assert_same(a, b)


def test_an_unknown_table_is_named(source: SyntheticSource) -> None:
    with pytest.raises(
        ValueError, match=r"data\.id_dropout names 'films'; the tables are .*, e\.g\. \+data\.id_dropout"
    ):
        load(source, id_dropout={"films": 0.1})
