"""Files of object stores, through fsspec: `s3://bucket/log/*.parquet`, `gs://`, `memory://`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow.fs import FSSpecHandler, PyFileSystem

MARKS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
"""What stores call the thing that changes when a file is written again."""

CODECS = {"gzip": rb"\x1f\x8b", "zstd": rb"\x28\xb5\x2f\xfd", "bz2": rb"BZh[1-9]1AY&SY", "lz4": rb"\x04\x22\x4d\x18"}
"""Compressions, with patterns of how such files begin."""


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


def find_remote(url: str) -> tuple[str, list[RemoteFile]]:
    """The path of a URL, and what is there: the file, those of the folder (recursively) or of a glob's matches."""
    protocol = url.split("://", 1)[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"{url}: {error}; fsspec reads {protocol}:// with the package that it names") from None
    try:
        filesystem.invalidate_cache()  # files may have come
        if filesystem.exists(path):
            matches = filesystem.find(path)
        else:
            found = filesystem.glob(path, detail=True)
            matches = [
                name
                for match, about in found.items()
                for name in (filesystem.find(match) if about["type"] == "directory" else [match])
            ]
    except Exception as error:  # of each store its own
        raise ValueError(f"{url} cannot be listed ({type(error).__name__}: {error})") from error
    return path, [RemoteFile(filesystem.unstrip_protocol(name), name, filesystem) for name in sorted(set(matches))]


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
    """For files that are read from their end."""
    return file.arrow().open_input_file(file.path) if isinstance(file, RemoteFile) else pa.OSFile(str(file))


def packed_by(file: DataFile) -> str | None:
    """The codec of a compressed file, by its first bytes, whatever its name."""
    with random_access(file) as opened:
        head = opened.read(10)
    return next((codec for codec, pattern in CODECS.items() if re.match(pattern, head)), None)


def stream(file: DataFile) -> pa.NativeFile:
    """From the start on, uncompressed."""
    codec = packed_by(file)
    if isinstance(file, RemoteFile):
        opened = file.arrow().open_input_stream(file.path, compression=None)
    else:
        opened = pa.input_stream(str(file), compression=None)
    return pa.CompressedInputStream(opened, codec) if codec else opened
