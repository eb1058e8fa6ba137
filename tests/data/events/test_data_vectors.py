"""Columns of vectors: files, text and joined tables, scaling, missing and malformed ones, batches and requests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.sources import events_config, source_of, whole
from train.commands import importance
from train.config.schema import EventsConfig, JoinConfig, VectorConfig
from train.data import build_source, events
from train.data.reader import RequestReader
from train.data.summary import summarise
from train.serving.formats import from_arrow
from train.serving.scorer import _refuse_not_finite

ROWS, WIDTH = 200, 3
IMAGES = np.random.default_rng(1).normal(2, 3, (ROWS, WIDTH)).astype(np.float32)
MISSING = 7  # a row without an image


def config_of(folder: Path, **changes: Any) -> EventsConfig:
    """Rows in time order, each with the text of its user and an image of its own."""
    generator = np.random.default_rng(0)
    image = [None if row == MISSING else vector.tolist() for row, vector in enumerate(IMAGES)]
    table = {
        "user": pa.array(generator.integers(9, size=ROWS)),
        "item": pa.array(generator.integers(20, size=ROWS)),
        "time": pa.array(np.arange(ROWS) * 100),
        "price": pa.array(generator.random(ROWS)),
        "image": pa.array(image, pa.list_(pa.float32(), WIDTH)),
        "text": pa.array(IMAGES[:, :2].tolist(), pa.list_(pa.float64())),
        "click": pa.array(generator.integers(2, size=ROWS)),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    settings: dict[str, Any] = {
        "request_window": 250, "candidate_numeric": ["price"],
        "request_vectors": {"text": VectorConfig(2, scale="none")}, "candidate_vectors": {"image": VectorConfig(WIDTH)},
    }  # fmt: skip
    return events_config(folder, **settings | changes)


def test_vectors_are_columns_behind_the_numbers(tmp_path: Path) -> None:
    source = source_of(config_of(tmp_path))
    assert source.spec.request_columns == ("text[0]", "text[1]")
    assert source.spec.candidate_columns == ("price", "image[0]", "image[1]", "image[2]")
    train = whole(source, "train")
    rows = train.row.numpy()
    trained = IMAGES[rows[rows != MISSING]].astype(np.float64)
    for split in ("train", "test"):
        batch = whole(source, split)
        rows = batch.row.numpy()
        expected = (IMAGES[rows] - trained.mean(0)) / trained.std(0)
        expected[rows == MISSING] = 0
        np.testing.assert_allclose(batch.candidate_dense[:, 1:], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(batch.request_dense, IMAGES[rows[batch.candidate_offsets[:-1].numpy()], :2])
    assert source.missing()["image"] == pytest.approx(1 / len(train.row))
    assert "image" in summarise(source)[1]


@pytest.mark.parametrize("through", ["disk", "text", "separated", "joined"])
def test_vectors_are_the_same_wherever_they_stand(tmp_path: Path, through: str) -> None:
    config = config_of(tmp_path)
    expected = source_of(config)
    table = pq.read_table(tmp_path / "rows.parquet")
    image = table["image"].to_pylist()
    changes: dict[str, Any] = {}
    if through == "disk":
        changes["rows_at_once"] = 30
    elif through == "joined":
        table = table.drop_columns("image").append_column("photo", pa.array(range(ROWS)))
        keep = [row for row in range(ROWS) if row != MISSING]
        photos = {"photo": keep, "image": [image[row] for row in keep]}
        pq.write_table(pa.table(photos), tmp_path / "photos.parquet")
        changes["joins"] = [JoinConfig(["photos.parquet"], "photo")]
    else:
        written = [json.dumps(v) if through == "text" else "|".join(map(str, v or [])) for v in image]
        texts = pa.array([None if text == "null" else text for text in written])
        table = table.set_column(table.schema.get_field_index("image"), "image", texts)
    pq.write_table(table, tmp_path / "other.parquet")
    other = source_of(dataclasses.replace(config, files=["other.parquet"], **changes))
    assert other.fingerprint == expected.fingerprint
    for split in ("train", "valid", "test"):
        batch, same = whole(other, split), whole(expected, split)
        assert torch.equal(batch.candidate_dense, same.candidate_dense)
        assert torch.equal(batch.request_dense, same.request_dense)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0, 2.0], r"row 5.*column 'image' is \[1.0, 2.0\], expected 3 numbers or nothing"),
        ([1.0, float("nan"), 2.0], r"row 5.*column 'image' is \[1.0, nan, 2.0\], expected finite numbers"),
        ([1.0, None, 2.0], r"row 5.*column 'image' is \[1.0, None, 2.0\], expected finite numbers"),
        ([1.0, float("inf"), 2.0], r"row 5.*column 'image' is \[1.0, inf, 2.0\], expected finite numbers"),
        ([1.0, 1e300, 2.0], r"row 5.*column 'image' is \[1.0, 1e\+300, 2.0\], expected finite numbers"),
    ],
)
def test_a_malformed_vector_names_its_row(tmp_path: Path, vector: list[Any], message: str) -> None:
    config = config_of(tmp_path)
    table = pq.read_table(tmp_path / "rows.parquet")
    image = table["image"].to_pylist()
    image[4] = vector
    table = table.set_column(table.schema.get_field_index("image"), "image", pa.array(image, pa.list_(pa.float64())))
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        build_source(config)
    skipping = source_of(dataclasses.replace(config, bad_rows="skip"))
    assert 4 not in whole(skipping, "train").row.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"candidate_vectors": {"price": VectorConfig(3)}, "candidate_numeric": []},
            "'price'.*expected a list of single values or text",
        ),
        ({"candidate_numeric": ["image"]}, "'image' is a vector"),
        ({"request_vectors": {"image": VectorConfig(3)}}, "both name 'image'"),
    ],
)
def test_what_is_no_vector_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_source(config_of(tmp_path, **changes))


def test_requests_bring_vectors(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    source = source_of(config)
    source.keep_mapping(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    reader = RequestReader(tmp_path / "run", source.spec)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    batch = whole(source, "train")
    numbers = batch.row[batch.candidate_offsets[2] : batch.candidate_offsets[3]].tolist()
    request = {
        "request": rows[numbers[0]],
        "candidates": [rows[number] for number in numbers],
        "histories": {},
        "time": rows[numbers[0]]["time"],
    }
    made = reader.batch([request])
    first, end = batch.candidate_offsets[2:4].tolist()
    assert torch.equal(made.request_dense, batch.request_dense[2:3])
    torch.testing.assert_close(made.candidate_dense, batch.candidate_dense[first:end])
    keys = ("user", "text")
    arrow = pa.Table.from_pylist(
        [{**request, "request": {key: rows[numbers[0]][key] for key in keys}, "histories": {"no": []}}]
    )
    (given,) = from_arrow(arrow)
    assert torch.equal(reader.batch([given | {"histories": {}}]).candidate_dense, made.candidate_dense)
    for wrong in ([1.0], "text", [1.0, float("nan")], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"the request has text=.*it must be 2 finite numbers"):
            reader.batch([{**request, "request": rows[0] | {"text": wrong}}])
    made.candidate_dense[0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"candidate 0 has image\[1\]=nan"):
        _refuse_not_finite(made, source.spec)


def test_a_later_run_keeps_the_scale(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    source = source_of(config)
    source.keep_mapping(tmp_path / "run")
    table = pq.read_table(tmp_path / "rows.parquet").slice(100)
    pq.write_table(table, tmp_path / "later.parquet")
    later = dataclasses.replace(config, files=["later.parquet"], vocabulary_of=str(tmp_path / "run"))
    first, again = whole(source, "test"), whole(source_of(later), "test")
    np.testing.assert_array_equal(first.candidate_dense[-3:], again.candidate_dense[-3:])
    other = dataclasses.replace(later, candidate_vectors={"image": VectorConfig(WIDTH, scale="none")})
    with pytest.raises(ValueError, match=r"was given 'image' with scale=standard, this configuration has none"):
        build_source(other)


def test_a_vector_is_dealt_out_as_one_feature(tmp_path: Path) -> None:
    source = source_of(config_of(tmp_path))
    batch = whole(source, "train")
    assert {"text", "image", "price"} < set(importance.features_of(source.spec))
    other = importance.permuted(batch, source.spec, "image", torch.Generator().manual_seed(0))
    assert torch.equal(other.candidate_dense[:, 0], batch.candidate_dense[:, 0])
    assert not torch.equal(other.candidate_dense[:, 1:], batch.candidate_dense[:, 1:])
    assert sorted(other.candidate_dense[:, 1:].tolist()) == sorted(batch.candidate_dense[:, 1:].tolist())
    assert torch.equal(other.request_dense, batch.request_dense)


def test_the_configuration_names_features(tmp_path: Path) -> None:
    spec = events.feature_spec(config_of(tmp_path))
    assert (spec.num_request_tokens, spec.num_candidate_tokens) == (2, 3)
    assert type(spec).from_dict(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
