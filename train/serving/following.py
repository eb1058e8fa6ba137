"""A scorer that follows what a run publishes: `Follower(scorer, "RUN_DIR/published").start()`.

`train.checkpoint.publish` says what a published version is.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from train.checkpoint.publish import WHOLE, WORDS, Place
from train.process.files import fault_of
from train.serving.scorer import Scorer

log = logging.getLogger(__name__)
CHUNK = 1 << 16
"""Rows that are compared at once."""
PIN = "pin"
"""A file in the place that holds the newest version to serve: an operator's way back."""


@dataclass
class Rows:
    """New values of some rows of one tensor, or of some of their columns."""

    target: Tensor
    rows: Tensor
    values: Tensor

    def write(self) -> None:
        self.target[self.rows] = self.values

    def swap(self) -> Rows:
        """Write them; what puts the present values back."""
        before = Rows(self.target, self.rows, self.target[self.rows])
        self.write()
        return before


class Follower:
    """Keeps a scorer at the newest version of a place, or at that of its file `pin`, if it has one.

    Versions are read and checked beside the calls. Calls wait only while the rows of one are copied in memory: each is
    scored with one version as a whole. A version is taken that follows the one served, or is a base; one that does not,
    is of another run or of other ids, or is damaged, is refused: `error` says why, and the scorer stays where it is.
    Since the rows of the version before are kept, a pin can go back by one.
    """

    def __init__(self, scorer: Scorer, place: str | Path, seconds: float = 5.0) -> None:
        """ValueError for a scorer whose weights cannot be changed, and for a folder that is not there."""
        self.scorer, self.place, self.seconds = scorer, Place(place), seconds
        if self.place.is_local and not (folder := Path(self.place.root)).is_dir():
            nearest = next(each for each in folder.parents if each.exists())
            raise ValueError(
                f"there is no folder {folder} to follow, but {nearest}; a run with publish.every makes it at its start"
            )
        self.error: str | None = None
        self.failures = 0
        self._targets = scorer.weights()
        self._about: dict[str, Any] | None = None  # the manifest of what is served
        self._before: tuple[dict[str, Any] | None, list[Rows]] | None = None  # that of the version before, and its rows
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int | None:
        """The one that is served; None: what was exported."""
        return None if self._about is None else self._about["version"]

    def metrics(self) -> dict[str, tuple[str, float]]:
        """What each is, and its value, by name."""
        about = self._about or {"version": 0, "step": 0, "time": float("nan")}
        return {
            "gemsmith_model_version": ("Version that is served; 0: the export's.", about["version"]),
            "gemsmith_model_step": ("Step of training that it is of.", about["step"]),
            "gemsmith_model_age_seconds": ("Since it was published.", time.time() - about["time"]),
            "gemsmith_follow_failures": ("Looks for a newer version that failed.", self.failures),
        }

    def start(self) -> None:
        """Follow in a thread of its own, until `stop`."""
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """`seconds`: how long to wait for a version that is being read; None: to its end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.is_set():
            self.look()
            self._ended.wait(self.seconds)

    def look(self) -> bool:
        """Go to the newest version; whether there was one to go to. What fails is in `error`, and tried again."""
        before = self._about
        try:
            self._follow()
            self.error = None
        except Exception as error:  # of stores, too: a thread that ended would leave the scorer to grow old in silence
            self.failures += 1
            if str(error) != self.error:
                log.warning("%s stays: %s", f"version {self.version}" if self._about else "the export", error)
            self.error = str(error)
        return self._about is not before

    def _follow(self) -> None:
        versions = self.place.versions()
        if not versions:
            raise ValueError(f"{self.place.root} holds no version")
        if PIN in self.place.names():
            pinned = self.place.text(PIN).strip()
            if not pinned.isdecimal():
                raise ValueError(f"{self.place.root}/{PIN} holds {pinned[:20]!r}; write the number of a version")
            if self.version is not None and int(pinned) <= self.version:
                if int(pinned) < self.version:
                    self._back(int(pinned))
                return
            versions = [version for version in versions if version <= int(pinned)]
        for about in self._path(versions):
            self._take(about)

    def _back(self, version: int) -> None:
        before = self._before and self._before[0]
        if self._before is None or before is None or before["version"] != version:
            known = "none" if before is None else f"version {before['version']}"
            raise ValueError(f"version {version} is not the one before {self.version}: in memory is {known}")
        with self._alone():
            for rows in reversed(self._before[1]):
                rows.write()
            self._forget()
        self._about, self._before = before, None
        log.info("back at version %d", version)

    def _path(self, versions: list[int]) -> list[dict[str, Any]]:
        """The manifests from the one served, or from the newest base, to the last. ValueError for a gap.

        What is served is known by its whole manifest: in a place that was emptied, numbers begin anew.
        """
        chain: list[dict[str, Any]] = []
        for version in reversed(versions):
            about = self._manifest(version)
            if about == self._about:
                break
            if self._about and version <= self._about["version"] and about["time"] <= self._about["time"]:
                raise ValueError(f"the newest of {self.place.root} is {versions[-1]}, older than what is served")
            chain.append(about)
            if about["previous"] is None:
                break
        else:
            raise ValueError(f"{self.place.root} has no base, nor all versions after {self.version}")
        return chain[::-1]

    def _manifest(self, version: int) -> dict[str, Any]:
        about = self.place.manifest(version)
        for key, own, what in (
            ("run", self._about and self._about["run"], "another run's than what is served"),
            ("data_fingerprint", self.scorer.data_fingerprint, "of other ids than the export's"),
        ):
            if own is not None and about[key] != own:
                where = f"version {version} of {self.place.root}"
                raise ValueError(f"{where} is {what} ({key}); follow it with an export of that run")
        return about

    def _take(self, about: Mapping[str, Any]) -> None:
        if about["previous"] not in (None, self.version):
            raise ValueError(f"version {about['version']} follows {about['previous']}, and {self.version} is served")
        tensors: list[tuple[str, Tensor]] = []
        with tempfile.TemporaryDirectory() as scratch:
            for name, sums in about["files"].items():
                file = self.place.get(name, Path(scratch))
                if fault := fault_of(file, sums):
                    raise ValueError(f"version {about['version']} is damaged: {fault}")
                tensors += load_file(file).items()
            changes = self._changes(tensors, complete=about["previous"] is None)
        with self._alone():
            before: list[Rows] = []
            try:
                before.extend(change.swap() for change in changes)
            except BaseException:  # for memory: rows of two versions must not be served
                for rows in reversed(before):
                    rows.write()
                raise
            finally:
                self._forget()
        self._before, self._about = (self._about, before), dict(about)
        log.info("version %d, of step %d", about["version"], about["step"])

    def _forget(self) -> None:
        if self.scorer.user_sides is not None:
            self.scorer.user_sides.clear()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Without calls, and without what they have launched, on whatever stream."""
        with self.scorer.gate.closed():
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            yield
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)

    @torch.no_grad()
    def _changes(self, tensors: list[tuple[str, Tensor]], complete: bool) -> list[Rows]:
        """Where the rows of a version differ from what is served. ValueError if they are none of this model."""
        given: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
        by_key = dict(tensors)
        for key, values in by_key.items():
            kind, column, row, name = (*key.split("/", 3), "", "", "")[:4]
            if kind not in ("values", "rows") or not (column.isdecimal() and row.isdecimal()):
                raise ValueError(f"{key} is no name of rows or values")
            if kind == "values":
                rows = by_key.get(f"rows/{column}/{row}/{name}")
                if rows is None or rows.dtype != torch.int64 or rows.shape != values.shape[:1]:
                    raise ValueError(f"{key} lacks the numbers of its rows")
                given.setdefault((name, column), []).append((rows, values))
        merged = {key: tuple(torch.cat(each) for each in zip(*pairs, strict=True)) for key, pairs in given.items()}
        _sort_ids(merged)
        counts: Counter[str] = Counter()
        for (name, _), (_, values) in merged.items():
            counts[name] += values.numel()
        for name, (tensor, *_) in self._targets.items():
            if complete and counts[name] < tensor.numel():
                raise ValueError(f"the base has {counts[name]} of {tensor.numel()} values of {name}")
        changes = []
        for (name, column), (rows, values) in merged.items():
            if name not in self._targets:
                raise ValueError(f"the export has no {name}: it is of another model")
            for tensor in self._targets[name]:
                target = tensor.detach()
                target = target.view(1) if target.dim() == 0 else target
                if target.dim() == 2:
                    target = target[:, int(column) : int(column) + values.shape[1]] if values.dim() == 2 else target
                if values.dtype != target.dtype or values.shape[1:] != target.shape[1:]:
                    raise ValueError(f"{name} is {list(target.shape)} {target.dtype} here, other values are published")
                if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(target):
                    raise ValueError(f"{name} has {len(target)} rows here, others are published")
                changes.append(_differing(target, rows, values))
        return changes


def _differing(target: Tensor, rows: Tensor, values: Tensor) -> Rows:
    """A base leaves most as it is: what is equal need not be written."""
    chosen: list[Tensor] = []
    for part, given in zip(rows.split(CHUNK), values.split(CHUNK), strict=True):
        now, new = (each.reshape(len(part), -1).view(WORDS[each.element_size()]) for each in (
            target[part.to(target.device)], given.to(target.device)))  # fmt: skip
        chosen.append((now != new).any(1).nonzero().squeeze(1).cpu() + len(chosen) * CHUNK)
    places = torch.cat(chosen) if chosen else rows
    return Rows(target, rows[places].to(target.device), values[places].to(target.device))


def _sort_ids(merged: dict[tuple[str, str], Any]) -> None:
    """Ids of managed tables by size with their rows, as `LocalRowsOfIds` has them: ranks sort what is theirs."""
    ids, rows_of_ids = WHOLE
    for name, column in [key for key in merged if key[0].endswith(ids)]:
        rows, values = merged[name, column]
        partner = name.removesuffix(ids) + rows_of_ids, column
        values, order = values[rows.argsort()].sort(stable=True)
        merged[name, column] = rows.sort().values, values
        if partner in merged:
            other_rows, others = merged[partner]
            merged[partner] = other_rows.sort().values, others[other_rows.argsort()][order]
