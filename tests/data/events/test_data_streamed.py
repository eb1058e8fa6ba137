"""Rows prepared through the disk, a few at a time, make the batches of rows prepared in memory."""

from __future__ import annotations

import dataclasses
import logging
import re
from functools import partial

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from train.config.schema import EventsConfig, HistoryConfig, JoinConfig, VectorConfig
from train.data import build_source, events
from train.data.events import shared
from train.data.source import PreparedSource

ROWS = 403


def write_files(folder) -> None:
    """Two files of labelled rows in small row groups, a side table and a log."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 4, ROWS)
    viewed = [generator.integers(20, size=length).tolist() for length in lengths]
    time = generator.integers(4000, size=ROWS)
    table = pa.table(
        {
            "user": generator.integers(40, size=ROWS) + 100,
            "time": time,
            "session": generator.integers(5, size=ROWS),
            "item": [None if item == 0 else f"i{item}" for item in generator.integers(30, size=ROWS)],
            "tags": [generator.integers(9, size=length).tolist() for length in generator.integers(0, 3, ROWS)],
            "viewed": viewed,
            "viewed_at": [
                (moment - 1 - generator.integers(50, size=len(items))).tolist()
                for moment, items in zip(time, viewed, strict=True)
            ],
            "price": pa.array(generator.exponential(size=ROWS) * 1e6, mask=generator.random(ROWS) < 0.1),
            "weight": generator.random(ROWS),
            "click": generator.integers(2, size=ROWS),
        }
    )
    pq.write_table(table.slice(0, 250), folder / "a.parquet", row_group_size=23)
    pq.write_table(table.slice(250), folder / "b.parquet", row_group_size=50)
    pq.write_table(
        pa.table({"item": [f"i{n}" for n in range(25)], "brand": [n % 4 for n in range(25)]}), folder / "items"
    )
    log = pa.table(
        {
            "user": generator.integers(80, size=300) + 80,
            "time": generator.integers(4000, size=300),
            "query": generator.integers(50, size=300),
        }
    )
    csv.write_csv(log, folder / "log.csv")


def config_of(folder, **changes) -> EventsConfig:
    settings = {
        "root": str(folder),
        "cache_dir": str(folder / "cache"),
        "files": ["?.parquet"],
        "joins": [JoinConfig(["items"], "item")],
        "user": "user",
        "time": "time",
        "labels": {"click": "click", "dear": "price >= 1000000", "cost": "price"},
        "real_labels": ["cost"],
        "weight": "weight",
        "request_categorical": ["user"],
        "request_list": ["viewed"],
        "candidate_categorical": ["item", "brand"],
        "candidate_list": ["tags"],
        "candidate_numeric": ["weight"],
        "min_count": 2,
        "max_history": 5,
        "histories": {
            "click": HistoryConfig(["item", "session"], where={"click": 1}),
            "search": HistoryConfig(["query"], files=["log.csv"]),
        },
    }
    return EventsConfig(**(settings | changes))


def prepared(config: EventsConfig, folder, rows_at_once: int) -> PreparedSource:
    folder.mkdir()
    events.prepare(dataclasses.replace(config, rows_at_once=rows_at_once), folder)
    return PreparedSource(folder, config.max_history)


def spied(calls: list, prepare, *arguments) -> None:
    calls.append(arguments)
    prepare(*arguments)


VIEWS = HistoryConfig(["viewed"], lists=True, times="viewed_at")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"request": "session", "request_numeric": ["price"], "labels": {"click": "click"}, "real_labels": []},
        {"split_by": "last", "train_requests": "last", "split": [0.5, 0.2, 0.3]},
        {"split_by": "last", "train_requests": "last", "files": ["a.parquet"], "test_files": ["b.parquet"]},
        {"files": ["a.parquet"], "test_files": ["b.parquet"], "id_map": "hash", "min_count": 1},
        {"request_list": [], "histories": {"view": VIEWS, "click": HistoryConfig(["item"])}},
        {"user": None, "time": None, "request_categorical": [], "histories": {}},
    ],
)
@pytest.mark.parametrize("rows_at_once", [37, 402])
def test_batches_are_those_of_rows_in_memory(tmp_path, monkeypatch, changes, rows_at_once):
    write_files(tmp_path)
    config = config_of(tmp_path, **changes)
    if "request_numeric" in changes:
        config.missing_fill, config.missing_indicator = {"price": 3.0}, ["*"]
    whole = prepared(config, tmp_path / "whole", 1000)
    calls = []
    monkeypatch.setattr(events.streamed, "prepare", partial(spied, calls, events.streamed.prepare))
    streamed = prepared(config, tmp_path / "streamed", rows_at_once)
    assert len(calls) == 1
    assert streamed.meta == whole.meta
    for file in (tmp_path / "whole" / "vocabulary").glob("*"):
        assert pq.read_table(file) == pq.read_table(tmp_path / "streamed" / "vocabulary" / file.name)
    for split in ("train", "valid", "test"):
        numbers = np.arange(whole.num_requests(split))
        pairs = zip(streamed.batch(split, numbers)._tensors(), whole.batch(split, numbers)._tensors(), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert not (tmp_path / "streamed" / "work").exists()


def test_bad_rows_of_every_chunk_are_named_or_counted_once(tmp_path, caplog):
    rows = [f"{n % 7},{n},{n % 5},{'x' if n in (3, 90) else n % 2}" for n in range(100)]
    rows.insert(50, "1,2")  # file row 51
    (tmp_path / "log.csv").write_text("\n".join(["user,time,item,click", *rows]) + "\n")
    config = config_of(
        tmp_path,
        files=["log.csv"],
        joins=[],
        labels={"click": "click"},
        real_labels=[],
        weight=None,
        request_list=[],
        candidate_list=[],
        candidate_categorical=["item"],
        candidate_numeric=[],
        histories={"click": HistoryConfig(["item"], where={"click": 7})},
        bad_rows="skip",
    )
    with caplog.at_level(logging.WARNING):
        source = prepared(config, tmp_path / "streamed", 10)
    assert "skipped 3 of 101 rows" in caplog.text
    assert "2 rows, the first is " in caplog.text
    assert "log.csv, row 4: column 'click' is x" in caplog.text
    assert re.search(r"1 rows, the first is \S*log\.csv, row 51", caplog.text)
    assert caplog.text.count("no row meets where: {click: 7}") == 1
    splits = ("train", "valid", "test")
    kept = [row for split in splits for row in source.batch(split, np.arange(source.num_requests(split))).row.tolist()]
    assert sorted(kept) == [n for n in range(101) if n not in (3, 50, 91)]
    config.bad_rows = "raise"
    rows.pop(50)
    (tmp_path / "log.csv").write_text("\n".join(["user,time,item,click", *rows]) + "\n")
    with pytest.raises(ValueError, match=r"log\.csv, row 4: column 'click' is x, expected a finite number"):
        prepared(config, tmp_path / "raised", 10)


@pytest.mark.parametrize("rows_at_once", [1000, 60])
def test_files_of_an_object_store(tmp_path, rows_at_once):
    write_files(tmp_path)
    store = fsspec.filesystem("memory")
    for name in ("a.parquet", "b.parquet", "items", "log.csv"):
        store.pipe_file(f"/{tmp_path.name}/{name}", (tmp_path / name).read_bytes())
    url = f"memory://{tmp_path.name}"
    local, remote = config_of(tmp_path), config_of(tmp_path, root=url)
    local.rows_at_once = remote.rows_at_once = rows_at_once
    ours, theirs = build_source(remote), build_source(local)
    batches = [source.batch("train", np.arange(50)) for source in (ours, theirs)]
    for one, other in zip(*(batch._tensors() for batch in batches), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert ours.locate(300) == f"{url.replace('://', ':///')}/b.parquet, row 51"
    before = events.cache_folder(remote)
    assert before == ours.folder
    store.pipe_file(f"/{tmp_path.name}/log.csv", b"user,time,query\n100,1,2\n")
    assert events.cache_folder(remote) != before
    remote.files = ["none*.parquet"]
    with pytest.raises(ValueError, match=f"no file matches '{url}/none\\*.parquet'; name a file"):
        build_source(remote)


@pytest.mark.parametrize("at_once", [1000, 60])
def test_features_that_differ_within_a_request_are_counted_and_said_once(tmp_path, caplog, monkeypatch, at_once):
    generator = np.random.default_rng(0)
    session = generator.integers(60, size=200)
    columns = {
        "country": [f"c{n}" for n in np.where(generator.random(200) < 0.1, 1, session % 3)],
        "age": [None if n == 3 else float(n) for n in np.where(generator.random(200) < 0.1, 3, session % 5)],
        "tags": [[int(n)] * int(n) for n in np.where(generator.random(200) < 0.1, 2, session % 3)],
        "vector": [[0.5, float(n)] for n in np.where(generator.random(200) < 0.1, 0, session % 2)],
        "past": [[int(n), 1] for n in np.where(generator.random(200) < 0.1, 0, session % 4)],
        "same": (session % 7).tolist(),
    }
    rows = {
        "user": session % 9,
        "session": session,
        "time": 1000 + session * 10,
        "item": generator.integers(9, size=200),
    }
    pq.write_table(pa.table({**rows, **columns, "click": generator.integers(2, size=200)}), tmp_path / "rows.parquet")
    monkeypatch.setattr(shared, "AT_ONCE", 5)
    config = EventsConfig(
        root=str(tmp_path), cache_dir=str(tmp_path / "cache"), files=["rows.parquet"], user="user", time="time",
        request="session", labels={"click": "click"}, request_categorical=["same", "country"], request_numeric=["age"],
        request_list=["tags"], request_vectors={"vector": VectorConfig(2)}, candidate_categorical=["item"],
        histories={"seen": HistoryConfig(["past"], lists=True)}, statistics="none", rows_at_once=at_once,
    )  # fmt: skip
    build_source(config)
    (message,) = [each for each in caplog.messages if "first row decides" in each]
    expected = []
    for name in ("country", "age", "vector", "tags", "past"):
        differ = sum(len({str(columns[name][row]) for row in np.flatnonzero(session == one)}) > 1 for one in range(60))
        assert differ > 3
        expected.append(f"{'histories.seen.' if name == 'past' else ''}{name} in {differ}")
    assert message.startswith(f"of {len(set(session.tolist()))} requests some have rows that differ")
    assert f": {', '.join(expected)};" in message
