"""Statistics hold what a plain reading of earlier rows says, and nothing of the present or the future."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.sources import events_config, source_of, whole
from train.config.schema import EventsConfig, HistoryConfig
from train.data import events
from train.data.features.numeric import before_scaling, scaled
from train.data.reader import RequestReader
from train.data.source import PreparedSource
from train.data.summary import summarise

START, SPAN, ROWS = 1_700_000_000, 4 * 86400, 500
STATISTICS = {
    "item": {"by": ["item"], "kinds": ["count", "rate", "recency"], "distinct": ["user"], "smoothing": 3},
    "user": {"by": ["user"], "half_life": 7200.0},
    "user_genre": {"by": ["user", "genre"], "of": ["buy"]},
    "country": {"by": ["country"], "distinct": ["item"], "kinds": []},
    "searches": {"by": ["user"], "log": "search", "kinds": ["count", "recency"], "distinct": ["query"]},
}


def make_table(count: int = ROWS, seed: int = 0, start: int = START, span: int = SPAN) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    time = np.sort(start + generator.integers(span, size=count) // 600 * 600)
    buy = generator.random(count) < 0.3
    late = time + generator.integers(1, 2 * 86400, size=count)
    return {
        "user": [f"u{user}" for user in generator.integers(12, size=count)],
        "time": time,
        "item": [None if item == 0 else f"i{item}" for item in generator.integers(15, size=count)],
        "genre": generator.integers(3, size=count),
        "country": generator.choice(["de", "fr"], size=count),
        "click": [None if lacks else int(one) for lacks, one in generator.integers(0, 2, (count, 2))],
        "buy": buy.astype(int),
        "bought_at": pa.array(late, mask=~buy),
    }


def write_searches(folder: Path, change: int = START + SPAN, seed: int = 9) -> None:
    """`seed` decides what is searched from `change` on."""
    generator, later = np.random.default_rng(9), np.random.default_rng(seed)
    at = START + generator.integers(SPAN, size=200)
    ids = {"user": generator.integers(15, size=200), "query": generator.integers(9, size=200)}
    for name, column in ids.items():
        column[at >= change] = later.integers(9, size=int((at >= change).sum()))
        ids[name] = np.char.add(name[0], column.astype(str))
    pq.write_table(pa.table({"at": at} | ids), folder / "searches.parquet")


def make_config(folder: Path, table: dict[str, Any], **changes: Any) -> EventsConfig:
    pq.write_table(pa.table(table), folder / "rows.parquet")
    write_searches(folder)
    settings = {
        "labels": {"click": "click", "buy": "buy"},
        "request_categorical": ["user", "country"],
        "candidate_categorical": ["item", "genre"],
        "known_at": {"buy": "bought_at"},
        "request_window": 0,
        "max_history": 6,
        "histories": {
            "bought": HistoryConfig(["item"], where={"buy": 1}),
            "search": HistoryConfig(["query"], files=["searches.parquet"], time="at"),
        },
        "statistics": STATISTICS,
    }
    return events_config(folder, **settings | changes)


def plain(table: dict[str, Any], searches: dict[str, Any], row: int) -> dict[str, float]:
    """The numbers of STATISTICS before they are scaled, of a row that is asked at its own time."""
    now, found = int(table["time"][row]), dict[str, float]()
    user, item, genre, country = (table[name][row] for name in ("user", "item", "genre", "country"))
    rows = range(len(table["time"]))
    known = [max(table["time"][i], at.as_py() or 0) for i, at in enumerate(table["bought_at"])]
    before = [i for i in rows if table["time"][i] < now]
    lives = {"user": lambda at: 2.0 ** ((math.floor(at / 900) - math.floor(now / 900)) / 8)}
    hour = now // 3600 * 3600

    def prior(task: str) -> float:
        seen = [i for i in rows if table["time"][i] < hour and (task == "buy" or table[task][i] is not None)]
        ones = [i for i in rows if table[task][i] == 1 and (known[i] if task == "buy" else table["time"][i]) < hour]
        return len(ones) / len(seen) if seen else math.nan

    def counts(name: str, own: list[int], kinds: list[str], tasks: list[str], smoothing: float) -> None:
        life = lives.get(name, lambda at: 1.0)
        mine = [i for i in own if i in before]
        if "count" in kinds:
            found[f"{name}.count"] = sum(life(table["time"][i]) for i in mine)
        if "recency" in kinds:
            found[f"{name}.recency"] = now - max((table["time"][i] for i in mine), default=math.nan)
        for task in tasks:
            times = {i: known[i] if task == "buy" else table["time"][i] for i in own if table[task][i] == 1}
            ones = [at for at in times.values() if at < now]
            seen = [i for i in mine if task == "buy" or table[task][i] is not None]
            usual = prior(task)
            added = 0 if math.isnan(usual) else smoothing
            total = sum(life(table["time"][i]) for i in seen) + added
            if "rate" in kinds:
                rate = (sum(map(life, ones)) + (added and added * usual)) / total if total else math.nan
                rate = min(max(rate, 1e-6), 1 - 1e-6) if total else math.nan
                found[f"{name}.{task}_rate"] = math.log(rate / (1 - rate))
            if "recency" in kinds:
                found[f"{name}.{task}_recency"] = now - max(ones, default=math.nan)

    both = ["click", "buy"]
    if item is not None:
        own = [i for i in rows if table["item"][i] == item]
        counts("item", own, ["count", "rate", "recency"], both, 3)
        found["item.distinct_user"] = len({table["user"][i] for i in own if i in before})
    counts("user", [i for i in rows if table["user"][i] == user], ["count", "rate"], both, 20)
    own = [i for i in rows if table["user"][i] == user and table["genre"][i] == genre]
    counts("user_genre", own, ["count", "rate"], ["buy"], 20)
    there = [table["item"][i] for i in before if table["country"][i] == country]
    found["country.distinct_item"] = len({*there} - {None})
    mine = [i for i, at in enumerate(searches["at"]) if searches["user"][i] == user and at < now]
    found["searches.count"] = len(mine)
    found["searches.recency"] = now - max((searches["at"][i] for i in mine), default=math.nan)
    found["searches.distinct_query"] = len({searches["query"][i] for i in mine})
    return found


def dense_of(source: PreparedSource, split: str) -> dict[int, dict[str, float]]:
    """Numbers of a split's rows by feature."""
    batch, found = whole(source, split), {}
    for candidate, (row, owner) in enumerate(zip(batch.row.tolist(), batch.owner.tolist(), strict=True)):
        request = zip(source.spec.request_dense, batch.request_dense[owner].tolist(), strict=True)
        found[row] = dict(request) | dict(
            zip(source.spec.candidate_dense, batch.candidate_dense[candidate].tolist(), strict=True)
        )
    return found


def test_numbers_are_those_of_a_plain_reading(tmp_path):
    table = make_table()
    source = source_of(make_config(tmp_path, table))
    searches = pq.read_table(tmp_path / "searches.parquet").to_pydict()
    logarithmic = {name for name in source.spec.candidate_dense + source.spec.request_dense if "_rate" not in name}
    assert set(source.spec.request_dense) == {
        *("user.count", "user.click_rate", "user.buy_rate", "country.distinct_item"),
        *("searches.count", "searches.recency", "searches.distinct_query"),
    }
    assert "statistics of earlier rows, by item, user, user x genre, country (" in summarise(source)[0]
    for split in ("train", "test"):
        for row, numbers in list(dense_of(source, split).items())[::5]:
            expected = plain(table, searches, row)
            for name, number in numbers.items():
                raw = before_scaling(np.array([expected.get(name, math.nan)]), None, name in logarithmic)
                assert number == pytest.approx(scaled(raw, source.meta["numeric"][name])[0], abs=2e-5), (row, name)


@pytest.mark.parametrize("statistics", [STATISTICS, "auto"])
def test_nothing_of_the_future_is_seen(tmp_path, statistics):
    """Whatever rows and labels after a moment are, requests up to it are the same, to the bit."""
    table, now = make_table(), START + SPAN * 19 // 20
    generator = np.random.default_rng(1)
    late = table["time"] >= now
    other = dict(make_table(seed=5, start=now, span=30 * 86400))
    known = np.array([at or 0 for at in table["bought_at"].to_pylist()])
    changed = {name: list(column) for name, column in table.items()}
    for row in np.flatnonzero(late):  # every later row is another one, later or not
        for name in changed:
            changed[name][row] = other[name][row] if name != "bought_at" else other[name][row].as_py()
    changed["bought_at"] = [at if isinstance(at, int | None) else at.as_py() for at in changed["bought_at"]]
    for row in np.flatnonzero((known >= now) & ~late):  # purchases that are known later may not happen, or later still
        changed["bought_at"][row] = int(known[row] + generator.integers(86400)) if row % 2 else None
        changed["buy"][row] = row % 2
    sources = []
    for folder, rows, searched in ((tmp_path / "one", table, 9), (tmp_path / "two", changed, 10)):
        folder.mkdir()
        config = make_config(folder, rows, statistics=statistics, split=[0.8, 0.2, 0.0])
        write_searches(folder, now, searched)
        sources.append(source_of(config))
    first, second = sources
    for which in ("train", "valid"):
        batches = [whole(source, which) for source in (first, second)]
        until = int((batches[0].request_time <= table["time"][~late].max()).sum())
        mine, theirs = (source.batch(which, np.arange(until)) for source in (first, second))
        assert mine.num_requests > 20
        for name in ("request_dense", "candidate_dense", "histories", "history_times", "row"):
            left, right = getattr(mine, name), getattr(theirs, name)
            pairs = [(left, right)] if isinstance(left, torch.Tensor) else [
                (left.values(), right.values()), (left.lengths(), right.lengths())
            ]  # fmt: skip
            assert all(torch.equal(*pair) for pair in pairs), name
    assert dense_of(first, "valid") != dense_of(second, "valid")  # of later requests


@pytest.mark.parametrize("at_once", [40, 170])
def test_rows_on_the_disk_make_the_same_numbers_and_counters(tmp_path, at_once):
    config = make_config(tmp_path, make_table())
    folders = []
    for size in (1000, at_once):
        folders.append(tmp_path / f"of{size}")
        folders[-1].mkdir()
        events.prepare(dataclasses.replace(config, rows_at_once=size), folders[-1])
    mine, theirs = (PreparedSource(folder, config.max_history) for folder in folders)
    assert mine.meta == theirs.meta
    for split in ("train", "valid", "test"):
        for left, right in zip(whole(mine, split)._tensors(), whole(theirs, split)._tensors(), strict=True):
            assert torch.equal(left.nan_to_num(-1), right.nan_to_num(-1))
    names, others = ({file.name for file in (folder / "statistics").iterdir()} for folder in folders)
    assert names == others
    for name in names:
        contents = [(folder / "statistics" / name).read_bytes() for folder in folders]
        assert contents[0] == contents[1], name


def test_later_files_and_requests_go_on_from_the_counters(tmp_path, caplog):
    """A day after the first ones: the same numbers with all files, from the counters of a run, and of its requests."""
    days, now = make_table(), START + SPAN + 3 * 86400
    last = make_table(count=60, seed=3, start=now, span=1)
    config = make_config(tmp_path, days, split=[1.0, 0.0, 0.0])
    pq.write_table(pa.table(last), tmp_path / "last.parquet")
    first, run = source_of(config), tmp_path / "run"
    first.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    together = source_of(dataclasses.replace(config, test_files=["last.parquet"]))
    after = source_of(dataclasses.replace(config, files=["last.parquet"], vocabulary_of=str(run), statistics="auto"))
    assert after.meta["statistics"] == first.meta["statistics"]
    assert "in time order" not in caplog.text
    assert "data.histories of rows, bought, hold those of the files named here alone" in caplog.text
    source_of(dataclasses.replace(config, vocabulary_of=str(run), statistics="auto", rows_at_once=ROWS // 3))
    assert caplog.text.count("rows that both have count twice; give each row once, in time order") == 1
    mine, theirs = dense_of(after, "train"), dense_of(together, "test")
    assert [mine[row] for row in range(60)] == [theirs[ROWS + row] for row in range(60)]

    reader, spec = RequestReader(run, first.spec), first.spec
    for row in range(60):
        columns = {name: values[row] for name, values in last.items() if name != "bought_at"}
        batch = reader(columns, [columns], {"bought": [], "search": []}, now)
        numbers = zip(
            (*spec.request_dense, *spec.candidate_dense),
            (*batch.request_dense[0].tolist(), *batch.candidate_dense[0].tolist()),
            strict=True,
        )
        assert dict(numbers) == mine[row]


def test_a_run_whose_ids_or_counters_are_damaged_is_refused_until_it_is_started_again(tmp_path):
    config = make_config(tmp_path, make_table())
    source, run = source_of(config), tmp_path / "run"
    source.keep_mapping(run)
    (run / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config)}}))
    whole = {file: file.read_bytes() for file in (*run.glob("vocabulary/*"), *run.glob("statistics/*"))}
    assert {file.suffix for file in whole} == {".parquet", ".json", ".counters", ".pairs"}
    after = dataclasses.replace(config, vocabulary_of=str(run), statistics="auto")
    for file, content in whole.items():
        for damaged in (content[:-1], b"x" + content[1:], None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            for use in (lambda: RequestReader(run, source.spec), lambda: source_of(after)):
                with pytest.raises(ValueError, match=f"damaged.*{file.name}|{file.name}.*damaged|holds no mapping"):
                    use()
            source.keep_mapping(run)
            assert {each: each.read_bytes() for each in whole} == whole
    about = json.loads((run / "vocabulary/mapping.json").read_text())
    for field in ("fingerprint", "numeric", "tables", "statistics", "files"):
        (run / "vocabulary/mapping.json").write_text(json.dumps(about | {field: 1}))
        with pytest.raises(ValueError, match=rf"mapping.json is damaged \({field}=1 is no"):
            source_of(after)


def test_what_cannot_be_counted_is_named(tmp_path):
    table = make_table()
    for statistics, message in (
        ("all", "data.statistics='all' must be auto, none or a mapping"),
        ({"item": {}}, r"data.statistics.item=\{\} must name the columns"),
        ({"item": {"by": ["item"], "halflife": 3}}, "did you mean half_life"),
        ({"item": {"by": ["item"], "kinds": ["ctr"]}}, "there are count, rate, recency"),
        ({"item": {"by": ["item"], "of": ["like"]}}, "no task with labels of 0 and 1"),
        ({"item": {"by": ["item", "click"]}}, "names the label column 'click'"),
        ({"item": {"by": ["item"], "log": "bought"}}, r"there are \['search'\]"),
        ({"item": {"by": ["nothing"]}}, "no column 'nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            source_of(make_config(tmp_path, table, statistics=statistics))
    no_time = make_config(
        tmp_path, table, time=None, histories={}, known_at={}, statistics=dict(list(STATISTICS.items())[1:2])
    )
    with pytest.raises(ValueError, match="data.time must name the time column"):
        source_of(no_time)
    none = source_of(dataclasses.replace(no_time, statistics="auto"))
    assert none.meta["statistics"] == {}
