"""Files of object stores, through fsspec: `s3://bucket/log/*.parquet`, `gs://`, `memory://`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow.fs import FSSpecHandler, PyFileSystem

MARKS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
"""What stores call the thing that changes when a file is written again."""


@dataclass(frozen=True)
class RemoteFile:
    """One object, with what preparing needs of it."""

    url: str
    path: str = field(compare=False)
    filesystem: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def resolve(self) -> RemoteFile:
        return self

    def arrow(self) -> PyFileSystem:
        return PyFileSystem(FSSpecHandler(self.filesystem))


DataFile = Path | RemoteFile


def is_remote(pattern: str | Path) -> bool:
    return "://" in str(pattern)


def find_remote(url: str) -> list[RemoteFile]:
    """The file, those of the folder (recursively) or those that match the glob of a URL; hidden ones left out."""
    protocol = url.split("://", 1)[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url}: {error}; fsspec reads {protocol}:// with the package that it names") from None
    filesystem.invalidate_cache()  # files may have come
    matches = filesystem.find(path) if filesystem.isdir(path) else filesystem.glob(path)
    shown = [match for match in sorted(matches) if not PurePosixPath(match).name.startswith((".", "_"))]
    return [RemoteFile(filesystem.unstrip_protocol(match), match, filesystem) for match in shown]


def stamp(file: DataFile) -> tuple[str, int, Any]:
    """(name, size, a mark that changes when it is written again)."""
    if isinstance(file, RemoteFile):
        about = file.filesystem.info(file.path)
        marks = [str(about[name]) for name in MARKS if about.get(name)]
        return file.url, int(about["size"] or 0), marks[0] if marks else ""
    about = file.stat()
    return str(file.resolve()), about.st_size, about.st_mtime_ns


def size(file: DataFile) -> int:
    return stamp(file)[1]


def random_access(file: DataFile) -> pa.NativeFile:
    """For parquet files, which are read from their end."""
    return file.arrow().open_input_file(file.path) if isinstance(file, RemoteFile) else pa.OSFile(str(file))


def stream(file: DataFile) -> pa.NativeFile:
    """From the start on, uncompressed if its name ends as that of a compressed file."""
    if isinstance(file, RemoteFile):
        return file.arrow().open_input_stream(file.path)
    return pa.input_stream(str(file), compression="detect")
