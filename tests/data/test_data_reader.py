"""Requests in plain Python become the batches that the files of the same rows gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from train.config.schema import EventsConfig, HistoryConfig
from train.data import build_source
from train.data.reader import RequestReader
from train.data.source import PreparedSource

COUNT = 120


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    tags = [[f"t{tag}" for tag in generator.integers(5, size=size)] for size in generator.integers(3, size=COUNT)]
    columns = {
        "user": generator.integers(6, size=COUNT).tolist(),
        "item": generator.integers(20, size=COUNT).astype(float).tolist(),
        "new": (generator.random(COUNT) < 0.5).tolist(),
        "tags": tags,
        "price": [None if value < 0.2 else value for value in generator.exponential(size=COUNT).tolist()],
        "time": (1_700_000_000 + generator.permutation(COUNT) * 100).tolist(),
        "click": generator.integers(2, size=COUNT).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def prepared(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> PreparedSource:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    config = EventsConfig(
        root=str(folder), cache_dir=str(folder / "cache"), files=["rows.parquet"], user="user", time="time",
        labels={"click": "click"}, request_categorical=["user"], candidate_categorical=["item", "new"],
        candidate_list=["tags"], candidate_numeric=["price"], log_numeric=["price"], max_history=4,
        histories={"seen": HistoryConfig(["item", "new"]), "clicked": HistoryConfig(["item"], {"click": 1})},
        **{"statistics": "none"} | settings,
    )  # fmt: skip
    source = build_source(config)
    assert isinstance(source, PreparedSource)
    run = folder / "run"
    source.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": vars(config) | {"histories": {}}}}))
    return source


@pytest.mark.parametrize(
    "settings",
    [{}, {"min_count": 5, "oov_rows": 3}, {"id_map": "hash", "hash_rows": 30}],
    ids=["vocabulary", "rare ids", "hash"],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_batch_is_that_of_the_files(
    settings: dict[str, Any], split: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    source = prepared(tmp_path, rows, **settings)
    read = RequestReader(tmp_path / "run", source.spec)
    for number in range(source.num_requests(split)):
        expected = source.batch(split, np.array([number]))
        asked = [rows[index] for index in expected.row.tolist()]
        own = [row for row in rows if row["user"] == asked[0]["user"]]
        histories = {"seen": own, "clicked": [row for row in own if row["click"]]}
        actual = read(asked[0], asked, histories, int(expected.request_time[0]))
        for name in ("request_sparse", "candidate_sparse", "histories", "history_times"):
            left, right = getattr(actual, name), getattr(expected, name)
            assert left.keys() == right.keys()
            assert torch.equal(left.values(), right.values())
            assert torch.equal(left.lengths(), right.lengths())
        torch.testing.assert_close(actual.candidate_dense, expected.candidate_dense)
        assert torch.equal(actual.candidate_offsets, expected.candidate_offsets)


def test_what_is_missing_is_named(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    source = prepared(tmp_path, rows)
    read = RequestReader(tmp_path / "run", source.spec)
    with pytest.raises(ValueError, match=r"the request has no 'user', it has \['country'\]"):
        read({"country": "de"}, [rows[0]], {"seen": [], "clicked": []}, 0)
    with pytest.raises(ValueError, match="histories has no 'clicked'"):
        read(rows[0], [rows[0]], {"seen": []}, 0)
    nothing: dict[str, list[Any]] = {"seen": [], "clicked": []}
    for change, message in (
        ({"tags": "t1|t2"}, r"a candidate has tags='t1\|t2'; it must be a list of ids, such as \['t1\|t2'\]"),
        ({"item": ["3"]}, r"a candidate has item=\['3'\]; it must be one id"),
        ({"price": "cheap"}, "a candidate has price='cheap'; it must be a finite number, or None"),
        ({"price": float("inf")}, "a candidate has price=inf"),
    ):
        with pytest.raises(ValueError, match=message):
            read(rows[0], [rows[0], rows[1] | change], nothing, 0)
    unknown = read({"user": "nobody"}, [rows[0]], {"seen": [], "clicked": []}, 0)
    assert unknown.request_sparse["user"].values().tolist() == [0]
