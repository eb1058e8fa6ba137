"""Columns made of others: each kind by hand, and the same from files and from requests that are scored."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.sources import events_config
from train.config.schema import EventsConfig, HistoryConfig, TransformConfig
from train.data import build_source
from train.data.features.columns import read_ids
from train.data.features.transforms import Transforms
from train.data.features.vocabulary import hash_texts
from train.data.reader import RequestReader

COUNT = 150


class Table:
    def __init__(self, **columns) -> None:
        self.columns = columns

    def ids(self, name):
        return read_ids(pa.chunked_array([pa.array(self.columns[name])]))

    def numbers(self, name):
        return np.array([math.nan if value is None else value for value in self.columns[name]], float)


def texts(coded) -> list[str | None]:
    return [None if code < 0 else coded.values[int(code)].as_py() for code in coded.codes]


def test_each_kind_by_hand():
    table = Table(a=["x", "y", None, "x"], b=[1, 2, 1, 1], price=[0.5, 1.0, None, 250.0])
    made = Transforms(
        {
            "both": {"cross": ["a", "b"]},
            "band": {"bucketize": "price", "edges": [1, 10, 100]},
            "small": {"log": "price"},
            "capped": {"clip": "price", "most": 100.0},
            "hashed": {"hash": "a", "buckets": 3},
        }
    )
    assert texts(made.ids("both", table)) == ["x\x1f1", "y\x1f2", None, "x\x1f1"]
    assert texts(made.ids("band", table)) == ["0", "1", None, "3"]
    np.testing.assert_array_equal(made.numbers("small", table), np.log1p([0.5, 1.0, math.nan, 250.0]))
    np.testing.assert_array_equal(made.numbers("capped", table), [0.5, 1.0, math.nan, 100.0])
    expected = {text: str(int(hash_texts(pa.array([text]))[0] % np.uint64(3))) for text in "xy"}
    assert texts(made.ids("hashed", table)) == [expected["x"], expected["y"], None, expected["x"]]
    assert made.inputs(["both", "small", "other"]) == {"a", "b", "price", "other"}
    empty = Table(a=pa.array([], pa.string()), b=pa.array([], pa.int64()), price=[])
    assert len(made.ids("both", empty).codes) == len(made.numbers("small", empty)) == 0


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({}, "must have one of cross, bucketize"),
        ({"log": "a", "hash": "a", "buckets": 2}, r"it has \['log', 'hash'\]"),
        ({"cross": ["a"]}, "must name two columns"),
        ({"bucketize": "a", "edges": [2, 1]}, "must be rising numbers"),
        ({"bucketize": "a", "edges": [1, math.inf]}, "must be finite"),
        ({"clip": "a"}, "needs least, most or both"),
        ({"clip": "a", "least": 2.0, "most": 1.0}, "is above most"),
        ({"hash": "a"}, "buckets=0 must be at least 1"),
        ({"lookup": "a"}, r"t\.lookup=a was saved by an earlier version"),
        ({"log": "a", "edges": [1.0]}, r"data.transforms.t.edges does not go with log"),
        ({"log": "a", "least": 0.0}, r"data.transforms.t.least does not go with log"),
        ({"cross": ["t", "a"]}, "is made of itself"),
    ],
)
def test_a_description_that_cannot_be_is_refused(described, message):
    with pytest.raises(ValueError, match=message):
        Transforms({"t": described})


def config_of(folder, **changes) -> EventsConfig:
    settings = {
        "request_categorical": ["user", "user_bucket"],
        "candidate_categorical": ["item", "country_brand", "band"],
        "candidate_numeric": ["capped", "small"],
        "missing_indicator": ["capped"],
        "max_history": 4,
        "histories": {"seen": HistoryConfig(["item", "band"])},
        "transforms": {
            "user_bucket": TransformConfig(hash="user", buckets=4),
            "group": TransformConfig(hash="brand", buckets=2),
            "country_brand": TransformConfig(cross=["country", "group"]),
            "band": TransformConfig(bucketize="price", edges=[0.5, 1.0, 2.0]),
            "capped": TransformConfig(clip="price", least=0.1, most=2.0),
            "small": TransformConfig(log="capped"),
        },
    }
    return events_config(folder, **settings | changes)


def rows_of() -> list[dict]:
    generator = np.random.default_rng(0)
    columns = {
        "user": generator.integers(6, size=COUNT).tolist(),
        "country": [None if n == 0 else f"c{n}" for n in generator.integers(4, size=COUNT)],
        "item": generator.integers(20, size=COUNT).tolist(),
        "brand": [f"b{n}" for n in generator.integers(4, size=COUNT)],
        "price": [None if value < 0.2 else value for value in generator.exponential(size=COUNT).tolist()],
        "time": (1_700_000_000 + generator.permutation(COUNT) * 100).tolist(),
        "click": generator.integers(2, size=COUNT).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("rows_at_once", [1000, 40])
def test_files_and_requests_give_the_same_features(tmp_path, rows_at_once):
    rows = rows_of()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = config_of(tmp_path, rows_at_once=rows_at_once)
    source = build_source(config)
    run = tmp_path / "run"
    source.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    read = RequestReader(run, source.spec)
    differing = set()
    for number in range(source.num_requests("train")):
        expected = source.batch("train", np.array([number]))
        asked = [rows[index] for index in expected.row.tolist()]
        own = [row for row in rows if row["user"] == asked[0]["user"]]
        request = {name: asked[0][name] for name in ("user", "country")}
        candidates = [{name: row[name] for name in ("item", "brand", "price")} for row in asked]
        if len({row["country"] for row in asked}) > 1:
            continue  # a request has one country
        actual = read(request, candidates, {"seen": own}, int(expected.request_time[0]))
        for name in ("request_sparse", "candidate_sparse", "histories", "history_times"):
            left, right = getattr(actual, name), getattr(expected, name)
            assert left.keys() == right.keys()
            assert torch.equal(left.values(), right.values())
            assert torch.equal(left.lengths(), right.lengths())
        assert torch.equal(actual.candidate_dense, expected.candidate_dense)
        differing |= {tuple(row) for row in expected.candidate_dense.tolist()}
    assert len(differing) > 20
    assert source.spec.tables["band"] == 5  # 4 intervals and the row of missing ids
    assert 2 < source.spec.tables["country_brand"] <= 1 + 3 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_categorical": ["item", "country_brand", "band", "small"]}, "data.transforms.small makes numbers"),
        ({"candidate_numeric": ["band", "capped", "small"]}, "data.transforms.band makes ids"),
        ({"request_list": ["group"]}, "data.transforms.group makes one value a row"),
        ({"transforms": {"brand": TransformConfig(hash="item", buckets=2)}}, "has a column 'brand', which"),
        ({"transforms": {"unused": TransformConfig(log="price")}}, "data.transforms.unused makes a column that no"),
        ({"transforms": {"small": TransformConfig(log="brand")}}, "column 'brand' is b., expected a finite number"),
    ],
)
def test_errors_name_the_transform_or_the_row(tmp_path, changes, message):
    pq.write_table(pa.Table.from_pylist(rows_of()), tmp_path / "rows.parquet")
    plain = {
        "request_categorical": ["user"],
        "candidate_categorical": ["item", "brand"],
        "candidate_numeric": ["small"],
        "missing_indicator": [],
        "histories": {},
        "transforms": {"small": TransformConfig(log="price")},
    }
    config = config_of(tmp_path, **(plain if "transforms" in changes else {}))
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        build_source(config)


def test_a_run_that_goes_on_must_keep_the_transforms(tmp_path):
    pq.write_table(pa.Table.from_pylist(rows_of()), tmp_path / "rows.parquet")
    first = build_source(config_of(tmp_path))
    first.keep_mapping(tmp_path / "run")
    again = config_of(tmp_path, vocabulary_of=str(tmp_path / "run"))
    assert build_source(again).extends == first.fingerprint
    assert [*again.transformed()["small"]][-3:] == ["lookup", "table", "default"]  # as of before, for fingerprints
    assert "small" in Transforms(again.transformed())
    again.transforms["band"].edges = [0.5, 1.0, 3.0]
    with pytest.raises(ValueError, match=r"made columns by data\.transforms="):
        build_source(again)
    other = config_of(tmp_path)
    other.transforms["band"].edges = [0.5, 1.0, 3.0]
    assert build_source(other).fingerprint != first.fingerprint
