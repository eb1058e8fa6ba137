"""data.split_by=last, labels of real numbers, and items drawn as negatives, against a plain reading of the table."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.events.test_data_events import make_config, make_table, rows_of, words
from tests.data.sources import events_config, whole
from train.config.schema import HistoryConfig
from train.data import build_source
from train.data.batch import append_candidates
from train.data.loading.loader import LoaderOptions, build_loader
from train.data.loading.sampling import uniform_items

SETTINGS = {
    "split_by": "last",
    "max_candidates": 1,
    "request_window": 0,
    "request_categorical": [],
    "histories": {"seen": HistoryConfig(fields=["item"])},
    "max_history": 1000,
}


def timed(**changes) -> dict:
    """A table in which no user has two events at one time."""
    table = make_table(**changes)
    return table | {"time": np.random.default_rng(1).permutation(len(table["user"]))}


def sequences(table: dict) -> dict[int, list[int]]:
    order = np.argsort(table["time"])
    return {user: table["item"][order][table["user"][order] == user].tolist() for user in np.unique(table["user"])}


@pytest.mark.parametrize(("split", "left", "held"), [([0.8, 0.1, 0.1], 2, True), ([0.9, 0, 0.1], 1, False)])
def test_each_users_last_requests_are_held_out_and_the_rest_is_one_sequence(tmp_path, split, left, held) -> None:
    table = timed()
    source = build_source(make_config(tmp_path, table, **SETTINGS, train_requests="last", split=split))
    word = words(source, "item")
    users = sequences(table)
    place_of = {"train": -1 - left, "valid": -2, "test": -1}
    for part in ("train", "valid", "test") if held else ("train", "test"):
        batch = whole(source, part)
        assert batch.num_requests == batch.num_candidates == len(users)
        found = {}
        histories = rows_of(batch.histories, "seen.item")
        for history, item, row in zip(
            histories, batch.candidate_sparse.values().tolist(), batch.row.tolist(), strict=True
        ):
            found[int(table["user"][row])] = [int(word[each]) if word[each] else None for each in [*history, item]]
        place = place_of[part]
        for user, items in users.items():
            expected = items[: len(items) + place + 1]
            known = [item if str(item) in word else None for item in expected]
            assert found[int(user)] == known
    assert held or source.num_requests("valid") == 0
    trained = {item for items in users.values() for item in items[:-left]}
    assert {int(each) for each in word[1:] if each} == trained  # those of histories of training requests, too


@pytest.mark.parametrize("train_requests", ["last", "all"])
@pytest.mark.parametrize("own", [("test",), ("valid", "test")])
def test_of_a_split_with_files_each_user_has_one_request_and_the_rest_is_its_history(
    tmp_path, own, train_requests
) -> None:
    """Users 100 and up have files of training, 200 and up of validation, and so on; each also has items of its own."""
    tables = {name: timed() for name in ("train", *own)}
    for index, (name, table) in enumerate(tables.items()):
        table["item"] = table["item"] + 15 * index
        table["user"] = table["user"] + 100 * index
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    files = {f"{name}_files": [f"{name}.parquet"] for name in own}
    settings = SETTINGS | {"files": ["train.parquet"], "train_requests": train_requests} | files
    source = build_source(events_config(tmp_path, **settings))
    word, offset = words(source, "item"), 0
    left = 0 if "valid" in own else 1
    for name, table in tables.items():
        users, batch = sequences(table), whole(source, name)
        for history, item, row in zip(
            rows_of(batch.histories, "seen.item"),
            batch.candidate_sparse.values().tolist(),
            (batch.row - offset).tolist(),
            strict=True,
        ):
            items = users[int(table["user"][row])]
            place = np.flatnonzero(np.sort(table["time"][table["user"] == table["user"][row]]) == table["time"][row])[0]
            expected = [str(each) if str(each) in word else None for each in items[: place + 1]]
            assert [word[each] if each else None for each in [*history, item]] == expected
            if name != "train" or train_requests == "last":
                assert place == len(items) - 1 - (left if name == "train" else 0)
        one_each = len(users)
        requests = one_each if name != "train" or train_requests == "last" else len(table["user"]) - left * one_each
        assert batch.num_requests == requests
        offset += len(table["user"])
    assert source.num_requests("valid") == 7
    trained = {str(item) for items in sequences(tables["train"]).values() for item in items[: len(items) - left]}
    assert set(word[1:]) == trained  # what is in files of other splits counts nowhere


def test_all_earlier_requests_train_unless_only_the_last_one_shall(tmp_path) -> None:
    table = timed()
    source = build_source(make_config(tmp_path, table, **SETTINGS))
    assert source.num_requests("train") == len(table["user"]) - 2 * 7
    assert source.num_requests("valid") == source.num_requests("test") == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": None}, "data.split_by=last holds out each user's last requests: data.user and data.time must name"),
        ({"split_by": "time", "train_requests": "last"}, "data.train_requests=last goes with data.split_by=last"),
        ({"real_labels": ["buy"]}, r"data.real_labels names \['buy'\]"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_source(make_config(tmp_path, timed(), **(SETTINGS | changes)))


def test_labels_of_real_numbers_pass_where_they_are_named(tmp_path) -> None:
    table = make_table()
    table["seconds"] = table["price"] * 100
    labels = {"click": "click", "watch": "seconds"}
    with pytest.raises(ValueError, match="expected a label of 0, 1 or nothing .with data=events, data.real_labels"):
        build_source(make_config(tmp_path, table, labels=labels))
    source = build_source(make_config(tmp_path, table, labels=labels, real_labels=["watch"]))
    batch = whole(source)
    np.testing.assert_allclose(batch.labels[:, 1], table["seconds"][batch.row.numpy()], rtol=1e-6)
    least, most, is_whole = source.label_bounds()["watch"]
    assert (least, most, is_whole) == (table["seconds"].min(), table["seconds"].max(), False)
    assert source.label_rates()["watch"] == pytest.approx(batch.labels[:, 1].mean().item(), rel=1e-5)


def test_negatives_come_behind_a_batch_and_each_item_is_as_likely(tmp_path) -> None:
    source = build_source(make_config(tmp_path, timed(), **SETTINGS, train_requests="last"))
    settings = {"batch_size": 4, "seed": 3, "world_size": 1, "shuffle": True, "num_workers": 0, "prefetch": 1}
    plain = list(build_loader(source, "train", LoaderOptions(rank=0, **settings)))
    loaded = list(build_loader(source, "train", LoaderOptions(rank=0, uniform_negatives=5, **settings)))
    again = list(build_loader(source, "train", LoaderOptions(rank=0, uniform_negatives=5, **settings)))
    other = list(
        build_loader(source, "train", LoaderOptions(rank=1, **(settings | {"world_size": 2}), uniform_negatives=5))
    )
    assert len(plain) == len(loaded) == 2
    rows = source.spec.tables["item"]
    for batch, more, same in zip(plain, loaded, again, strict=True):
        count = batch.num_candidates
        assert (more.num_requests, more.num_candidates) == (batch.num_requests + 1, count + 5)
        torch.testing.assert_close(more.candidate_sparse.values()[:count], batch.candidate_sparse.values())
        negatives = more.candidate_sparse.values()[count:]
        assert ((negatives > 0) & (negatives < rows)).all()
        assert negatives.equal(same.candidate_sparse.values()[count:])
        assert more.labels[count:].isnan().all()
        assert (more.weights[count:] == 0).all()
        assert more.candidate_offsets.tolist() == [*batch.candidate_offsets.tolist(), count + 5]
        assert more.histories.values().equal(batch.histories.values())
        assert more.histories.lengths().tolist() == [*batch.histories.lengths().tolist(), 0]
        assert more.lookup.stride() == batch.num_requests + 1
    assert not other[0].candidate_sparse.values()[-5:].equal(loaded[0].candidate_sparse.values()[-5:])
    counts = torch.bincount(uniform_items(source.spec, 40_000, (1,)), minlength=rows)[1:].double()
    expected = 40_000 / (rows - 1)
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)
    empty = append_candidates(plain[0], torch.zeros(0, dtype=torch.int64))
    assert empty.num_candidates == plain[0].num_candidates
