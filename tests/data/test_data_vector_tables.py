"""Tables whose rows are vectors from files: which row an id has, what the rows hold, later runs, requests, errors."""

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

from modules.batch import FeatureSpec
from tests.data.sources import events_config, source_of
from train.config.schema import EventsConfig, HistoryConfig, TableVectorsConfig, TransformConfig
from train.data import build_source
from train.data.reader import RequestReader

ROWS, ITEMS, WIDTH = 200, 30, 5
VECTORS = np.random.default_rng(1).normal(2, 3, (ITEMS, WIDTH)).astype(np.float32)
WITHOUT = 7  # an item without a vector; items from 20 on are in no row


def write_vectors(folder: Path, items: range = range(ITEMS)) -> None:
    kept = [item for item in items if item != WITHOUT]
    vectors = [VECTORS[item].tolist() for item in kept]
    table = {"id": [*kept, 1000], "embedding": pa.array([*vectors, None], pa.list_(pa.float32()))}
    pq.write_table(pa.table(table), folder / "vectors.parquet")


def config_of(folder: Path, scale: str = "standard", **changes: Any) -> EventsConfig:
    """Rows in time order with lists of earlier items, the content of which is a table from a file."""
    generator = np.random.default_rng(0)
    seen = generator.integers(20, size=(ROWS, 3))
    table = {
        "user": pa.array(generator.integers(9, size=ROWS)),
        "item": pa.array(generator.integers(20, size=ROWS)),
        "time": pa.array(np.arange(ROWS) * 100),
        "seen": pa.array([row[: generator.integers(4)].tolist() for row in seen]),
        "click": pa.array(generator.integers(2, size=ROWS)),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    write_vectors(folder)
    given = TableVectorsConfig(WIDTH, scale, ["vectors.parquet"], "id", "embedding")
    settings: dict[str, Any] = {
        "candidate_categorical": ["item", "content"], "table_vectors": {"content": given},
        "tables": {"seen": "item", "seen_content": "content"},
        "transforms": {"content": TransformConfig(copy="item"), "seen_content": TransformConfig(copy="seen")},
        "histories": {
            "click": HistoryConfig(["item", "content"], where={"click": 1}),
            "seen": HistoryConfig(["seen", "seen_content"], lists=True),
        },
    }  # fmt: skip
    return events_config(folder, **settings | changes)


def standard(items: np.ndarray) -> np.ndarray:
    known = np.delete(VECTORS, WITHOUT, 0).astype(np.float64)
    scaled = (VECTORS[items] - known.mean(0)) / known.std(0)
    scaled[items == WITHOUT] = 0
    return scaled


@pytest.mark.parametrize(
    "changes",
    [{}, {"rows_at_once": 30}, {"id_map": "hash", "hash_rows": 11}, {"min_count": 3, "oov_rows": 2}],
    ids=["memory", "disk", "hash", "oov"],
)
def test_every_id_finds_its_vector(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = source_of(config_of(tmp_path, **changes))
    table = source.vectors("content")
    assert table.shape == (source.spec.tables["content"], 8)  # a multiple of 4
    assert table.shape[0] == ITEMS + changes.get("oov_rows", 0)  # one without, and row 0
    assert not table[:, WIDTH:].any()
    rows = pq.read_table(tmp_path / "rows.parquet").to_pydict()
    for split in ("train", "test"):
        batch = source.batch(split, np.arange(source.num_requests(split)))
        items = np.array(rows["item"])[batch.row]
        found = table[batch.candidate_sparse["content"].values().numpy()]
        np.testing.assert_allclose(found[:, :WIDTH], standard(items), rtol=1e-4, atol=1e-5)
        seen = [item for row in batch.row[batch.candidate_offsets[:-1]].tolist() for item in rows["seen"][row]]
        events = table[batch.histories["seen.seen_content"].values().numpy()]
        np.testing.assert_allclose(events[:, :WIDTH], standard(np.array(seen)), rtol=1e-4, atol=1e-5)


def test_lists_and_events_look_up_the_same_rows(tmp_path: Path) -> None:
    source = source_of(config_of(tmp_path, id_map="hash", hash_rows=1_000_000))
    batch = source.batch("train", np.arange(source.num_requests("train")))
    for event, fields in (("click", ("item", "content")), ("seen", ("seen", "seen_content"))):
        plain, given = (batch.histories[f"{event}.{field}"] for field in fields)
        assert plain.lengths().equal(given.lengths())
        pairs = {*zip(plain.values().tolist(), given.values().tolist(), strict=True)}
        assert len(pairs) == len(plain.values().unique())  # each id has one row


def test_numbers_as_they_are_in_half_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, "none")
    config.table_vectors["content"].dtype = "fp16"
    with caplog.at_level(logging.INFO):
        source = source_of(config)
    assert "'content': 29 ids have a vector of 5 numbers (1 in the files without one); 1 ids of the" in caplog.text
    table = source.vectors("content")
    assert table.dtype == np.float16
    assert {tuple(row) for row in table[1:, :WIDTH]} == {
        tuple(row) for row in np.delete(VECTORS, WITHOUT, 0).astype(np.float16)
    }
    assert FeatureSpec.from_dict(json.loads(json.dumps(dataclasses.asdict(source.spec)))) == source.spec
    config.table_vectors["content"].scale = "none"
    pq.write_table(pa.table({"id": [1], "embedding": [[1e5] * WIDTH]}), tmp_path / "vectors.parquet")
    with pytest.raises(ValueError, match=r"numbers of up to 1e\+05 do not fit into dtype=fp16; use dtype: fp32"):
        build_source(config)


def test_other_vectors_are_other_data(tmp_path: Path) -> None:
    config = config_of(tmp_path, "none")
    before = source_of(config).fingerprint
    write_vectors(tmp_path)
    assert source_of(config).fingerprint == before
    table = pq.read_table(tmp_path / "vectors.parquet").to_pydict()
    table["embedding"][0][0] += 1
    pq.write_table(pa.table(table), tmp_path / "vectors.parquet")
    assert source_of(config).fingerprint != before


@pytest.mark.parametrize("id_map", ["vocabulary", "hash"])
def test_a_later_run_keeps_rows_and_scale(tmp_path: Path, id_map: str) -> None:
    config = config_of(tmp_path, id_map=id_map, hash_rows=50)
    write_vectors(tmp_path, range(10))
    first = source_of(config)
    first.keep_mapping(tmp_path / "run")
    write_vectors(tmp_path)
    later = source_of(dataclasses.replace(config, vocabulary_of=str(tmp_path / "run")))
    assert later.extends == first.fingerprint
    before, after = first.vectors("content"), later.vectors("content")
    assert len(before) == 10
    assert len(after) == ITEMS
    np.testing.assert_allclose(after[:10], before, atol=1e-6)
    same = source_of(dataclasses.replace(config, vocabulary_of=str(tmp_path / "run"), new_ids=False))
    np.testing.assert_allclose(same.vectors("content"), before, atol=1e-6)
    with pytest.raises(ValueError, match=r"was given vectors for the tables \['content'\].*has data.table_vectors of"):
        source_of(dataclasses.replace(config, vocabulary_of=str(tmp_path / "run"), table_vectors={}))


@pytest.mark.parametrize("id_map", ["vocabulary", "hash"])
def test_a_request_names_the_id_once(tmp_path: Path, id_map: str) -> None:
    config = config_of(tmp_path, id_map=id_map, hash_rows=50)
    source = source_of(config)
    source.keep_mapping(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    reader = RequestReader(tmp_path / "run", source.spec)
    events = {"click": [{"item": 3, "time": 5}], "seen": [{"seen": 4}, {"seen": WITHOUT}]}
    batch = reader({"user": 1}, [{"item": 2}, {"item": "25"}, {"item": 1000}], events, 10)
    table = source.vectors("content")
    found = table[batch.candidate_sparse["content"].values().numpy()][:, :WIDTH]
    np.testing.assert_allclose(found, [*standard(np.array([2, 25])), np.zeros(WIDTH)], atol=1e-5)
    for key, items in (("click.content", [3]), ("seen.seen_content", [4, WITHOUT])):
        found = table[batch.histories[key].values().numpy()][:, :WIDTH]
        np.testing.assert_allclose(found, standard(np.array(items)), atol=1e-5)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("id", [3, 4, 3], r"vectors.parquet, row 3: id=3 is a repeated id"),
        ("id", [3, None, 5], r"vectors.parquet, row 2: column 'id' is None, expected an id"),
        ("embedding", [[1.0] * 5, [1.0], None], r"vectors.parquet, row 2: column 'embedding' is .*expected 5 numbers"),
        ("embedding", [None] * 3, r"data.table_vectors.content: no id of vectors.parquet has a vector"),
    ],
)
def test_malformed_files_of_vectors_name_their_row(
    tmp_path: Path, column: str, values: list[Any], message: str
) -> None:
    config = config_of(tmp_path)
    table = {"id": [1, 2, 3], "embedding": [[0.5] * WIDTH] * 3} | {column: values}
    lists = pa.array(table["embedding"], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": table["id"], "embedding": lists}), tmp_path / "vectors.parquet")
    with pytest.raises(ValueError, match=message):
        build_source(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_categorical": ["item"], "histories": {}, "tables": {}, "transforms": {}},
         r"content is no table of a feature.*copy the column, e.g. data.transforms=\{content: \{copy: item_id\}\}"),
        ({"table_vectors": {"content": TableVectorsConfig(5, "standard", ["vectors.parquet"], "id", "embedding",
          dtype="fp16", frozen=False)}}, "dtype=fp16 goes with frozen: true"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_source(config_of(tmp_path, **changes))
