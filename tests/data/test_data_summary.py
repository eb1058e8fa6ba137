"""The table that a run prints of its data."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources import events_config
from train.config.schema import EventsConfig, HistoryConfig, JoinConfig, SyntheticConfig
from train.data import SyntheticSource, build_source
from train.data.summary import summarise


def test_a_join_without_a_match_and_a_log_of_other_users_show(tmp_path):
    count = 100
    rows = {"user": [i % 5 for i in range(count)], "item": [i % 9 for i in range(count)]}
    rows |= {"time": [1_700_000_000 + 86400 * i for i in range(count)], "click": [i % 4 == 0 for i in range(count)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    pq.write_table(pa.table({"item": ["007"], "brand": ["x"], "price": [1.0]}), tmp_path / "items.parquet")
    pq.write_table(pa.table({"user": ["u1"], "time": [1], "query": ["q"]}), tmp_path / "log.parquet")
    source = build_source(
        EventsConfig(
            root=str(tmp_path),
            cache_dir=str(tmp_path / "cache"),
            files=["rows.parquet"],
            joins=[JoinConfig(["items.parquet"], "item")],
            user="user",
            time="time",
            labels={"click": "click"},
            candidate_categorical=["item", "brand"],
            statistics="none",
            candidate_numeric=["price"],
            histories={"seen": HistoryConfig(["item"]), "search": HistoryConfig(["query"], files=["log.parquet"])},
        )
    )
    lines = [line.split() for line in "\n".join(summarise(source)).splitlines()]
    assert ["train", "80", "2023-11-14T22:13:20", "2024-02-01T22:13:20"] in lines
    assert ["test", "10", "2024-02-12T22:13:20", "2024-02-21T22:13:20"] in lines
    assert ["positive", "training", "labels:", "click", "0.25"] in lines
    assert ["item", "10", "1.00", "100.0%", "100.0%"] in lines
    assert ["brand", "1", "1.00", "0.0%", "0.0%"] in lines
    assert ["seen.item", "10", "7.50", "100.0%", "100.0%"] in lines
    assert ["search.query", "1", "0.00", "none", "none"] in lines
    assert ["price", "0.0%", "0.0%"] in lines
    assert "nothing is known in train of: brand, search.query, price".split() in lines


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (4_000_000_000, "2096-10-02T07:06:40  in the future: is data.time_format right?"),
        (1_700_000_001, "2023-11-14T22:13:21"),
        (1_700_000, "1970-01-20T16:13:20  in 1970: is data.time_format right?"),
        (100, "1970-01-01T00:01:40"),
    ],
)
def test_times_in_the_future_or_in_1970_are_told(last, told, tmp_path):
    times = [last - 90, last]
    pq.write_table(
        pa.table({"user": [1, 2], "time": times, "item": [1, 2], "click": [0, 1]}), tmp_path / "rows.parquet"
    )
    source = build_source(events_config(tmp_path, split=[0.5, 0.0, 0.5]))
    assert summarise(source)[0].splitlines()[2].endswith(f"  {told}")


def test_a_log_in_another_unit_is_told(tmp_path):
    """Seconds that are read as milliseconds are in 1970, and every request sees the events that come after it."""
    table = {"user": [1] * 40, "time": [1_700_000_000_000 + 1000 * i for i in range(40)]}
    pq.write_table(pa.table(table | {"item": [1, 2] * 20, "click": [0, 1] * 20}), tmp_path / "rows.parquet")
    log = {"user": [1] * 4, "time": [1_700_000_000 + 9 * i for i in range(4)], "query": [1, 2, 3, 4]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")

    def told(**changes: str) -> str:
        search = HistoryConfig(["query"], files=["log.parquet"], **changes)
        histories = {"seen": HistoryConfig(["item"]), "search": search}
        return summarise(build_source(events_config(tmp_path, time_format="ms", histories=histories)))[0]

    assert "search: all events are more than ten years older than their requests: is their time_format" in told()
    assert "ten years" not in told(time_format="s")


def test_rows_without_a_time_have_no_dates():
    lines = summarise(SyntheticSource(SyntheticConfig(num_requests=1000)), dated=False)[0].splitlines()
    assert lines[:2] == ["split      requests  (without a time)", "train         1,000"]


def test_labels_and_numbers_that_rows_lack_are_told_apart(monkeypatch):
    """All stood in one line, "missing in training rows", which read as if the rows themselves were missing."""
    source = SyntheticSource(SyntheticConfig(num_requests=1000))
    monkeypatch.setattr(source, "missing", lambda: {"like": 0.5, "price": 0.25, "age": 0.0})
    lines = summarise(source)[0].splitlines()
    assert lines[-2:] == ["training rows without a label: like 50 %", "training rows without a number: price 25 %"]


def test_any_source_has_a_summary():
    splits, features = summarise(SyntheticSource(SyntheticConfig(num_requests=1000)))
    assert "train         1,000  2020-09-13" in splits
    assert "click.item" in features
