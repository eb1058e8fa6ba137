"""Metrics by segment: rows find their columns again, segments share out the rows, and a gap has the right sign."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modules.models.baselines import DLRM
from train.commands import segments
from train.config.schema import (
    CheckpointConfig,
    Config,
    EventsConfig,
    MovieLensConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
    TrackingConfig,
)
from train.metrics import paired_gaps
from train.process.files import write_json

ROWS = 600


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run on two files leaves behind whose test split are the rows from 200 on."""
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "item": generator.integers(30, size=ROWS),
            "country": generator.choice(["de", "fr", "us", ""], ROWS, p=[0.6, 0.2, 0.1, 0.1]),
            "price": pa.array(generator.normal(size=ROWS), mask=generator.random(ROWS) < 0.1),
            "click": generator.integers(2, size=ROWS),
        }
    )
    for part in range(2):
        pq.write_table(table.slice(part * ROWS // 2, ROWS // 2), tmp_path / f"log{part}.parquet")
    data = EventsConfig(
        root=str(tmp_path),
        files=["log*.parquet"],
        labels={"click": "click"},
        candidate_categorical=["item"],
        candidate_numeric=["price"],
    )
    write_predictions(tmp_path / "run", np.arange(200, ROWS), table["click"].to_numpy()[200:], 0.5)
    config = Config(
        model=DLRM.Config(),
        data=data,
        precision=PrecisionConfig(name="fp32"),
        optimizer=OptimizerConfig(),
        parallel=ParallelConfig(),
        checkpoint=CheckpointConfig(),
        tracking=TrackingConfig(),
        runtime=RuntimeConfig(),
    )
    write_json(tmp_path / "run" / "config.json", {"config": dataclasses.asdict(config)})
    write_json(tmp_path / "run" / "results.json", {"label_rates": {"click": 0.4}})
    return tmp_path / "run"


def write_predictions(run_dir: Path, row: np.ndarray, label: np.ndarray, skill: float) -> None:
    generator = np.random.default_rng(1)
    folder = run_dir / "predictions" / "test"
    folder.mkdir(parents=True)
    logit = (skill * (2 * label - 1) + generator.normal(size=len(row))).astype(np.float32)
    columns = {
        "row": row,
        "group": row % 40,
        "events": np.where(row % 4, row % 7, 0),
        "weight": generator.choice([1, 2], len(row)).astype(np.float32),
        "click_label": label.astype(np.float32),
        "click_logit": logit,
        "click_probability": 1 / (1 + np.exp(-logit)),
    }
    for part in range(2):  # as two ranks write them
        share = pa.table({name: column[part::2] for name, column in columns.items()})
        pq.write_table(share, folder / f"part-{part:05d}.parquet")


def test_each_row_is_in_one_segment_of_a_column(run_dir: Path) -> None:
    records = segments.main([f"run_dir={run_dir}", "by=country,price,events,item", "most=2"])
    assert (run_dir / "segments.json").exists()
    by_column: dict[str, dict[str, float]] = {}
    for record in records:
        by_column.setdefault(record["column"], {})[record["value"]] = record["metrics"]["click/examples"]
    assert {column: sum(counts.values()) for column, counts in by_column.items()} == dict.fromkeys(by_column, 400)
    assert list(by_column) == ["", "country", "price", "events", "item"]
    assert list(by_column["country"]) == ["de", "fr", "(others)", "(missing)"]
    assert len(by_column["price"]) == segments.RANGES + 1
    assert list(by_column["events"]) == ["0", "1 to 1", "2 to 2", "3 to 4", "5 to 5", "6 to 6"]
    *ranges, _ = by_column["price"].values()
    assert max(ranges) - min(ranges) <= 1


@pytest.mark.parametrize(
    ("numbers", "ranges"),
    [
        ([2, np.nan, 2], {"2 to 2": 2}),
        ([np.nan], {}),
        ([*range(1, 11)], {"1 to 2": 2, "3 to 4": 2, "5 to 6": 2, "7 to 8": 2, "9 to 10": 2}),
        ([1, 5, *[16] * 18], {"1 to 5": 2, "16 to 16": 18}),
        ([*[-3] * 18, 5, 7], {"-3 to -3": 18, "5 to 7": 2}),
    ],
)
def test_equal_numbers_are_in_one_range(numbers: list[float], ranges: dict[str, int]) -> None:
    assert {value: mask.sum() for value, mask in segments._ranges(np.array(numbers, np.float64))} == ranges


def test_lengths_of_histories_are_segments_of_a_run_on_any_data(run_dir: Path) -> None:
    about = json.loads((run_dir / "config.json").read_text())
    about["config"]["data"] = dataclasses.asdict(MovieLensConfig())
    write_json(run_dir / "config.json", about)
    records = segments.main([f"run_dir={run_dir}", "by=events"])
    assert sum(record["metrics"]["click/examples"] for record in records[1:]) == 400
    with pytest.raises(ValueError, match="by=country reads columns of data=events; this run is of data=movielens"):
        segments.main([f"run_dir={run_dir}", "by=events,country"])


def test_a_segment_holds_the_rows_with_its_value(run_dir: Path) -> None:
    records = segments.main([f"run_dir={run_dir}", "by=country"])
    table = pq.read_table(sorted(run_dir.parent.glob("log*.parquet")))
    chosen = (np.array(table["country"].to_pylist()) == "us")[200:]
    predictions = {name: each[chosen] for name, each in segments.read_predictions(run_dir / "predictions/test").items()}
    (found,) = (record["metrics"] for record in records if record["value"] == "us")
    assert found == segments.metrics(predictions, {"click": 0.4})
    clicked = table["click"].to_numpy()[200:][chosen]
    assert found["click/label_rate"] == np.average(clicked, weights=predictions["weight"])


def test_the_gap_is_that_of_this_run_to_the_other(run_dir: Path) -> None:
    ours = segments.read_predictions(run_dir / "predictions/test")
    write_predictions(run_dir.parent / "other", ours["row"], ours["click_label"], 0)
    (record,) = segments.main([f"run_dir={run_dir}", f"against={run_dir.parent / 'other'}", "resamples=20"])
    theirs = segments.read_predictions(run_dir.parent / "other/predictions/test")
    expected = paired_gaps(
        ours["click_label"],
        theirs["click_logit"],
        ours["click_logit"],
        base_rate=0.4,
        group=ours["group"],
        weights=ours["weight"],
        resamples=20,
    )
    assert record["gaps"]["click/ne_percent"] == expected["ne_percent"].estimate < 0
    assert 0 < record["gaps"]["click/auc_low"] < record["gaps"]["click/auc"] < record["gaps"]["click/auc_high"]


def test_a_run_on_other_rows_is_refused(run_dir: Path) -> None:
    write_predictions(run_dir.parent / "other", np.arange(400), np.zeros(400), 0)
    with pytest.raises(ValueError, match="was tested on other rows, tasks or labels: row differs; evaluate both"):
        segments.main([f"run_dir={run_dir}", f"against={run_dir.parent / 'other'}"])


def test_predictions_of_other_files_need_the_overrides_that_they_were_made_with(run_dir: Path) -> None:
    later = run_dir.parent / "later.parquet"
    pq.write_table(pa.table({"item": [1] * 5, "country": ["it"] * 5, "price": [1.0] * 5, "click": [1] * 5}), later)
    write_predictions(run_dir.parent / "later", np.arange(ROWS, ROWS + 5), np.ones(5), 0)
    arguments = [f"run_dir={run_dir}", f"predictions={run_dir.parent / 'later'}", "by=country"]
    with pytest.raises(ValueError, match=r"predictions are of other files than the run's; .*data\.test_files"):
        segments.main(arguments)
    records = segments.main([*arguments, "data.test_files=[later.parquet]"])
    assert [(record["value"], record["metrics"]["click/examples"]) for record in records] == [("", 5), ("it", 5)]


def test_what_is_no_run_and_what_has_no_columns_is_told(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no finished run .* name one, e.g. run_dir=runs/first"):
        segments.main([f"run_dir={tmp_path / 'nowhere'}"])
    with pytest.raises(ValueError, match=f"{tmp_path} holds no predictions; name a finished run, or the folder"):
        segments.main([f"run_dir={run_dir}", f"against={tmp_path}"])
    with pytest.raises(ValueError, match="agianst is no key of the configuration"):
        segments.main([f"run_dir={run_dir}", f"agianst={run_dir}"])
    with pytest.raises(ValueError, match="no column 'town'"):
        segments.main([f"run_dir={run_dir}", "by=town"])
    with pytest.raises(ValueError, match="most=0 must be a number of at least 1, e.g. most=10"):
        segments.main([f"run_dir={run_dir}", "most=0"])
