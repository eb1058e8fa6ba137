"""Checksums of a checkpoint's files: taken while they are written, compared before anything is read from them.

`manifest.json` has the size and the CRC-32 of every file. It tells accidents (a flipped bit, a file that was cut short,
a file of another step), not forgeries. Each rank sums what it writes, on its way to the file, and compares its share of
the files when a checkpoint is loaded.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from train.process import saved
from train.process.distributed import World
from train.process.files import Sums, faults, summed, write_json

log = logging.getLogger(__name__)
META = "meta.json"
MANIFEST = "manifest.json"


class DamagedError(ValueError):
    """A checkpoint whose files are not what was written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}); use another checkpoint of the run")


class SummedFiles(FileSystem):
    """The file system that DCP writes to, with `sums` of the files that were written to it."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _Summed(stream)
            yield summed
        self.sums[Path(path).name] = summed.sum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed(io.IOBase):
    """A file that is written from its beginning to its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sum = {"bytes": 0, "crc32": 0}

    def write(self, data: Any) -> int:
        self.sum["crc32"] = zlib.crc32(data, self.sum["crc32"])
        written = self._stream.write(data)
        self.sum["bytes"] += written
        return written

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        return self._stream.fileno()

    def flush(self) -> None:
        if not self._stream.closed:  # flushed once more when the interpreter lets go of this object
            self._stream.flush()


def write(path: Path, files: SummedFiles, others: Iterable[str], world: World) -> None:
    """Write the manifest of a checkpoint from what each rank has summed, and of `others` that the first one wrote."""
    gathered: list[Sums] | None = [{}] * world.size if world.is_first else None
    dist.gather_object(files.sums, gathered, dst=0, group=world.checkpoint_group)
    if gathered is not None:
        sums = {name: each for rank in gathered for name, each in rank.items()}
        write_json(path / MANIFEST, {"files": sums | {name: summed(path / name) for name in others}})


def verify(path: Path, world: World) -> None:
    """Raise `DamagedError`, on all ranks, unless the files are those of the manifest. Each rank reads a share."""
    sums, fault = world.broadcast(_attempt(path) if world.is_first else ({}, None))
    if fault is None:
        names = sorted(sums, key=lambda name: -sums[name]["bytes"])[world.rank :: world.size]
        found: list[list[str]] = [[]] * world.size
        dist.all_gather_object(found, faults(path, {name: sums[name] for name in names}), group=world.host_group)
        fault = next((each for rank in found for each in rank), None)
    if fault is not None:
        raise DamagedError(path, fault)


def verify_alone(path: Path) -> None:
    """The same, by one process."""
    sums, lost = _attempt(path)
    for fault in [lost] if lost else faults(path, sums):
        raise DamagedError(path, fault)


def read(path: Path) -> Sums:
    """What the manifest of a checkpoint says; empty for a checkpoint without one. Raises `DamagedError`."""
    try:
        sums = saved.fields((path / MANIFEST).read_bytes(), path / MANIFEST, {"files": dict})["files"]
        saved.check_sums(sums, path / MANIFEST)
        if all(Path(name).name == name for name in sums):
            return sums
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DamagedError(path, str(error)) from error
    raise DamagedError(path, f"{MANIFEST} names no files of a checkpoint")


def _attempt(path: Path) -> tuple[Sums, str | None]:
    """What the manifest says, or in a few words why a checkpoint, which is renamed when it is whole, is so no more."""
    try:
        sums = read(path)
        missing = [name for name in (META, MANIFEST) if path.is_dir() and not (path / name).exists()]
        return sums, f"{missing[0]} is lost" if missing else None
    except DamagedError as error:
        return {}, str(error).partition("(")[2].rpartition(")")[0]
