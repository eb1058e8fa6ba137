"""Reading what DCP wrote, without running code that a file brings.

DCP's own reader unpickles the index of a checkpoint (`.metadata`) and values that are no tensors, so that a checkpoint
made by somebody else could run anything. Here the index may hold nothing but the classes that DCP writes there, and
values are read as weights only.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from train.checkpoint.manifest import DamagedError

ALLOWED: dict[str, tuple[str, ...]] = {
    metadata.__name__: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),  # and dtypes
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath", "WindowsPath"),  # their module from Python 3.13 on
}  # fmt: skip
"""By module, what the index of a checkpoint may name."""


class Planner(DefaultLoadPlanner):
    """Values that are no tensors are read as weights only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for what would run code in DCP's own call, which reads anything
        value.seek(0)
        super().load_bytes(read_item, value)


class Reader(dcp.FileSystemReader):
    """Reads the index by `_IndexUnpickler`, and tensors from files of the checkpoint's own folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(index).__name__}, not the index of a checkpoint")
        for info in index.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f".metadata names a file of another folder: {info.relative_path!r}")
        if index.storage_meta is None:
            index.storage_meta = metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        named = name in ALLOWED.get(module, ())
        if named or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module if module != "pathlib._local" else pathlib.__name__, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint does")


def read_metadata(path: Path) -> Metadata:
    """Names and sizes of a checkpoint's tensors. `DamagedError` when it cannot be read."""
    return _or_damaged(path, lambda: Reader(path).read_metadata())


def read(
    path: Path,
    state: dict[str, Any],
    *,
    planner: LoadPlanner | None = None,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Read the tensors of `state` in place, by all ranks of `group`, or by this process `alone`.

    `DamagedError` when they cannot be read.
    """
    reader, planner = Reader(path), planner or Planner()
    _or_damaged(
        path, lambda: dcp.load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
    )


def _or_damaged(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (Exception, CheckpointException) as error:  # DCP's own is a BaseException
        # It has the tracebacks of all ranks for a text.
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        reason = next((failure for failure, _ in failures), error)
        text = str(reason)
        if "weights_only" in text:  # torch advises to unpickle it after all
            text = "a file holds something else than tensors"
        raise DamagedError(path, f"{type(reason).__name__}: {text}") from error
