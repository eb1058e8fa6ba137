"""Files and folders of a run: written whole or not at all, with checksums, and errors that name them."""

from __future__ import annotations

import json
import math
import resource
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PIECE = 1 << 24
"""Bytes that are read at a time."""
READERS = 4
"""Files that are read at the same time."""

Sums = dict[str, dict[str, int]]
"""File name -> {"bytes": ..., "crc32": ...}."""


def write_json(path: Path, value: Any) -> None:
    """Write a temporary file and rename it. JSON has no NaN and no infinity: they become null."""
    aside = path.with_name(f"{path.name}.partial")
    with named(aside):
        aside.write_text(json.dumps(_finite(value), indent=1, allow_nan=False))
        aside.replace(path)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the file system, which are silent about the file when it is written, name `path` and the room there."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{error.strerror} ({room(path.parent)})", str(path)) from error


def room(folder: Path) -> str:
    """How much can be written below a folder, in a few words: by the disk, and by the limit of a process."""
    folder = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = f", and a file may have {most / 2**20:,.1f} MiB (ulimit -f)" if most != resource.RLIM_INFINITY else ""
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder}{limit}"


def new_folder(path: Path) -> Path:
    """Make `path`, or `path-2` and so on where it exists: runs that start in one second do not share a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder, number = path, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
        else:
            return folder


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def faults(path: Path, sums: Sums) -> list[str]:
    """What is wrong with the files of a folder, each in a few words."""
    with ThreadPoolExecutor(READERS) as readers:
        checked = readers.map(lambda name: fault_of(path / name, sums[name]), sums)
        return [fault for fault in checked if fault is not None]


def fault_of(file: Path, expected: dict[str, int]) -> str | None:
    """In a few words why a file is not what was written, None if it is."""
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{file.name} has {size:,} bytes, {expected['bytes']:,} were written"
        if summed(file)["crc32"] != expected["crc32"]:
            return f"the checksum of {file.name} is not the one that was written"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None


def summed(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc, size = 0, 0
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return {"bytes": size, "crc32": crc}
