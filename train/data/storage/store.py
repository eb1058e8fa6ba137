"""The cache of prepared data: a folder of .npy arrays, opened memory-mapped, and a meta.json beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from train.config.schema import DataConfig
from train.data.storage.remote import DataFile, stamp
from train.process.files import faults, room, summed, write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 11
"""Raised whenever the prepared form changes, so that older caches are prepared anew."""

ByFirst = Callable[[Callable[[], None]], None]
"""Calls a function in the first of several processes while the others wait; its error is raised in all of them."""

ONLY_LOADING = (
    "batch_size", "eval_batch_size", "num_workers", "prefetch", "cache_dir", "max_history", "max_skipped", "pad_events",
    "negative_rate", "rows_at_once", "follow", "follow_wait", "manifest",
)  # fmt: skip
"""Settings that do not change what is prepared."""


def cache_folder(config: DataConfig, files: Iterable[DataFile]) -> Path:
    """Where this configuration of these files (name, size, modification time) is prepared."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in ONLY_LOADING}
    text = json.dumps([FORMAT, settings, [stamp(file) for file in files]], sort_keys=True)
    return Path(config.cache_dir).resolve() / f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def prepare_once(folder: Path, prepare: Callable[[Path], None], by_first: ByFirst) -> None:
    """Prepare the folder by the first process, unless it is there, while the others wait.

    Its files are compared with their sizes and checksums; a damaged folder is prepared anew.
    """

    def ensure() -> None:
        if folder.exists() and (fault := _fault(folder)):
            log.warning("%s is damaged (%s) and is prepared anew", folder, fault)
            shutil.rmtree(folder)
        if not folder.exists():
            _prepare(folder, prepare)

    by_first(ensure)
    if not folder.exists():
        raise ValueError(
            f"{socket.gethostname()} does not see {folder}: point data.cache_dir at a folder that all nodes share"
        )


def _prepare(folder: Path, prepare: Callable[[Path], None]) -> None:
    """Prepare into a temporary folder and rename it when it is whole."""
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)  # not mkdtemp: its mode of 0700 would lock others out of a shared cache
        prepare(partial)
        files = {str(path.relative_to(partial)): summed(path) for path in partial.rglob("*") if path.is_file()}
        write_json(partial / MANIFEST, files)
        os.rename(partial, folder)
    except OSError as error:
        if not folder.exists():  # otherwise another job has prepared the same data in the meantime
            raise OSError(
                f"{folder} could not be prepared ({error}); {room(folder.parent)}, and data.cache_dir can name another "
                "disk"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fault(folder: Path) -> str | None:
    """What is wrong with the files of a prepared folder, in a few words."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
        return next(iter(faults(folder, sums)), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {error!r}"


LONGEST_NAME = 255
"""Bytes of a file's name."""


def save_meta(folder: Path, meta: dict[str, Any]) -> None:
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def array_file(folder: Path, name: str) -> Path:
    return folder / file_name(name, ".npy")


def file_name(name: str, suffix: str) -> str:
    """Of any name: `unquote` undoes it. Letters beyond ASCII stay, of which a file's 255 bytes hold more so.
    ValueError for more."""
    made = "".join(each if ord(each) > 127 else quote(each, safe="") for each in name) + suffix
    if len(made.encode()) > LONGEST_NAME:
        raise ValueError(
            f"{name[:40]!r}... is a name of {len(name)} letters, more than the names of files can have: rename the "
            "column, or give its table another name by data.tables"
        )
    return made


def load_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


class Arrays(dict[str, np.ndarray]):
    """The saved arrays by name, memory-mapped.

    Reading one beyond the end of a file that was cut short would kill the process by a SIGBUS.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = sorted(folder.glob("*.npy"))
        manifest = folder / MANIFEST
        written = json.loads(manifest.read_text()) if manifest.exists() else {}
        self._sizes = [(str(file), written.get(file.name, {}).get("bytes") or file.stat().st_size) for file in files]
        self.check()
        for file in files:
            self[unquote(file.name.removesuffix(".npy"))] = np.asarray(np.load(file, mmap_mode="r"))

    def check(self) -> None:
        """RuntimeError if a file is not as long any more as it was written; a microsecond a file."""
        for path, size in self._sizes:
            try:
                left = os.stat(path).st_size
            except OSError:  # a file that was removed stays mapped
                continue
            if left < size:
                raise RuntimeError(
                    f"{Path(path).name} of the prepared data in {self._folder} had {size:,} bytes when it was "
                    f"written and has {left:,}: something cut it short. Started again with the same runtime.run_dir, "
                    "the run prepares the data anew and goes on; data.cache_dir can name a folder of its own"
                )
