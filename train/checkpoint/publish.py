"""What a run publishes while it trains, for scorers that follow it: `publish.every`.

A version is a manifest, `00000012.json`, and a file of tensors of each rank, `00000012.0.safetensors`. It holds the
rows that differ from those of the version before, of tables and of all other weights; a base holds all. The manifest,
which has size and CRC-32 of each file, is written last, and files appear whole: what has no manifest is not there. A
run that is started again begins with a base, and so does one whose last publication failed, since nobody knows what a
scorer has seen of it, or whose last base is gone. There is a new base, too, when the versions since the last one have
as many bytes; everything before it is deleted then, so that a place holds at most about three times the weights.

Rows are compared by fingerprints of 64 bits, of which each rank keeps those of its own: whatever changes a row, an
optimiser, an average or an id that takes it over, is seen, and no step of training takes longer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from modules.layers.embedding.managed_local import OF_TRAINING
from modules.pretrained import save_tensors
from train.process import saved
from train.process.distributed import World
from train.process.files import summed, write_json

log = logging.getLogger(__name__)
FORMAT = 1
FIELDS = {
    "format": int, "version": int, "previous": int | None, "run": str, "data_fingerprint": str, "step": int,
    "time": float, "files": dict,
}  # fmt: skip
NAME = re.compile(r"(\d{8})(\.json|\.\d+\.safetensors)", re.ASCII)
MANIFEST = ".json"
PARTIAL = ".partial."
WHOLE = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
"""Which id has which row of a managed table: sorted together where they are served, hence never in part."""
MOST = 500
"""Versions after a base."""
CHUNK = 1 << 22
"""Elements whose fingerprints are taken at once."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Part = tuple[str, int, int, Tensor]
"""Name, first row and first column of a tensor, or of the part of it that a rank has."""


class Place:
    """A folder, or a prefix of an object store (`s3://bucket/run`), whose files appear whole."""

    def __init__(self, url: str | Path) -> None:
        try:
            self.files, self.root = fsspec.core.url_to_fs(str(url))
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url}: {error}; name a folder, or a URL whose package for fsspec is installed") from None
        self.is_local = isinstance(self.files, LocalFileSystem)

    def create(self) -> None:
        """For who writes. One who reads a folder that is not there has mistyped it."""
        if self.is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Of the files that there are."""
        self.files.invalidate_cache()
        found = self.files.ls(self.root, detail=False) if self.files.exists(self.root) else []
        return sorted(str(name).rpartition("/")[2] for name in found)

    def versions(self) -> list[int]:
        """Those that are whole."""
        return [int(name[:8]) for name in self.names() if NAME.fullmatch(name) and name.endswith(MANIFEST)]

    def manifest(self, version: int) -> dict[str, Any]:
        """That of a version. ValueError that names it and the field, if it is none."""
        path = f"{self.root}/{version:08d}{MANIFEST}"
        about = saved.fields(self.files.cat_file(path), path, FIELDS)
        saved.check_sums(about["files"], path)
        wanted = {"format": (FORMAT,), "version": (version,), "previous": (None, version - 1)}
        for key, values in wanted.items():
            if about[key] not in values:
                raise ValueError(f"{path} is no manifest that is read here ({key}={about[key]!r} is none of {values})")
        if stray := [file for file in about["files"] if not NAME.fullmatch(file)]:
            raise ValueError(f"{path} is damaged (files names {stray[0]!r})")
        return about

    def put(self, name: str, write: Callable[[Path], None]) -> dict[str, int]:
        """Let `write` make a file, which then appears here. Its size and checksum."""
        self.create()
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=self.root if self.is_local else None) as scratch:
            file = Path(scratch, name)
            write(file)
            sums = summed(file)
            if self.is_local:
                os.replace(file, Path(self.root, name))
            else:
                self.files.put_file(str(file), f"{self.root}/{name}")
        return sums

    def get(self, name: str, scratch: Path) -> Path:
        """A local file of this content. OSError if there is none any more."""
        if self.is_local:
            return Path(self.root, name)
        self.files.get_file(f"{self.root}/{name}", str(scratch / name))
        return scratch / name

    def text(self, name: str) -> str:
        return self.files.cat_file(f"{self.root}/{name}").decode()

    def delete(self, name: str) -> None:
        self.files.rm_file(f"{self.root}/{name}")

    def clean(self) -> None:
        """Remove what a process has left that was killed while it wrote."""
        for left in Path(self.root).glob(f"{PARTIAL}*") if self.is_local else ():
            shutil.rmtree(left, ignore_errors=True)


class Publisher:
    """Writes versions of a run's weights to `place`."""

    def __init__(self, place: Place, run: str, fingerprint: str, world: World | None = None) -> None:
        """`run` is the same after a restart; `fingerprint` that of the data, whose ids the rows are of.

        ValueError for a place where another run has published.
        """
        self.place, self.run, self.fingerprint, self.world = place, run, fingerprint, world
        self._known: dict[tuple[str, int, int], Tensor] = {}  # fingerprints of the rows of this rank's parts
        self._base = self._since = self._count = 0  # bytes of the last base, bytes and number of versions after it
        self._based = 0  # version of the last base; 0: the next one is a base
        self.version = self._of_first(self._last)

    def _of_first(self, function: Callable[[], int]) -> int:
        return function() if self.world is None else self.world.by_first(function)

    def _lacks_base(self) -> int:
        try:
            return f"{self._based:08d}{MANIFEST}" not in self.place.names()
        except Exception:  # of stores, too; then what is written fails, and for all ranks
            return True

    def _last(self) -> int:
        self.place.create()
        self.place.clean()
        versions = self.place.versions()
        if not versions:
            return 0
        run = self.place.manifest(versions[-1])["run"]
        if run != self.run:
            raise ValueError(
                f"{self.place.root} holds what the run {run} has published, and this is {self.run}: name another "
                f"folder, e.g. publish.to={self.place.root}-2"
            )
        return versions[-1]

    @torch.no_grad()
    def publish(self, state: Mapping[str, Any], step: int) -> dict[str, int]:
        """Write what has changed of `state`, the weights by name, as a version. All ranks call it.

        Returns its number and bytes, and whether it is a base. OSError, on all ranks, if one could not write:
        then this version is none, and the next one a base.
        """
        is_base = not self._based or self._since > self._base or self._count >= MOST or self._of_first(self._lacks_base)
        if is_base:
            self._known = {}
        last_base, self.version, self._based = self._based, self.version + 1, 0
        changed: dict[str, Tensor] = {}
        for name, row, column, tensor in parts(state, self.world is None or self.world.is_first):
            now = fingerprints(tensor)
            before = self._known.get((name, row, column))
            if before is None or name.endswith(WHOLE):
                rows = torch.arange(len(now), device=now.device)
            else:
                rows = torch.ne(now, before).nonzero().squeeze(1)
            self._known[name, row, column] = now
            if len(rows):
                values = tensor.reshape(1).clone() if tensor.dim() == 0 else tensor[rows]
                changed[f"values/{column}/{row}/{name}"] = values.cpu().contiguous()
                changed[f"rows/{column}/{row}/{name}"] = rows.cpu() + row
        files = self._gathered(lambda: self._write(changed))
        about = {
            "format": FORMAT,
            "run": self.run,
            "version": self.version,
            "previous": None if is_base else self.version - 1,
            "step": step,
            "time": time.time(),
            "data_fingerprint": self.fingerprint,
            "files": files,
        }
        self._gathered(lambda: self._conclude(about) if self.world is None or self.world.is_first else {})
        size = sum(each["bytes"] for each in files.values())
        self._based = self.version if is_base else last_base
        if is_base:
            self._base, self._since, self._count = size, 0, 0
        else:
            self._since, self._count = self._since + size, self._count + 1
        return {"version": self.version, "bytes": size, "base": int(is_base)}

    def _write(self, changed: dict[str, Tensor]) -> dict[str, dict[str, int]]:
        name = f"{self.version:08d}.{self.world.rank if self.world else 0}.safetensors"
        return {name: self.place.put(name, partial(save_tensors, changed))}

    def _conclude(self, about: dict[str, Any]) -> dict[str, Any]:
        self.place.put(f"{self.version:08d}{MANIFEST}", partial(write_json, value=about))
        if about["previous"] is None:
            names = [name for name in self.place.names() if NAME.fullmatch(name) and int(name[:8]) < self.version]
            for old in sorted(names, key=lambda name: not name.endswith(MANIFEST)):  # else one would lack its files
                self.place.delete(old)
        return {}

    def _gathered(self, make: Any) -> dict[str, Any]:
        """What `make` returns on all ranks, as one. OSError on all if it fails on one."""
        try:
            made, fault = make(), None
        except Exception as error:  # stores have errors of their own; and the other ranks wait for this one
            made, fault = {}, error
        if self.world is not None and self.world.size > 1:
            found: list[Any] = [None] * self.world.size
            dist.all_gather_object(found, (made, fault and str(fault)), group=self.world.host_group)
            made = {name: each for one, _ in found for name, each in one.items()}
            fault = fault or next((OSError(reason) for _, reason in found if reason), None)
        if fault is not None:
            raise OSError(f"{self.place.root}: {fault}") from fault
        return made


def parts(state: Mapping[str, Any], first: bool) -> Iterator[Part]:
    """What this rank publishes of a state: its shards, and of what every rank has, all on the first rank."""
    for name, value in state.items():
        if name.endswith(OF_TRAINING):
            continue
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = (*shard.metadata.shard_offsets, 0)[:2]
                yield name, row, column, shard.tensor.detach()
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value  # which all ranks take part in
        if first:
            yield name, 0, 0, whole.detach()


def fingerprints(tensor: Tensor) -> Tensor:
    """[rows] int64 of a tensor [rows, ...], by its bits: different rows have the same one by a chance of 2^-64."""
    rows = tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
    generator = torch.Generator().manual_seed(12)
    keys = torch.randint(-(2**62), 2**62, (2, rows.shape[1]), generator=generator).to(rows.device) * 2 + 1
    found = []
    for chunk in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):
        words = chunk.contiguous().view(WORDS[chunk.element_size()]).long() * keys[0]
        found.append(((words ^ (words >> 31)) * keys[1]).sum(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=rows.device)


def run_id(run_dir: Path) -> str:
    """Of the run in a folder, whenever it is started."""
    file = run_dir / "publication.json"
    if not file.exists():
        write_json(file, {"run": uuid.uuid4().hex})
    return json.loads(file.read_text())["run"]
