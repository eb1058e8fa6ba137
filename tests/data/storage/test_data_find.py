"""Which files a name means, here and in an object store; columns that stand in the names of folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.data.sources import events_config, source_of, whole
from train.data import following
from train.data.storage.find import find_files, partitions
from train.data.storage.remote import DataFile

TREE = [
    "log/a.parquet",
    "log/_a.parquet",
    "log/.a.parquet",
    "log/_SUCCESS",
    "log/.ipynb_checkpoints/a.parquet",
    "log/_temporary/0/task/part.parquet",
    "log/_delta_log/0.json",
    "log/day.parquet/part-0.parquet",
    "log/day.parquet/_tmp/part-1.parquet",
    "log/dt=2026-02-27/b.parquet",
    "log/dt=2026-02-28/b.parquet",
    "log/dt=2026-02-28/_hour=3/c.parquet",
    "log/.dt=2026-02-28/d.parquet",
    "_staging/e.parquet",
    "_staging/_f.parquet",
]
DATA = ["log/a.parquet", "log/day.parquet/part-0.parquet", *TREE[9:12]]


@pytest.mark.parametrize("remote", [False, True], ids=["local", "object store"])
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("log", DATA),
        ("log/", DATA),
        ("log/*", DATA),
        ("log/**", DATA),
        ("log/**/*.parquet", DATA),
        ("*", DATA),
        ("log/*.parquet", DATA[:2]),
        ("log/dt=2026-02-2*", DATA[2:]),
        ("log/dt=2026-02-28", DATA[3:]),
        ("log/dt=*/*.parquet", DATA[2:4]),
        ("log/[a]*", ["log/a.parquet"]),
        ("log/_a.parquet", ["log/_a.parquet"]),
        ("log/_*.parquet", ["log/_a.parquet"]),
        ("log/_temporary/0/*/*.parquet", ["log/_temporary/0/task/part.parquet"]),
        ("_staging", ["_staging/e.parquet"]),
        ("_*/*.parquet", ["_staging/e.parquet"]),
        ("log/none*", None),
        ("log/_delta_l?g/*.parquet", None),
    ],
)
def test_hidden_files_are_left_out_and_folders_are_read(
    tmp_path: Path, remote: bool, pattern: str, found: list[str] | None
) -> None:
    root = f"memory://{tmp_path.name}{remote}" if remote else str(tmp_path / "[root]_*")  # no glob
    filesystem = fsspec.filesystem("memory" if remote else "file")
    for name in TREE:
        filesystem.makedirs(f"{root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        filesystem.pipe(f"{root}/{name}", b"x")
    if found is None:
        with pytest.raises(ValueError, match="no file matches"):
            find_files([pattern], root)
        return
    start = root.removeprefix("memory://")
    assert [str(file).partition(f"{start}/")[2] for file in find_files([pattern], root)] == sorted(found)


def test_what_a_store_refuses_is_told_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusedError(Exception):
        """Such as those of botocore, which are no OSError."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RefusedError("no credentials")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "exists", refuse)
    with pytest.raises(ValueError, match=r"memory://d/\*\.csv cannot be listed \(RefusedError: no credentials\)"):
        find_files(["memory://d/*.csv"])
    with pytest.raises(ValueError, match="zip://x.zip: "):
        find_files(["zip://x.zip"])


@pytest.mark.parametrize("pattern", ["log", "log/*", "log/**/*.csv"])
def test_links_are_followed_and_what_cannot_be_read_is_named(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("log/a.csv", "log/locked/b.csv", "log/.locked/c.csv", "elsewhere/d/e.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for link, target in (("log/day", "elsewhere/d"), ("log/loop", "log"), ("log/.gone.csv", "none")):
        (tmp_path / link).symlink_to(tmp_path / target)
    found = [str(file.relative_to(tmp_path)) for file in find_files([pattern], tmp_path) if isinstance(file, Path)]
    assert found == ["log/a.csv", "log/day/e.csv", "log/locked/b.csv"]
    listed = os.listdir

    def refuse(path: Path) -> list[str]:  # as for a user who is not root
        if path.name.endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ValueError, match="log/locked: the folder cannot be read \\(Permission denied"):
        find_files([pattern], tmp_path)
    monkeypatch.undo()
    (tmp_path / "log/gone.csv").symlink_to("none.csv")
    with pytest.raises(ValueError, match="gone.csv is a link to none.csv, which is not there"):
        find_files([pattern], tmp_path)


def test_what_is_hidden_is_not_complete_either(tmp_path: Path) -> None:
    for name in ("a.parquet", "_temporary/0/b.parquet", "c.parquet", "d.orc", "e.feather", "f.csv", "g.csv.tmp"):
        path = tmp_path / "log" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"user": [1]}), path) if name.startswith(("a", "_")) else path.write_bytes(b"PAR1" * 9)
    config = events_config(tmp_path, follow=["log"], follow_wait=1.0)
    assert [file.name for file in following.complete(config)] == ["a.parquet", "c.parquet", "f.csv"]


@pytest.mark.parametrize(
    ("folder", "columns"),
    [
        ("log/dt=2026-02-01/hour=3", {"dt": "2026-02-01", "hour": "3"}),
        ("log/_dt=1", {"_dt": "1"}),
        ("log/name=a%20b%3Dc", {"name": "a b=c"}),
        ("log/dt=__HIVE_DEFAULT_PARTITION__", {"dt": None}),
        ("log/=x", {}),
        ("log", {}),
    ],
)
def test_columns_of_folders(folder: str, columns: dict[str, str | None]) -> None:
    file: DataFile = Path(folder, "x=1.parquet")
    assert partitions(file) == columns


WRITE = {"parquet": pq.write_table, "csv": pa.csv.write_csv}


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("files", [["log"], ["log/dt=*"]])
def test_a_column_of_folders_is_as_one_of_files(tmp_path: Path, suffix: str, files: list[str]) -> None:
    days = ["2026-02-01", "2026-02-02", "__HIVE_DEFAULT_PARTITION__"]
    for number, day in enumerate(days):
        part, path = tmp_path / "log" / f"dt={day}", tmp_path / "plain" / f"{number}.{suffix}"
        rows = pa.table({"user": [1, 2], "time": [number, 9], "item": [3, 4], "click": [0, 1]})
        full = rows.append_column("dt", pa.array([None if "HIVE" in day else day] * 2, pa.string()))
        for folder, table in ((part, rows), (path.parent, full)):
            folder.mkdir(parents=True, exist_ok=True)
            WRITE[suffix](table, folder / f"{number}.{suffix}")
    columns = {"candidate_categorical": ["item", "dt"]}
    ours, plain = (source_of(events_config(tmp_path, files=each, **columns)) for each in (files, ["plain"]))
    assert ours.fingerprint == plain.fingerprint
    for name in ("item", "dt"):
        assert whole(ours).lookup[name].values().equal(whole(plain).lookup[name].values())
    dated = source_of(
        events_config(tmp_path, files=files, time="dt", time_format="%Y-%m-%d", bad_rows="skip", max_skipped=1.0)
    )
    assert sum(len(whole(dated, split).row) for split in ("train", "valid", "test")) == 4
    WRITE[suffix](rows, tmp_path / f"without.{suffix}")
    with pytest.raises(ValueError, match=r"without\.\w+ has no column 'dt'; it has"):
        source_of(events_config(tmp_path, files=["log", f"without.{suffix}"], **columns))
