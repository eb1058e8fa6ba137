"""Formats of files, and columns whose types differ from file to file."""

from __future__ import annotations

import gzip
import io
import tarfile
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

from tests.data.events.test_data_events import rows_of
from tests.data.sources import events_config, source_of, whole
from train.data.source import PreparedSource

N = 40
ROWS = {
    "user": [i % 4 for i in range(N)],
    "time": [1000 * i for i in range(N)],
    "item": [i % 7 for i in range(N)],
    "click": [i % 2 for i in range(N)],
}


def write_feather(table: pa.Table, path: Path, **settings: Any) -> None:
    feather.write_feather(table, str(path), chunksize=7, **settings)


def write_batches(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    "parquet": pq.write_table,
    "orc": orc.write_table,
    "feather": write_feather,
    "feather, compressed": lambda table, path: write_feather(table, path, compression="zstd"),
    "arrow": write_batches,
    "csv": lambda table, path: pa.csv.write_csv(table, path),
    "gzip without .gz": lambda table, path: path.write_bytes(packed(table)) and None,
}


def packed(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pa.csv.write_csv(table, sink)
    return gzip.compress(sink.getvalue())


def count_of(source: PreparedSource) -> int:
    return sum(len(whole(source, split).row) for split in ("train", "valid", "test"))


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("rows_at_once", [8, 1000])
def test_every_format_is_the_same_data(tmp_path: Path, form: str, rows_at_once: int) -> None:
    extra = (
        {"past": ["1|2", None, "3", ""] * 10}
        if "csv" in form or "gzip" in form
        else {"past": [[1, 2], None, [3], []] * 10}
    )
    for name, writer in (("a", WRITERS["parquet"]), ("b", WRITERS[form])):
        writer(
            pa.table(ROWS | (extra if name == "b" else {"past": [[1, 2], None, [3], []] * 10})),
            tmp_path / f"{name}.data",
        )
    settings = {"candidate_list": ["past"], "rows_at_once": rows_at_once}
    ours, theirs = (source_of(events_config(tmp_path, files=[f"{name}.data"], **settings)) for name in "ab")
    assert ours.fingerprint == theirs.fingerprint
    assert count_of(ours) == count_of(theirs) == N
    for name in ("user", "item", "past"):
        assert whole(ours).lookup[name].values().equal(whole(theirs).lookup[name].values())


@pytest.mark.parametrize("form", ["parquet", "orc", "feather", "arrow"])
def test_a_file_that_is_cut_short_or_changed_is_named(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows.data"
    WRITERS[form](pa.table(ROWS), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"rows\.data: cannot be read"):
        source_of(events_config(tmp_path, files=["rows.data"]))


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.csv", "user,time\n")
    return sink.getvalue()


def tarred() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.csv"), io.BytesIO())
    return sink.getvalue()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (zipped(), "a zip archive or an Excel sheet"),
        (tarred(), "a tar archive"),
        (b'{"user": 1}\n{"user": 2}\n', "JSON"),
        (b'[\n {"user": 1}]', "JSON"),
        (b"<!DOCTYPE html><html>", "HTML or XML"),
        ("user,time".encode("utf-16"), "UTF-16 text"),
        (b"Obj\x01\x00", "Avro"),
        (b"\xff\xff\xff\xff\x10\x00", "an Arrow stream"),
        (b"\x80\x04\x95", "a pickle"),
        (b"\xfd7zXZ\x00", "a file packed by xz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # which has the time in it
)
def test_other_formats_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.csv is {name}, which is not read here; Parquet, ORC, Arrow"):
        source_of(events_config(tmp_path, files=["a.csv"]))


@pytest.mark.parametrize("name", ["PAR1", "ORC", "ARROW1", "PARENT", "FEA1", "SEQ", "BZh"])
def test_text_may_begin_as_another_format_does(tmp_path: Path, name: str) -> None:
    lines = [
        f"{i},{u},{t},{c}" for i, u, t, c in zip(*(ROWS[key] for key in ("item", "user", "time", "click")), strict=True)
    ]
    (tmp_path / "a.csv").write_text("\n".join([f"{name},user,time,click", *lines]))
    assert count_of(source_of(events_config(tmp_path, files=["a.csv"], candidate_categorical=[name]))) == N


BIG = 1_234_567_890_123_456_789
STAMPS = pa.array([1_700_000_000 + 1000 * i for i in range(N)], pa.int64()).cast(pa.timestamp("s"))
WORDS = pa.array([f"s{i % 3}" for i in range(N)])
IDS = [uuid.UUID(int=i % 3 + (7 << 120)) for i in range(N)]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("item", [BIG + i % 3 for i in range(N)], pa.nulls(N, pa.float64())),
        ("item", [BIG + i % 3 for i in range(N)], pa.array([2**63 + i % 3 for i in range(N)], pa.uint64())),
        ("item", WORDS, WORDS.dictionary_encode()),
        ("item", WORDS, WORDS.cast(pa.large_string())),
        ("item", WORDS, pa.nulls(N)),
        ("item", [i % 7 for i in range(N)], [str(i % 7) for i in range(N)]),
        ("item", [i % 7 for i in range(N)], [float(i % 7) for i in range(N)]),
        ("item", [i % 2 for i in range(N)], [bool(i % 2) for i in range(N)]),
        ("item", pa.array([each.bytes for each in IDS], pa.uuid()), [str(each) for each in IDS]),
        ("item", pa.array([each.bytes for each in IDS], pa.binary(16)), pa.array([each.bytes for each in IDS])),
        ("click", [i % 2 for i in range(N)], [bool(i % 2) for i in range(N)]),
        ("click", [i % 2 for i in range(N)], [str(i % 2) for i in range(N)]),
        ("time", STAMPS, STAMPS.cast(pa.timestamp("ns", "UTC"))),
        ("time", STAMPS.cast(pa.timestamp("s", "UTC")), STAMPS.cast(pa.timestamp("ms", "Asia/Shanghai"))),
        ("time", STAMPS, [1_700_000_000 + 1000 * i for i in range(N)]),
        ("past", [[1, 2], [3]] * 20, ["1|2", "3"] * 20),
        ("past", [[1, 2], [3]] * 20, pa.array([[1, 2], [3]] * 20, pa.large_list(pa.int32()))),
        ("past", [[1, 2], [3]] * 20, ["[1, 2]", "['3']"] * 20),
    ],
)
@pytest.mark.parametrize("rows_at_once", [16, 1000])
def test_types_that_differ_mean_what_each_file_says(
    tmp_path: Path, name: str, first: Any, second: Any, rows_at_once: int
) -> None:
    """The rows of both files are those of one file that has the first's type twice, where the second says the same."""
    (tmp_path / "log").mkdir()
    own = ROWS | {"past": [[1]] * N}
    pq.write_table(pa.table(own | {name: first}), tmp_path / "log" / "a.parquet")
    pq.write_table(pa.table(own | {name: second}), tmp_path / "log" / "b.parquet")
    settings = {"candidate_list": ["past"], "split": [1.0, 0.0, 0.0], "rows_at_once": rows_at_once}
    source = source_of(events_config(tmp_path, files=["log"], **settings))
    batch = whole(source)
    assert sorted(batch.row.tolist()) == list(range(2 * N))
    if pa.array(second).null_count == N:
        return
    by_row = np.argsort(batch.row.numpy())
    if name == "time":
        assert len(np.unique(batch.request_time.numpy())) == N
    elif name == "click":
        labels = batch.labels[by_row].flatten()
        assert labels[:N].equal(labels[N:])
    elif name == "past":
        lists = rows_of(batch.candidate_sparse, "past")
        assert [lists[row] for row in by_row[:N]] == [lists[row] for row in by_row[N:]]
        assert [len(lists[row]) for row in by_row[:N]] == [2, 1] * (N // 2)
    elif BIG not in (first[0] if isinstance(first[0], int) else 0,):
        rows = batch.lookup["item"].values()[by_row]
        assert rows[:N].equal(rows[N:])
        assert rows.min() > 0


def test_a_type_that_cannot_be_is_refused_by_its_file(tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    pq.write_table(pa.table(ROWS | {"item": [{"x": 1}] * N}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"b\.parquet: column 'item': it is struct<.*>, expected one number or text a row"
    ):
        source_of(events_config(tmp_path, files=["[ab].parquet"]))
