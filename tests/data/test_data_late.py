"""Labels that are known later than their rows, and features that only rows have."""

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
from train.checkpoint.progress import Progress
from train.config.schema import EventsConfig, HistoryConfig, TransformConfig
from train.data.reader import RequestReader

START, ROWS = 1_700_000_000, 100
KNOWN = "bought_at"


def make_config(folder: Path, **changes: Any) -> EventsConfig:
    """A row an hour; a purchase is known ten hours later, and the last one is at hour 94."""
    generator, hour = np.random.default_rng(0), START + 3600 * np.arange(ROWS)
    buy = (generator.random(ROWS) < 0.4) & (np.arange(ROWS) < 95)
    buy[94] = True
    table = {
        "user": generator.integers(3, size=ROWS),
        "time": hour,
        "item": generator.integers(9, size=ROWS),
        "position": generator.integers(1, 6, size=ROWS),
        "buy": buy.astype(int),
        KNOWN: pa.array(hour + 36_000, mask=~buy),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    labels = {"labels": {"click": "user == 1", "buy": "buy"}, "request_categorical": []}
    return events_config(folder, **labels | {"known_at": {"buy": KNOWN}, "max_history": 200} | changes)


def labels_of(config: EventsConfig) -> np.ndarray:
    """[ROWS, tasks], in the order of rows."""
    source = source_of(config)
    parts = [whole(source, split) for split in ("train", "valid", "test")]
    row = torch.cat([part.row for part in parts]).numpy()
    return torch.cat([part.labels for part in parts]).numpy()[np.argsort(row)]


@pytest.mark.parametrize("rows_at_once", [1000, 30])
@pytest.mark.parametrize(
    ("changes", "final"),
    [
        ({}, 100),
        ({"matures_after": {"buy": 43_200}}, 93),  # the newest time is that of the last purchase, hour 104
        ({"as_of": str(START + 50 * 3600)}, 100),
        ({"as_of": "2023-11-17", "matures_after": {"buy": 36_000}}, 40),  # about 49.8 hours after the first row
    ],
)
def test_labels_that_are_not_final_are_missing(tmp_path, changes, final, rows_at_once):
    config = make_config(tmp_path, rows_at_once=rows_at_once, **changes)
    raw = pq.read_table(tmp_path / "rows.parquet")
    buy = raw["buy"].to_numpy().astype(float)
    buy[final:] = np.nan
    if changes.get("as_of", "").isdigit():
        buy[(raw[KNOWN].to_numpy() > int(changes["as_of"]))] = np.nan
    labels = labels_of(config)
    np.testing.assert_array_equal(labels[:, 1], buy)
    assert not np.isnan(labels[:, 0]).any()


@pytest.mark.parametrize("history", [{"where": {"buy": 1}}, {"known_at": KNOWN, "where": {"buy": ["1"]}}])
def test_an_event_enters_a_history_once_it_is_known(tmp_path, history):
    config = make_config(tmp_path, histories={"bought": HistoryConfig(["item"], **history)})
    raw = pq.read_table(tmp_path / "rows.parquet").to_pydict()
    batch = whole(source_of(config), "test")
    times = batch.history_times["bought.item" if "bought.item" in batch.history_times.keys() else "bought"]
    found = times.values().split(times.lengths().tolist())
    for row, mine in zip(batch.row.tolist(), found, strict=True):
        now, user = raw["time"][row], raw["user"][row]
        known = [at for at, whose in zip(raw[KNOWN], raw["user"], strict=True) if at and at < now and whose == user]
        assert mine.tolist() == sorted(known)


def test_a_task_without_a_label_keeps_an_earlier_rate(tmp_path):
    first = source_of(make_config(tmp_path))
    first.keep_mapping(tmp_path / "run")
    config = make_config(tmp_path, matures_after={"buy": 10_000_000}, cache_dir=str(tmp_path / "two"))
    assert source_of(config).label_rates() == first.label_rates() | {"buy": 0.0}
    later = source_of(dataclasses.replace(config, vocabulary_of=str(tmp_path / "run")))
    assert later.label_rates() == first.label_rates()
    assert later.missing()["buy"] == 1
    with pytest.raises(ValueError, match="no task of .* has an observed label in the training split"):
        source_of(dataclasses.replace(config, labels={"buy": "buy"}))


@pytest.mark.parametrize(
    ("rates", "ne"),
    [
        ({"click": 0.3, "buy": 0.1}, 1.0),
        ({"click": 0.3, "buy": 1.0}, 0.5),  # of a few early purchases
        ({"click": 0.3, "buy": float("nan")}, 0.5),
        ({"click": 0.0, "buy": 1.0}, 1.0),
    ],
)
def test_labels_of_one_class_do_not_choose(rates, ne):
    progress = Progress(step=1)
    values = {f"{task}/label_rate": rate for task, rate in rates.items()} | {"click/ne": 0.5, "buy/ne": 1.5}
    progress.judge(values, {"click": 0.3, "buy": 0.2}, {"click": 0.5, "buy": 0.5})
    assert progress.best_ne == ne


@pytest.mark.parametrize(
    "features",
    [
        {"candidate_categorical": ["item", "position"]},
        {"candidate_numeric": ["position"], "log_numeric": ["position"], "missing_indicator": ["*"]},
        {"candidate_categorical": ["item", "band"]},
    ],
)
def test_the_display_is_fixed_where_it_is_not_trained_on(tmp_path, features):
    of_band = "band" in features.get("candidate_categorical", [])
    if of_band:
        features = features | {"transforms": {"band": TransformConfig(bucketize="position", edges=[2.0])}}
    display = {"band": 0} if of_band else {"position": 1}
    plain = make_config(tmp_path, **features)
    config = dataclasses.replace(plain, display=display)
    source = source_of(config)
    with_values = source_of(plain)
    assert torch.equal(*(_display(each, "train") for each in (source, with_values)))
    fixed = _display(source, "test")
    assert len(fixed.unique(dim=0)) == 1
    assert len(_display(with_values, "test").unique(dim=0)) > 1
    run = tmp_path / "run"
    source.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    batch = RequestReader(run, source.spec)({}, [{"item": 3}], {}, START)
    mine = batch.candidate_dense if batch.candidate_dense.shape[1] else batch.candidate_sparse.values()[1:][:, None]
    assert torch.equal(mine.to(fixed.dtype), fixed[:1])


@pytest.mark.parametrize(("value", "told"), [(1, False), (0, True), ("first", True), (None, False)])
def test_a_display_that_no_row_had_is_told(value, told, tmp_path, caplog):
    source_of(make_config(tmp_path, candidate_categorical=["item", "position"], display={"position": value}))
    assert (f"data.display.position={value} is no id of the training rows" in caplog.text) == told


def _display(source: Any, split: str) -> torch.Tensor:
    batch = whole(source, split)
    if batch.candidate_dense.shape[1]:
        return batch.candidate_dense
    name = "band" if "band" in batch.candidate_sparse.keys() else "position"
    return batch.candidate_sparse[name].values()[:, None]


SHOWN = {
    "display": {"position": 1},
    "candidate_categorical": ["item", "position"],
    "transforms": {"place": TransformConfig(copy="position"), "both": TransformConfig(cross=["item", "place"])},
}


def test_wrong_keys_are_named(tmp_path):
    for changes, message in (
        ({"known_at": {"like": KNOWN}}, "data.known_at names 'like', which is no task"),
        ({"known_at": {"buy": "sold_at"}}, "no column 'sold_at'"),
        ({"known_at": {"buy": "position"}, "time_format": "%Y-%m-%d"}, "expected a time"),
        ({"matures_after": {"like": 1.0}}, "data.matures_after names 'like'"),
        ({"as_of": "soon"}, "data.as_of='soon' must be a time"),
        ({"display": {"position": 1}}, "data.display.position is no feature"),
        ({"display": {"position": "top"}, "candidate_numeric": ["position"]}, "must be a number"),
        (
            SHOWN | {"candidate_categorical": ["item", "position", "both"]},
            "'both' is made of 'position', which",
        ),
        (SHOWN | {"statistics": {"of": {"by": ["item", "place"]}}}, "of.by has 'position', which requests do not have"),
    ):
        with pytest.raises(ValueError, match=message):
            source_of(make_config(tmp_path, **changes))
