"""Vendors in `events`: batches against a plain reading of the rows; what changes batches keeps them whole."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from modules.batch import RequestBatch
from modules.costs.flops import count_flops
from modules.layers.embedding.local import LocalEmbedding
from modules.models import build
from modules.models.baselines import DCNv2
from tests.data.sources import events_config, source_of, whole
from tests.modules.factories import random_batch, vendor_spec
from train.commands import importance
from train.config.schema import EventsConfig, HistoryConfig, VectorConfig
from train.data import build_source, events
from train.data.batch import empty_batch, pad_events
from train.data.loading.dropout import drop_ids
from train.data.loading.loader import LoaderOptions, build_loader
from train.data.loading.sampling import sample_negatives
from train.data.reader import RequestReader
from train.data.requests import sorted_by_vendor, vendor_runs
from train.data.source import PreparedSource
from train.data.summary import summarise

COUNT = 300


def make_rows() -> list[dict[str, Any]]:
    """Requests of up to six rows, in which a shop comes up again after others; a shop's features are its own."""
    generator = np.random.default_rng(0)
    shop = generator.integers(4, size=COUNT).tolist()
    fame = [None, 0.5, 2.0, 7.0]
    tags: list[list[str]] = [["a", "b"], [], ["b"], ["c", "a"]]
    columns = {
        "user": generator.integers(12, size=COUNT).tolist(),
        "time": (1000 + 100 * generator.integers(40, size=COUNT)).tolist(),
        "item": generator.integers(20, size=COUNT).tolist(),
        "shop": [f"s{each}" for each in shop],
        "town": [f"town{each % 2}" for each in shop],
        "tags": [tags[each] for each in shop],
        "fame": [fame[each] for each in shop],
        "photo": [[None, [0.5, -1.0], [2.0, 0.25], [0.0, 3.0]][each] for each in shop],
        "click": generator.integers(2, size=COUNT).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def config_of(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> EventsConfig:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    settings: dict[str, Any] = {
        "request_window": 2000, "vendor": "shop", "vendor_categorical": ["shop", "town"],
        "vendor_list": ["tags"], "vendor_numeric": ["fame"], "missing_indicator": ["fame"],
        "vendor_vectors": {"photo": VectorConfig(2, "none")},
        "histories": {"seen": HistoryConfig(["item", "shop"])},
    }  # fmt: skip
    return events_config(folder, **settings | changes)


def check(batch: RequestBatch) -> None:
    """The offsets of the two levels agree."""
    assert batch.vendors is not None
    of_requests, of_vendors = batch.vendors.offsets, batch.vendors.candidate_offsets
    assert len(of_requests) == batch.num_requests + 1
    assert len(of_vendors) == batch.vendors.num_vendors + 1 == batch.vendors.sparse.stride() + 1
    assert torch.equal(of_vendors[of_requests], batch.candidate_offsets)
    assert (of_vendors.diff() >= 0).all()
    assert (of_vendors[-1], of_requests[-1]) == (batch.num_candidates, batch.vendors.num_vendors)


def features_of(batch: RequestBatch) -> dict[str, list[Any]]:
    """Of each candidate the ids and numbers of its vendor."""
    twin = batch.expand().vendors
    assert twin is not None
    ids = {key: twin.sparse[key] for key in twin.sparse.keys()}
    found = {key: [part.tolist() for part in x.values().split(x.lengths().tolist())] for key, x in ids.items()}
    return found | {"dense": twin.dense.tolist()}


@pytest.mark.parametrize("split", ["train", "test"])
def test_vendors_are_runs_of_candidates_with_the_features_of_their_rows(tmp_path: Path, split: str) -> None:
    rows = make_rows()
    source = source_of(config_of(tmp_path, rows))
    plain = {"vendor": None, "vendor_categorical": [], "vendor_list": [], "vendor_numeric": [], "vendor_vectors": {}}
    of_candidates = {"candidate_categorical": ["item", "shop", "town"], "candidate_list": ["tags"]}
    of_candidates["candidate_vectors"] = {"photo": VectorConfig(2, "none")}
    other = source_of(config_of(tmp_path, rows, **plain, **of_candidates, candidate_numeric=["fame"]))
    batch, flat = whole(source, split), whole(other, split)
    check(batch)
    vendors = batch.vendors
    assert vendors is not None
    assert batch.num_requests < vendors.num_vendors < batch.num_candidates
    # A request has each vendor once, its candidates are neighbours, and its first candidate is still the first.
    shops = [rows[row]["shop"] for row in batch.row.tolist()]
    own = torch.repeat_interleave(torch.arange(vendors.num_vendors), vendors.candidate_offsets.diff()).tolist()
    pairs = {(request, shop) for request, shop in zip(batch.owner.tolist(), shops, strict=True)}
    assert len(pairs) == len(set(zip(own, shops, strict=True))) == vendors.num_vendors
    first = batch.candidate_offsets[:-1]
    assert torch.equal(batch.row[first], flat.row[flat.candidate_offsets[:-1]])
    assert torch.equal(batch.histories.values(), flat.histories.values())
    # The same values as if they were features of candidates, whose order within a request is another.
    assert batch.row.sort().values.equal(flat.row.sort().values)
    place = {row: index for index, row in enumerate(flat.row.tolist())}
    order = torch.tensor([place[row] for row in batch.row.tolist()])
    found = features_of(batch)
    for key in ("shop", "town", "tags"):
        column = flat.candidate_sparse[key]
        parts = [part.tolist() for part in column.values().split(column.lengths().tolist())]
        assert found[key] == [parts[index] for index in order.tolist()]
    assert found["dense"] == flat.candidate_dense[order].tolist()
    assert source.spec.vendor_dense == ("fame", "fame.missing")


@pytest.mark.parametrize("request_column", [None, "visit"])
def test_rows_prepared_through_the_disk_make_the_same_batches(tmp_path: Path, request_column: str | None) -> None:
    rows = [row | {"visit": row["time"] // 700} for row in make_rows()]
    config = config_of(tmp_path, rows, request=request_column, max_candidates=5)
    sources = []
    for name, rows_at_once in (("whole", 1000), ("streamed", 37)):
        (tmp_path / name).mkdir()
        events.prepare(dataclasses.replace(config, rows_at_once=rows_at_once), tmp_path / name)
        sources.append(PreparedSource(tmp_path / name, config.max_history))
    assert sources[0].meta == sources[1].meta
    for split in ("train", "valid", "test"):
        batches = [whole(source, split) for source in sources]
        check(batches[0])
        for ours, theirs in zip(*(batch._tensors() for batch in batches), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("rows_at_once", [1000, 37])
@pytest.mark.parametrize(
    ("column", "value"),
    [("town", "elsewhere"), ("tags", ["b", "a"]), ("tags", ["a", "b", "c"]), ("fame", 1.0), ("photo", [2.0, 0.0])],
)
def test_a_vendor_whose_features_differ_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: Any, rows_at_once: int
) -> None:
    rows = [row | {"time": 1000 + 4000 * index} for index, row in enumerate(make_rows())]
    rows[:3] = [rows[0] | {"shop": "s0", "town": "town0", "tags": ["a", "b"], "fame": None} for _ in range(3)]
    rows[2] = rows[2] | {column: value}
    config = config_of(tmp_path, rows, rows_at_once=rows_at_once)
    message = rf"rows\.parquet, row 3: column '{column}' is not as in .*rows\.parquet, row 1, .* same shop=s0 in the"
    with pytest.raises(ValueError, match=message):
        build_source(config)
    config.bad_rows = "skip"
    with caplog.at_level(logging.WARNING):
        batch = source_of(config).batch("train", np.array([0]))
    assert "1 rows count as the first of their vendor; the first is" in caplog.text
    assert batch.num_candidates == 3
    assert batch.vendors is not None
    assert batch.vendors.num_vendors == 1
    check(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vendor": None},
            r"data\.vendor_categorical=.* data\.vendor must name the column .*, e\.g\. data\.vendor=shop",
        ),
        (
            {
                "vendor_categorical": [],
                "vendor_list": [],
                "vendor_numeric": [],
                "vendor_vectors": {},
                "missing_indicator": [],
            },
            r"data\.vendor=shop has no feature; name at least one, e\.g\. data\.vendor_categorical=\[shop\]",
        ),
        ({"candidate_categorical": ["item", "shop"]}, r"unique over request, vendor, candidate .*\['shop'\]"),
        ({"vendor": "shops"}, "shops"),
    ],
)
def test_what_a_description_of_vendors_lacks_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_source(config_of(tmp_path, make_rows(), **changes))


def test_a_row_without_a_vendor_is_malformed(tmp_path: Path) -> None:
    rows = make_rows()
    rows[4]["shop"] = None
    with pytest.raises(ValueError, match=r"rows\.parquet, row 5: column 'shop' is None, expected an id"):
        build_source(config_of(tmp_path, rows))


def test_sorting_keeps_the_first_row_and_the_order_within_a_vendor() -> None:
    vendor = np.array([3, 1, 3, 1, 1, 2, 1])
    order, offsets = np.array([6, 5, 0, 1, 2, 3, 4]), np.array([0, 0, 2, 2, 7, 7])
    order = sorted_by_vendor(order, offsets, vendor)
    assert order.tolist() == [6, 5, 0, 2, 1, 3, 4]
    counts, candidates = vendor_runs(vendor[order], np.diff(offsets))
    assert (counts.tolist(), candidates.tolist()) == ([0, 2, 0, 2, 0], [1, 1, 2, 3])
    nothing = np.zeros(0, np.int64)
    assert sorted_by_vendor(nothing, np.zeros(3, np.int64), nothing).size == 0
    assert [each.tolist() for each in vendor_runs(nothing, np.zeros(2, np.int64))] == [[0, 0], []]


def test_loaders_keep_requests_and_vendors_whole(tmp_path: Path) -> None:
    source = source_of(config_of(tmp_path, make_rows()))
    settings: dict[str, Any] = {"batch_size": 3, "seed": 1, "world_size": 2, "shuffle": True, "prefetch": 2}
    loaders = [build_loader(source, "train", LoaderOptions(rank=rank, num_workers=0, **settings)) for rank in range(2)]
    batches = [batch for loader in loaders for batch in loader]
    for batch in batches:
        check(batch)
    seen = torch.cat([batch.row for batch in batches]).sort().values
    assert seen.equal(whole(source, "train").row.sort().values)
    more = build_loader(
        source,
        "train",
        LoaderOptions(rank=0, num_workers=0, negative_rate=0.3, id_dropout={"town": 0.5}, pad_events=8, **settings),
    )
    for batch in more:
        check(batch)
        assert len(batch.histories["seen.item"].values()) % 8 == 0
        kept = batch.vendors.candidate_offsets.diff()
        assert (kept > 0).all()


def test_changes_of_a_batch_keep_its_vendors() -> None:
    spec = vendor_spec()
    batch = random_batch(spec, (3, 0, 4), vendors=[[2, 1], [0], [0, 4]])
    check(empty_batch(spec))
    check(pad_events(batch, spec, 7))
    sampled = sample_negatives(batch, 0.0, 0, 0)
    check(sampled)
    expected, whose = features_of(batch), (batch.labels == 1).any(1).nonzero().squeeze(1).tolist()
    assert features_of(sampled) == {key: [values[index] for index in whose] for key, values in expected.items()}
    assert not sample_negatives(dataclasses.replace(batch, labels=batch.labels * 0), 0.0, 0, 0).vendors.num_vendors
    dropped = drop_ids(batch, spec, {"shop": 1.0}, 0, 0)
    check(dropped)
    assert not dropped.vendors.sparse["shop"].values().any()
    assert dropped.vendors.sparse["shop_tags"].values().equal(batch.vendors.sparse["shop_tags"].values())


def test_requests_in_plain_python_make_the_batches_of_the_files(tmp_path: Path) -> None:
    rows = make_rows()
    config = config_of(tmp_path, rows)
    source, run = source_of(config), tmp_path / "run"
    source.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config) | {"histories": {}}}}))
    read = RequestReader(run, source.spec)
    expected = source.batch("test", np.arange(4))
    asked = []
    for first, end in zip(
        expected.candidate_offsets[:-1].tolist(), expected.candidate_offsets[1:].tolist(), strict=True
    ):
        candidates = [rows[row] for row in expected.row[first:end].tolist()]
        asked.append({"request": candidates[0], "candidates": candidates, "histories": {"seen": []}, "time": 0})
    actual = read.batch(asked)
    check(actual)
    assert torch.equal(actual.vendors.candidate_offsets, expected.vendors.candidate_offsets)
    assert features_of(actual) == features_of(expected)
    # In any other order, too, where a vendor comes up again.
    request = {"request": rows[0], "histories": {"seen": []}, "time": 0}
    mixed = [
        rows[place] | {"shop": shop, "town": "town1", "tags": [], "fame": None, "photo": None}
        for place, shop in enumerate("xyx")
    ]
    again = read.batch([request | {"candidates": mixed}])
    assert again.vendors.candidate_offsets.tolist() == [0, 1, 2, 3]
    for change, message in (
        ({"town": "town0"}, "a candidate has town='town0', and another of the same shop='x' has 'town1'"),
        ({"tags": ["a"]}, r"a candidate has tags=\['a'\], and another"),
        ({"photo": [1.0, 2.0]}, r"a candidate has photo=\[1.0, 2.0\], and another of the same shop='x' has None"),
        ({"shop": None}, "a candidate has shop=None; it must have a vendor"),
    ):
        with pytest.raises(ValueError, match=message):
            read.batch([request | {"candidates": [mixed[0], mixed[0] | change]}])
    with pytest.raises(ValueError, match="has no 'shop'"):
        read.batch([request | {"candidates": [{key: value for key, value in rows[0].items() if key != "shop"}]}])


def test_a_vector_of_vendors_is_a_token_and_one_feature(tmp_path: Path) -> None:
    source = source_of(config_of(tmp_path, make_rows()))
    spec, batch = source.spec, whole(source, "train")
    assert spec.num_vendor_tokens == 5
    assert "photo" in importance.features_of(spec)
    embedding = LocalEmbedding(spec, 8)
    before = embedding(batch).vendor
    changed = importance.permuted(batch, spec, "photo", torch.Generator().manual_seed(0))
    after = embedding(changed).vendor
    assert before is not None
    assert after is not None
    moved = (before != after).flatten(2).any(2).any(0)
    assert before.shape[1:] == (5, 8)
    assert moved.tolist() == [False, False, False, True, False]  # ids, the vector, then all numbers
    assert changed.vendors is not None
    assert batch.vendors is not None
    assert torch.equal(changed.vendors.dense[:, :2], batch.vendors.dense[:, :2])
    assert "photo" in summarise(source)[1]


def test_flops_count_a_vendor_of_each_request() -> None:
    spec = vendor_spec()
    config = DCNv2.Config(dim=8)
    of_vendors = count_flops(build(config, spec), spec, 8)
    plain = dataclasses.replace(spec, vendor=(), vendor_dense=())
    assert of_vendors(3, 6, 10, 40) > count_flops(build(config, plain), plain, 8)(3, 6, 10, 40)
