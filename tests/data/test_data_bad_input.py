"""What malformed data does: a clear error that names file and row, or with `bad_rows=skip` a documented action."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources import JitteredSource, events_config, whole
from train.config.schema import (
    DataConfig,
    EventsConfig,
    HistoryConfig,
    JoinConfig,
    MovieLensConfig,
    SyntheticConfig,
    TransformConfig,
)
from train.data import PreparedSource, build_source
from train.data.features import columns
from train.data.loading.loader import LoaderOptions, build_loader

HEADER = "user,time,item,price,click"
ROWS = [f"{u},{t},{t % 5},0.{t},{t % 2}" for t in range(20) for u in (1, 2)]


def config_of(tmp_path, rows=None, text=None, **changes) -> EventsConfig:
    path = tmp_path / "events.csv"
    path.write_text("\n".join([HEADER, *(ROWS if rows is None else rows)]) + "\n" if text is None else text)
    settings = {
        "files": [str(path)],
        "candidate_numeric": ["price"],
        "histories": {"seen": HistoryConfig(["item"])},
    }
    return events_config(tmp_path, **settings | changes)


def with_row(row: str) -> list[str]:
    """One more row as the fifth of the file."""
    return [*ROWS[:4], row, *ROWS[4:]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,9,1,abc,1", "column 'price' is abc, expected a finite number or nothing"),
        ("1,9,1,nan,1", "column 'price' is nan, expected a finite number"),
        ("1,9,1,inf,1", "column 'price' is inf, expected a finite number"),
        ("1,9,1,0.5,2", "column 'click' is 2, expected a label of 0, 1 or nothing"),
        (
            "1,9,1,0.5,yes",
            "column 'click' is yes, expected a finite number or nothing (a label of words is a comparison: 'click == W",
        ),
        (
            "1,soon,1,0.5,1",
            "column 'time' is soon, expected a time as data.time_format (or that of its history) says: seconds",
        ),
        ("1,2024-03-01T05:06:07Z,1,0.5,1", "says: seconds since 1970 ('%Y-%m-%dT%H:%M:%SZ' fits)"),
        ("1,,1,0.5,1", "column 'time' is None, expected a time"),
        (",9,1,0.5,1", "column 'user' is None, expected an id"),
        ("1,9,1,0.5", "4 columns, expected 5"),
        ("1,9,1,0.5,1,1", "6 columns, expected 5"),
    ],
)
def test_malformed_row_is_named_or_skipped(tmp_path, caplog, row, message):
    with pytest.raises(ValueError, match=r"events\.csv, row 5") as error:
        build_source(config_of(tmp_path, with_row(row)))
    assert message in str(error.value)
    assert "data.bad_rows=skip" in str(error.value)
    with caplog.at_level(logging.WARNING):
        source = build_source(config_of(tmp_path, with_row(row), bad_rows="skip"))
    assert "row 5" in caplog.text
    batches = [whole(source, split) for split in ("train", "valid", "test")]
    # The other forty rows are there under their own numbers, and the bad one is nobody's history either.
    assert sorted(row for batch in batches for row in batch.row.tolist()) == [*range(4), *range(5, 41)]
    assert all(batch.candidate_dense.isfinite().all() for batch in batches)
    clean = build_source(config_of(tmp_path, ROWS))
    assert whole(source).histories.values().equal(whole(clean).histories.values())


def test_nothing_but_malformed_rows(tmp_path):
    with pytest.raises(ValueError, match=r"every row of .*events\.csv is malformed"):
        build_source(config_of(tmp_path, ["1,1,1,x,1"], bad_rows="skip", max_skipped=1))


def test_more_malformed_rows_than_a_few_are_a_wrong_configuration(tmp_path):
    rows = [row.replace(",0.", ",about 0.") if number % 4 == 0 else row for number, row in enumerate(ROWS)]
    with pytest.raises(ValueError, match=r"10 of 40 rows .*=0\.1 lets .* row 1: column 'price' is about .*=0\.25$"):
        build_source(config_of(tmp_path, rows, bad_rows="skip"))
    source = build_source(config_of(tmp_path, rows, bad_rows="skip", max_skipped=0.25, split=[1, 0, 0]))
    assert whole(source).num_candidates == 30
    longer = [f"{row},1" if number % 4 == 0 else row for number, row in enumerate(ROWS)]
    with pytest.raises(ValueError, match=r"10 of 40 rows .*=0\.1 lets .* row 1: 6 columns, expected 5.*=0\.25$"):
        build_source(config_of(tmp_path, longer, bad_rows="skip"))
    side = tmp_path / "items.csv"
    side.write_text("item,weight\n1,1\n2,heavy\n")
    joins = {"joins": [JoinConfig([str(side)], column="item")], "candidate_numeric": ["weight"]}
    with pytest.raises(ValueError, match=r"1 of 2 rows from .*items\.csv on are malformed"):
        build_source(config_of(tmp_path, **joins, bad_rows="skip"))


def test_missing_numbers_and_labels_are_no_errors(tmp_path):
    batch = whole(build_source(config_of(tmp_path, with_row("1,3,1,,"))))
    added = batch.row == 4
    assert batch.candidate_dense[added].tolist() == [[0.0]]
    assert batch.labels[added].isnan().all()


def test_nan_and_infinity_in_parquet(tmp_path):
    for value in (float("nan"), float("inf")):
        table = {
            "user": [1, 1, 2],
            "time": [1, 2, 3],
            "item": [1, 1, 1],
            "price": [1.0, value, 2.0],
            "click": [0, 1, 1],
        }
        pq.write_table(pa.table(table), tmp_path / "events.parquet")
        config = config_of(tmp_path, files=[str(tmp_path / "events.parquet")], split=[1, 0, 0])
        with pytest.raises(ValueError, match=rf"events\.parquet, row 2: column 'price' is {value}"):
            build_source(config)
        config.bad_rows, config.max_skipped = "skip", 0.5
        assert whole(build_source(config)).row.tolist() == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"candidate_categorical": ["items"]},
        {"candidate_numeric": ["items"]},
        {"labels": {"click": "items"}},
        {"labels": {"click": "items >= 4"}},
        {"user": "items"},
        {"time": "items"},
        {"request": "items"},
        {"histories": {"seen": HistoryConfig(["items"])}},
        {"histories": {"seen": HistoryConfig(["item"], where={"items": 1})}},
        {"histories": {"seen": HistoryConfig(["items"], lists=True)}},
    ],
)
def test_missing_column_lists_those_that_are_there(tmp_path, changes):
    with pytest.raises(ValueError, match=r"no column 'items': .*events\.csv has \['user', 'time', 'item', "):
        build_source(config_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": {}}, r"data\.labels is empty; .* e\.g\. labels: {click: clicked}"),
        ({"list_separator": ""}, r"data\.list_separator is empty; .* e\.g\. data\.list_separator='\|'"),
        ({"display": {"item": [1]}}, r"data\.display\.item=\[1\] must be one id"),
        *(
            ({"histories": {"seen": HistoryConfig(["item"], where={"click": value})}}, r"seen\.where\.click=.* one id")
            for value in ({"a": 1}, [[1]])
        ),
        ({"valid_files": ["none.csv"]}, r"data\.valid_files=\['none\.csv'\] have no row that can be used"),
        ({"valid_files": ["none.csv"], "rows_at_once": 8}, r"data\.valid_files=.* have no row"),
        ({"files": ["semicolons.csv"]}, r"no column 'click': .*; .* otherwise: data\.csv_separator=';'"),
        ({"files": ["blanks.csv"]}, r"no column 'click': .*; the header has blanks around names"),
    ],
)
def test_a_mistake_of_the_description_names_its_key(tmp_path, changes, message):
    for name, rows in {"none": [], "semicolons": ROWS, "blanks": ROWS}.items():
        text = "\n".join([HEADER.replace(",", ", ") if name == "blanks" else HEADER, *rows, ""])
        (tmp_path / f"{name}.csv").write_text(text.replace(",", ";") if name == "semicolons" else text)
    with pytest.raises(ValueError, match=message):
        build_source(config_of(tmp_path, **changes))


def test_column_missing_in_a_later_file(tmp_path):
    config = config_of(tmp_path)
    (tmp_path / "more.csv").write_text("user,time,item,click\n1,1,1,1\n")
    config.files.append(str(tmp_path / "more.csv"))
    with pytest.raises(ValueError, match=r"more\.csv has no column 'price'"):
        build_source(config)


def test_a_name_that_two_columns_have(tmp_path):
    text = "\n".join([f"{HEADER},item", *(f"{row},7" for row in ROWS)])
    with pytest.raises(ValueError, match=r"events\.csv has more than one column 'item'"):
        build_source(config_of(tmp_path, text=text))


def test_wrong_types(tmp_path):
    table = {"user": [1], "time": [1], "item": [[1]], "price": [[1.0]], "click": [1]}
    pq.write_table(pa.table(table), tmp_path / "events.parquet")
    files = {"files": [str(tmp_path / "events.parquet")]}
    with pytest.raises(ValueError, match=r"events\.parquet: column 'price': it is list<.*>, expected numbers"):
        build_source(config_of(tmp_path, **files))
    with pytest.raises(ValueError, match="column 'item': it is list<.*>, expected one number or text a row"):
        build_source(config_of(tmp_path, **files, candidate_numeric=[]))
    lists = {"seen": HistoryConfig(["time"], lists=True)}
    with pytest.raises(
        ValueError, match="column 'time': it is int64, expected a list of single values or text joined by '|'"
    ):
        build_source(config_of(tmp_path, **files, candidate_categorical=[], candidate_numeric=[], histories=lists))
    pq.write_table(pa.table({**table, "item": ["a"], "price": [1.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({**table, "item": [7], "price": [[1.0]]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: column 'price': it is list<.*>, expected numbers"):
        build_source(config_of(tmp_path, files=[str(tmp_path / "[ab].parquet")]))


def test_files_that_are_empty_absent_or_cut_short(tmp_path):
    with pytest.raises(ValueError, match=r"events\.csv: the file is empty"):
        build_source(config_of(tmp_path, text=""))
    with pytest.raises(ValueError, match=r"no rows in .*events\.csv"):
        build_source(config_of(tmp_path, rows=[]))
    (tmp_path / "wide.csv").write_text("\n".join([HEADER, *ROWS]), encoding="utf-16")
    with pytest.raises(ValueError, match=r"wide\.csv is UTF-16 text, which is not read here"):
        build_source(config_of(tmp_path, files=[str(tmp_path / "wide.csv")]))
    with pytest.raises(ValueError, match=r"no file matches .*nowhere\.csv'; name a file, a folder or a glob, e\.g\."):
        build_source(config_of(tmp_path, files=[str(tmp_path / "nowhere.csv")]))
    with pytest.raises(ValueError, match=r"/nowhere\.csv'; .* or a glob, from data\.root=\S+ on"):
        build_source(config_of(tmp_path, files=["nowhere.csv"]))
    pq.write_table(pa.table({"user": np.arange(1000)}), tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut\.parquet: cannot be read"):
        build_source(config_of(tmp_path, files=[str(tmp_path / "cut.parquet")]))


@pytest.mark.reliability(
    "a flipped byte in a Parquet row group with checksums",
    "named by file, row group and rows; `data.bad_rows=skip` reads the other groups and counts its rows",
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_damaged_row_group_is_named_or_left_out(tmp_path, caplog, streamed):
    rows = [[int(float(value)) for value in row.split(",")] for row in ROWS]
    table = pa.table(dict(zip(HEADER.split(","), np.array(rows).T, strict=True)))
    path = tmp_path / "log.parquet"
    pq.write_table(table, path, row_group_size=4, compression="none", use_dictionary=False, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(2).column(1)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset + column.total_compressed_size - 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 8]))
    settings = {"files": [str(path)], "rows_at_once": 8 if streamed else 1000}
    with pytest.raises(
        ValueError, match=r"log\.parquet, row group 3 of 10, rows 9 to 12: cannot be read .*bad_rows=skip"
    ):
        build_source(config_of(tmp_path, **settings))
    with pytest.raises(ValueError, match=r"4 of 40 rows .* data\.max_skipped=0\.05 .*log\.parquet, row group 3 of 10"):
        build_source(config_of(tmp_path, **settings, bad_rows="skip", max_skipped=0.05))
    with caplog.at_level(logging.WARNING):
        source = build_source(config_of(tmp_path, **settings, bad_rows="skip", split=[1, 0, 0]))
    assert "bad input: 4 rows, the first is" in caplog.text
    assert "row group 3 of 10, rows 9 to 12" in caplog.text
    assert sorted(whole(source).row.tolist()) == [row for row in range(40) if not 8 <= row < 12]


@pytest.mark.reliability("data preparation fails", "nothing of it stays")
def test_failed_preparation_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="row 5"):
        build_source(config_of(tmp_path, with_row("1,9,1,x,1")))
    assert not list((tmp_path / "cache").glob("*"))


def list_config(tmp_path, viewed: str, when: str, **changes) -> EventsConfig:
    rows = [f"{user},100,{user},0.5,1,{viewed},{when}" for user in (1, 2)]
    text = "\n".join([f"{HEADER},viewed,when", "0,100,0,0.5,1,1,99", *rows]) + "\n"
    history = HistoryConfig(["viewed"], lists=True, times="when")
    settings = {"text": text, "histories": {"seen": history}, "split": [1, 0, 0]}
    return config_of(tmp_path, **(settings | changes))


@pytest.mark.parametrize("late", [100, 101])
def test_future_history_is_an_error_or_trimmed(tmp_path, caplog, late):
    times = f"5|{late}|7"
    with pytest.raises(ValueError, match=rf"row 2: column 'when' is 5\|{late}\|7, expected times before the row's own"):
        build_source(list_config(tmp_path, "1|2|3", times))
    source = build_source(list_config(tmp_path, "1|2|3", times, bad_rows="skip"))
    batch = whole(source)
    assert "2 rows, the first is" in caplog.text
    assert batch.num_candidates == 3
    assert batch.history_times.values().tolist() == [99, 5, 7, 5, 7]


def test_lists_that_are_not_aligned(tmp_path):
    with pytest.raises(ValueError, match="row 2: column 'when' is 5, expected as many items as 'viewed'"):
        build_source(list_config(tmp_path, "1|2|3", "5"))
    batch = whole(build_source(list_config(tmp_path, "1|2|3", "5", bad_rows="skip", max_skipped=0.7)))
    assert batch.row.tolist() == [0]
    assert batch.history_times.values().tolist() == [99]


def test_empty_history(tmp_path, caplog):
    batch = whole(build_source(config_of(tmp_path, histories={"seen": HistoryConfig(["item"], where={"click": 7})})))
    assert "no row meets where: {click: 7}; the column holds e.g. ['0', '1']" in caplog.text
    build_source(config_of(tmp_path, histories={"seen": HistoryConfig(["item"], where={"price": True})}))
    assert "no row meets where: {price: True} (YAML reads yes, no" in caplog.text
    assert batch.histories.values().numel() == 0
    assert batch.lookup.stride() == batch.num_requests


def test_requests_without_candidates():
    source = JitteredSource(SyntheticConfig(candidates=2, num_requests=200))
    batch = whole(source)
    counts = batch.candidate_offsets.diff()
    assert {0, 1, 2} == set(counts.tolist())
    assert batch.lookup.stride() == 200
    alone = source.batch("train", np.flatnonzero(counts.numpy() == 0)[:1])
    assert (alone.num_requests, alone.num_candidates) == (1, 0)


def test_negative_and_unseen_ids_are_ids_like_others_or_unknown(tmp_path):
    rows = [f"{u},{t},{-1 if t < 18 else 10**12},0.5,1" for t in range(20) for u in (1, 2)]
    source = build_source(config_of(tmp_path, rows))
    assert source.spec.tables["item"] == 2
    assert set(whole(source).candidate_sparse["item"].values().tolist()) == {1}
    assert 0 in whole(source, "test").candidate_sparse["item"].values().tolist()


@pytest.mark.reliability("cached ids that no table has", "an error before any lookup")
def test_damaged_cache_is_caught_before_it_reaches_a_table(tmp_path):
    source = build_source(config_of(tmp_path))
    ids = np.load(source.folder / "candidate_ids.npy")
    ids[3] = 99
    np.save(source.folder / "candidate_ids.npy", ids)
    with pytest.raises(ValueError, match="id 99 of feature 'item' at source row .* expected 0 to 5"):
        whole(PreparedSource(source.folder, 50))


def test_batch_larger_than_the_data(tmp_path):
    source = build_source(config_of(tmp_path))
    settings = {"seed": 0, "shuffle": True, "num_workers": 0, "prefetch": 2}
    (batch,) = build_loader(source, "train", LoaderOptions(batch_size=10_000, rank=0, world_size=1, **settings))
    assert batch.num_requests == source.num_requests("train")


def test_more_ranks_than_rows(tmp_path):
    source = build_source(config_of(tmp_path, ROWS[:2], split=[1, 0, 0], histories={}))
    settings = {"batch_size": 4, "seed": 0, "shuffle": True, "num_workers": 0, "prefetch": 2}
    loaders = [build_loader(source, "train", LoaderOptions(rank=rank, world_size=5, **settings)) for rank in range(5)]
    batches = [list(loader) for loader in loaders]
    assert [len(of_rank) for of_rank in batches] == [1] * 5
    assert [of_rank[0].num_requests for of_rank in batches] == [1] * 5
    assert sum(of_rank[0].num_candidates for of_rank in batches) == 2


def test_all_positive_labels(tmp_path):
    rows = [row[:-1] + "1" for row in ROWS]
    assert build_source(config_of(tmp_path, rows)).label_rates() == {"click": 1.0}


def test_no_label_at_all_and_no_training_row(tmp_path):
    rows = [row[:-1] for row in ROWS]
    with pytest.raises(ValueError, match=r"no task of \['click'\] has an observed label in the training split"):
        build_source(config_of(tmp_path, rows))
    with pytest.raises(ValueError, match="the training split is empty"):
        build_source(config_of(tmp_path, ROWS[:1], split=[0.2, 0.4, 0.4]))


def test_joined_table_with_a_repeated_key_or_a_bad_value(tmp_path):
    side = tmp_path / "items.csv"
    joins = {"joins": [JoinConfig([str(side)], column="item")], "candidate_numeric": ["weight"]}
    side.write_text("item,weight\n1,1\n2,1\n1,3\n")
    with pytest.raises(ValueError, match=r"items\.csv, row 3: item=1 is a repeated key"):
        build_source(config_of(tmp_path, **joins))
    side.write_text("item,weight\n1,1\n2,heavy\n")
    with pytest.raises(ValueError, match=r"items\.csv, row 2: column 'weight' is heavy"):
        build_source(config_of(tmp_path, **joins))
    source = build_source(config_of(tmp_path, **joins, bad_rows="skip", max_skipped=0.5))
    assert sum(source.num_requests(split) for split in ("train", "valid", "test")) > 0
    assert set(whole(source).candidate_dense.flatten().tolist()) == {0.0}
    side.write_text("item,weight,moment\n1,1,5\n")
    with pytest.raises(ValueError, match=r"column 'moment' must stand in .*events\.csv itself"):
        build_source(config_of(tmp_path, **joins, time="moment"))
    side.write_text("other,weight\n1,1\n")
    with pytest.raises(ValueError, match=r"no column 'item': .*items\.csv has \['other', 'weight'\]"):
        build_source(config_of(tmp_path, **joins))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_format": "h"}, r"data\.time_format='h'"),
        ({"time_format": "%Y-%m-%d %H:%M:%S %Z"}, r"data\.time_format=.*: %Z is not read .*%z"),
        ({"histories": {"a": HistoryConfig(["item"], time_format="%G-%V")}}, r"a\.time_format=.*: %G is not read"),
        ({"histories": {"a": HistoryConfig(["item"], time_format="h")}}, r"data\.histories\.a\.time_format='h'"),
        ({"log_numeric": ["item"]}, r"data\.log_numeric names \['item'\]"),
        (
            {"candidate_categorical": ["item", "i.d", "i_d"]},
            r"'i\.d' and 'i_d' would share the table 'i_d'.* data\.tables, e\.g\. i\.d: other",
        ),
        ({"tables": {"itme": "item"}}, r"data\.tables names \['itme'\]"),
        ({"labels": {}}, "data.labels is empty; name at least one"),
        ({"labels": {"click": "price > 4"}}, "data.labels.click='price > 4' must name a column"),
        (
            {"labels": {"click": "price >= high"}},
            "compare one as COLUMN >= NUMBER or COLUMN == ID",
        ),
        ({"labels": {"click": "price == "}}, "must name a column of 0 and 1, or compare one"),
        ({"labels": {"click": "event == 'buy'"}}, "COLUMN == ID without quotes"),
        ({"labels": {"click": 'event == "buy"'}}, "COLUMN == ID without quotes"),
        ({"labels": {"click": "price != 1"}}, "must name a column of 0 and 1, or compare one"),
        ({"histories": {"a": HistoryConfig([])}}, r"data\.histories\.a\.fields is empty"),
        ({"histories": {"a": HistoryConfig(["item"], lists=True, where={"click": 1})}}, r"data\.histories\.a\.lists"),
        ({"histories": {"a": HistoryConfig(["item"], times="time")}}, r"data\.histories\.a\.times"),
        ({"time": None, "histories": {"a": HistoryConfig(["item"], lists=True, times="x")}}, r"data\.time must name"),
        ({"user": None}, r"data\.user must name"),
        (
            {"time": None, "histories": {"a": HistoryConfig(["item"], files=["x"])}},
            "no file matches|data.time must name",
        ),
        ({"candidate_categorical": ["item", "item"]}, "repeated: .'item'."),
        ({"candidate_numeric": ["price", "click"]}, "data.labels.click is read from column 'click', which"),
        ({"labels": {"dear": "price >= 0.1"}}, "data.labels.dear is read from column 'price', which is a feature"),
        *(
            (
                {
                    "candidate_categorical": ["item", "x"],
                    "transforms": {"x": TransformConfig(**made), "y": TransformConfig(copy="click")},
                    "histories": {"a": HistoryConfig(["y"])},
                },
                "data.labels.click is read from column 'click', which data.transforms or data.joins make features of",
            )
            for made in ({"copy": "click"}, {"cross": ["item", "y"]}, {"bucketize": "click", "edges": [0.5]})
        ),
        ({"joins": [JoinConfig(["events.csv"], "click", "item")]}, "data.labels.click is read from .* data.joins make"),
        (
            {
                "candidate_numeric": ["price", "late"],
                "transforms": {"late": TransformConfig(log="time_of")},
                "known_at": {"click": "time_of"},
            },
            "data.known_at.click is column 'time_of', which a feature is made of, too",
        ),
        (
            {"statistics": {"s": {"by": ["y"]}}, "transforms": {"y": TransformConfig(copy="click")}},
            "names the label column 'click'",
        ),
        ({"statistics": {"s": {"by": ["item"], "half_life": 1e-300}}}, "half_life=1e-300 must be 0, or at least a sec"),
        ({"candidate_numeric": ["price", "price"]}, "column 'price' of numbers is named twice"),
        ({"missing_fill": {"price": 1e300}}, "data.missing_fill.price=1e.300 must be a finite number that float32 can"),
        ({"display": {"price": -1e39}}, "data.display.price=-1e.39 must be a finite number that float32 can hold"),
        ({"user": None, "request": "item", "histories": {}}, "data.user=item"),
        (
            {"request_categorical": [], "candidate_categorical": [], "histories": {}},
            r"e\.g\. data\.candidate_categorical=\[item_id\]",
        ),
        ({"files": []}, "data.files is empty"),
        ({"files": ["events.csv", "*.csv"]}, r"events\.csv twice"),
        ({"test_files": ["."]}, r"events\.csv twice"),
    ],
)
def test_schemas_that_make_no_sense(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        build_source(config_of(tmp_path, **changes))


@pytest.mark.parametrize("letter", ["c", "/", "ü"])
def test_a_name_that_no_file_can_have(tmp_path, letter):
    text = "\n".join([f"{HEADER},{letter * 300}", *(f"{row},1" for row in ROWS)])
    columns = {"text": text, "candidate_categorical": ["item", letter * 300]}
    with pytest.raises(ValueError, match=rf"'{letter * 40}'\.\.\. is a name of 300 letters, .*: rename the column"):
        build_source(config_of(tmp_path, **columns))
    build_source(config_of(tmp_path, **columns, tables={letter * 300: "short"}))


def test_other_sources(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path='.*' is no MovieLens folder"):
        build_source(MovieLensConfig(path=str(tmp_path), cache_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"data\.name='x' is no source"):
        build_source(DataConfig(name="x"))
    with pytest.raises(ValueError, match=r"data\.num_request_features"):
        build_source(SyntheticConfig(num_request_features=0))
    with pytest.raises(ValueError, match=r"data\.num_items=10"):
        build_source(SyntheticConfig(num_items=10, num_categories=9))


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        ("time", pa.scalar(10**15, pa.timestamp("ms")), r"is 1000000000000000, expected a time"),
        ("time", pa.scalar(3 * 10**17, pa.timestamp("us")), r"is 3\d+, expected a time"),
        ("weight", pa.scalar(1e300), r"is 1e\+300, expected a weight of at most 1e\+30"),
        ("price", pa.scalar(-1e300), r"is -1e\+300, expected a number of at most 3.4e\+38 in size"),
    ],
)
def test_values_beyond_what_a_batch_can_hold(tmp_path, column, value, named):
    rows = {
        "user": pa.array([1, 1, 2]),
        "time": pa.array([1, 2, 3], value.type if column == "time" else pa.timestamp("ms")),
        "item": pa.array([1, 1, 1]),
        "price": pa.array([1.0, 3.0, 2.0]),
        "weight": pa.array([1.0, 1.0, 2.0]),
        "click": pa.array([0, 1, 1]),
    }
    rows[column] = pa.chunked_array(
        [rows[column][:1], pa.array([value.value if column == "time" else value.as_py()], value.type), rows[column][2:]]
    )
    file = tmp_path / "events.parquet"
    pq.write_table(pa.table(rows), file, coerce_timestamps=None)
    config = config_of(tmp_path, files=[str(file)], weight="weight", split=[1, 0, 0])
    with pytest.raises(ValueError, match=rf"events\.parquet, row 2: column '{column}' {named}"):
        build_source(config)
    config.bad_rows, config.max_skipped = "skip", 0.5
    batch = whole(build_source(config))
    assert batch.row.tolist() == [0, 2]
    assert batch.candidate_dense.isfinite().all()
    assert batch.candidate_dense.abs().min() > 0.5  # the column keeps its scale


def test_a_logarithm_takes_numbers_beyond_float32(tmp_path):
    source = build_source(config_of(tmp_path, with_row("1,3,1,1e300,1"), log_numeric=["price"]))
    assert whole(source).candidate_dense.isfinite().all()


def test_seconds_that_overflow_in_milliseconds_are_bad():
    times, bad = columns.read_milliseconds(pa.chunked_array([pa.array([10**17, 1], pa.timestamp("s"))]), "s")
    assert (times.tolist(), bad.tolist()) == ([0, 1000], [True, False])


@pytest.mark.parametrize("text", ["2024-01-01", "+12345-01-01"])
def test_text_times_beyond_the_year_9999_are_bad(text):
    times, bad = columns.read_milliseconds(pa.chunked_array([pa.array([text])]), "%Y-%m-%d")
    assert (bad[0], times[0] > 0) == ((True, False) if "12345" in text else (False, True))


def test_an_open_quote_does_not_print_the_rest_of_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"events\.csv, row 5: a quote that nothing closes") as told:
        build_source(config_of(tmp_path, [*ROWS[:4], '1,9,"1,0.5,1', *ROWS * 50], csv_quotes=True))
    assert len(str(told.value)) < 600 + len(str(tmp_path))


def test_copies_of_files_are_told(tmp_path, caplog):
    config = config_of(tmp_path)
    (tmp_path / "other.csv").write_text((tmp_path / "events.csv").read_text().replace("0.1", "0.2"))
    config.files += [str(tmp_path / "other.csv")]
    with caplog.at_level(logging.WARNING):
        build_source(config)
        assert "copy of" not in caplog.text
        (tmp_path / "copy.csv").write_text((tmp_path / "events.csv").read_text())
        build_source(config_of(tmp_path, files=[*config.files, str(tmp_path / "copy.csv")]))
    assert f"{tmp_path}/copy.csv seems to be a copy of {tmp_path}/events.csv" in caplog.text
