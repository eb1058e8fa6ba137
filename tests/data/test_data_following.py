"""Which files are complete, what later files become, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.distributed.test_following import BASE, ROWS, table_of, write
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import (
    Config,
    EventsConfig,
    HistoryConfig,
    TableVectorsConfig,
    TransformConfig,
)
from train.data import build_source, following
from train.data.following import Follower, complete, pin
from train.data.source import PreparedSource
from train.process.distributed import World

ALONE = cast(World, SimpleNamespace(by_first=lambda make: make(), broadcast=lambda value: value, is_first=True))


@cache
def base() -> Config:
    return to_config(composed([*BASE, "data.files=['day*.parquet']", "data.follow_wait=0.05"]))


def config_of(folder: Path, *overrides: str) -> Config:
    (folder / "log").mkdir(exist_ok=True)
    config = deepcopy(base())
    data_of(config).root, config.data.cache_dir = f"{folder}/log", f"{folder}/cache"
    for override in overrides:
        (group, key), text = override.split("=", 1)[0].split("."), override.split("=", 1)[1]
        setattr(getattr(config, group), key, yaml.safe_load(text))
    return config


def data_of(config: Config) -> EventsConfig:
    assert isinstance(config.data, EventsConfig)
    return config.data


def follower_of(folder: Path, *overrides: str) -> Follower:
    config = config_of(folder, *overrides)
    pin(config, ALONE, folder)
    source = build_source(config.data)
    source.keep_mapping(folder)
    return Follower(config, ALONE, folder, source)


def nothing() -> None:
    """Between two looks."""


def events_of(source: PreparedSource) -> dict[int, tuple[list[int], list[int], int]]:
    """Items and times of the events that each row sees, and its own item, by the row's time and user."""
    batch = source.batch("train", np.arange(source.num_requests("train")))
    items, times = batch.histories["seen.item"], batch.history_times["seen"]
    own = batch.candidate_sparse["item"].values().tolist()
    lists = zip(items.to_dense(), times.to_dense(), strict=True)
    return {
        int(time): (ids.tolist(), dates.tolist(), item)
        for time, (ids, dates), item in zip(batch.request_time, lists, own, strict=True)
    }


@pytest.mark.parametrize("changes", [(), ("data.rows_at_once=25",), ("data.known_at={click: known}",)])
def test_later_rows_see_what_they_would_see_in_one_preparation(tmp_path: Path, changes: tuple[str, ...]) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    options = ("data.id_map=hash", "data.hash_rows=1000", *changes)
    follower = follower_of(tmp_path, *options)
    parts = follower.begin()
    for number in (1, 2):
        write(tmp_path / "log", number)
        assert follower.take(parts, number, nothing)
    assert [part["requests"] for part in parts] == [ROWS] * 3
    assert [part["end"] for part in parts] == [1, 2, 3]
    whole = build_source(dataclasses.replace(data_of(config_of(tmp_path, *options)), follow_wait=0))
    assert isinstance(whole, PreparedSource)
    expected, later = events_of(whole), events_of(follower.source)
    assert len(later) == ROWS
    assert any(len(items) > 12 for items, _, _ in later.values())
    for time, each in later.items():
        assert each == expected[time]
    assert not follower.take(parts, 3, nothing)


def test_later_requests_fit_the_model_that_was_built(tmp_path: Path) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    follower = follower_of(tmp_path, "data.request=user")
    parts, most = follower.begin(), follower.first.spec.max_candidates
    assert most < ROWS
    table = table_of(1)
    one_user = table.set_column(table.column_names.index("user"), "user", pa.array([1] * ROWS))
    pq.write_table(one_user, tmp_path / "log" / "day1.parquet")
    assert follower.take(parts, 1, nothing)
    assert (parts[1]["rows"], parts[1]["requests"]) == (ROWS, -(-ROWS // most))
    assert follower.source.spec.max_candidates == most


@pytest.mark.parametrize(("oov", "rows"), [((), {0}), (("data.min_count=2", "data.oov_rows=3"), {1, 2, 3})])
def test_new_ids_follow_the_rule_of_unseen_ones(tmp_path: Path, oov: tuple[str, ...], rows: set[int]) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    follower = follower_of(tmp_path, *oov)
    parts = follower.begin()
    write(tmp_path / "log", 1)
    assert follower.take(parts, 1, nothing)
    assert follower.source.fingerprint == follower.first.fingerprint
    new = [item >= 20 for item in table_of(1)["item"].to_pylist()]
    batch = follower.source.batch("train", np.arange(ROWS))
    assert set(batch.candidate_sparse["item"].values()[np.array(new)[batch.row]].tolist()) <= rows


def test_tables_of_vectors_stay_as_they_began(tmp_path: Path) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    pq.write_table(
        pa.table({"id": range(30), "v": [[float(id)] * 4 for id in range(30)]}), tmp_path / "vectors.parquet"
    )
    config = config_of(tmp_path)
    data = data_of(config)
    data.table_vectors = {"content": TableVectorsConfig(4, "none", [f"{tmp_path}/vectors.parquet"], "id", "v")}
    data.transforms, data.candidate_categorical = {"content": TransformConfig(copy="item")}, ["item", "content"]
    pin(config, ALONE, tmp_path)
    first = build_source(data)
    first.keep_mapping(tmp_path)
    follower = Follower(config, ALONE, tmp_path, first)
    parts = follower.begin()
    write(tmp_path / "log", 1)
    (tmp_path / "vectors.parquet").unlink()  # which is read once
    assert follower.take(parts, 1, nothing)
    batch = follower.source.batch("train", np.arange(ROWS))
    vectors = follower.first.vectors("content")[batch.candidate_sparse["content"].values().numpy()]
    assert vectors[:, 0].tolist() == [float(table_of(1)["item"][row].as_py()) for row in batch.row.tolist()]


def test_files_that_are_not_complete_wait(tmp_path: Path) -> None:
    config, log = data_of(config_of(tmp_path)), tmp_path / "log"
    config.follow = ["*"]
    write(log, 0)
    whole = (log / "day0.parquet").read_bytes()
    for name, content in {
        "half.parquet": whole[:-5],
        "new.parquet": b"",
        "a.csv.tmp": b"x",
        "_a.parquet": whole,
    }.items():
        (log / name).write_bytes(content)
    assert [file.name for file in complete(config)] == ["day0.parquet"]
    (log / "half.parquet").write_bytes(whole)
    assert [file.name for file in complete(config)] == ["day0.parquet", "half.parquet"]
    config.manifest = "list.txt"
    (log / "list.txt").write_text("half.parquet\n\nday0.par")
    assert [file.name for file in complete(config)] == ["half.parquet"]
    (log / "list.txt").write_text("half.parquet\nday9.parquet\n")
    with pytest.raises(ValueError, match=r"list.txt, line 2: 'day9.parquet' is not there, or no pattern"):
        complete(config)


def test_files_that_come_during_the_wait_are_taken(tmp_path: Path) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    follower = follower_of(tmp_path, "data.follow_wait=60")
    parts, looks = follower.begin(), list[int]()
    pq.write_table(table_of(7).slice(0, 0), tmp_path / "log" / "day7.parquet")  # has no row

    def between() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            write(tmp_path / "log", 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "POLL", 0.01)
        assert follower.take(parts, 1, between)
    assert len(looks) == 2
    assert [len(part["files"]) for part in parts] == [2, 1]


def test_a_second_start_begins_with_the_files_of_the_first(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write(tmp_path / "log", 0)
    pin(config, ALONE, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"data": dataclasses.asdict(config.data)}}))
    write(tmp_path / "log", 1)
    again = config_of(tmp_path)
    pin(again, ALONE, tmp_path)
    assert data_of(again).files == data_of(config).files == [str((tmp_path / "log/day0.parquet").resolve())]
    assert data_of(again).follow == ["day*.parquet"]
    assert again.runtime.epochs == 1


def test_bad_rows_and_changed_files_are_named(tmp_path: Path) -> None:
    config_of(tmp_path)
    write(tmp_path / "log", 0)
    follower = follower_of(tmp_path)
    parts = follower.begin()
    write(tmp_path / "log", 1)
    assert follower.take(parts, 1, nothing)
    rows = table_of(2).to_pydict()
    rows["click"][4] = 7
    pq.write_table(pa.table(rows), tmp_path / "log" / "day2.parquet")
    with pytest.raises(ValueError, match=r"day2.parquet, row 5: column 'click' is 7, expected a label"):
        follower.take(parts, 2, nothing)
    pq.write_table(table_of(1).slice(5), tmp_path / "log" / "day1.parquet")
    with pytest.raises(ValueError, match=r"day1.parquet had \d+ bytes when the run began to train on it, and has"):
        follower.restore(parts, 1, 8)
    follower.restore(parts, 2, 0)  # behind it, nobody reads it again


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.schedule=cosine",), "use optimizer.schedule=constant, or end the run by runtime.steps"),
        (("data.split_by=last", "data.split=[0.8,0.1,0.1]"), "later files hold out nothing"),
        (("data.time=null",), "data.time must name their time"),
        (("distill.predictions=/p",), "use distill.checkpoint"),
        (("data.files=['*.csv']",), "no file matches"),
    ],
)
def test_what_cannot_go_on_with_later_files_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pin(config_of(tmp_path, *overrides), ALONE, tmp_path)


def test_settings_of_files_alone_change_no_cache(tmp_path: Path) -> None:
    config = config_of(tmp_path, "runtime.steps=5", "optimizer.schedule=cosine")
    write(tmp_path / "log", 0)
    pin(config, ALONE, tmp_path)
    data: Any = config.data
    assert isinstance(data.histories["seen"], HistoryConfig)
    first, other = build_source(data), build_source(dataclasses.replace(data, follow_wait=9, follow=[]))
    assert first.folder == other.folder  # type: ignore[attr-defined]
