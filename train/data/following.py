"""Files of labelled rows that come while a run trains: `data.follow_wait`.

The files that are there when a run begins decide its vocabulary, scales and splits, for good. Files that come later are
parts: once the known ones are used up, all new ones together are prepared with that vocabulary and trained on. A
checkpoint names the files of all parts, so that a resumed run neither takes a row twice nor loses one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.config.schema import Config, EventsConfig
from train.data import build_source
from train.data.events.names import known_at
from train.data.events.read import row_files
from train.data.source import PreparedSource, Source
from train.data.storage.find import find_files
from train.data.storage.formats import is_whole
from train.data.storage.remote import DataFile, is_remote, random_access, size
from train.process.distributed import World

log = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two looks."""
UNFINISHED = (".tmp", ".partial")
"""Ends of names that a file has until it is renamed."""
ENDED = {".parquet": "parquet", ".pq": "parquet", ".orc": "orc", ".feather": "arrow", ".arrow": "arrow"}
"""Names of files that end as their format says once they are whole, since their index is written last."""
MOST_NAMED = 5

Part = dict[str, Any]
"""files: [name, bytes] of each; rows, requests: of training; end: the epoch, of the whole run, after its last one."""


def pin(config: Config, world: World, run_dir: Path) -> None:
    """Replace `data.files` by the files that a run began with at its first start, and `data.follow` by patterns of all.

    Raises ValueError for settings that do not go with files that come later.
    """
    data = config.data
    if not data.is_open:
        return
    check(config)
    assert isinstance(data, EventsConfig)
    patterns = [*data.files, *data.follow]

    def begin() -> list[str]:
        saved = run_dir / "config.json"
        earlier = json.loads(saved.read_text())["config"]["data"] if saved.exists() else {}
        if earlier.get("follow") == patterns:
            return earlier["files"]
        own = {_name(file) for file in find_files(data.files, data.root)}
        found = [_name(file) for file in complete(dataclasses.replace(data, follow=patterns))]
        if not own & set(found):
            raise ValueError(f"data.files={data.files}: no file is complete yet; begin with one that is")
        return [name for name in found if name in own]

    data.follow, data.files = patterns, world.by_first(begin)
    if config.runtime.epochs is None:
        config.runtime.epochs = 1


def check(config: Config) -> None:
    data = config.data
    assert isinstance(data, EventsConfig)
    key = f"data.follow_wait={data.follow_wait}"
    own = [name for name, history in data.histories.items() if not (history.files or history.lists)]
    if config.optimizer.schedule != "constant" and not config.runtime.steps:
        raise ValueError(
            f"{key}: nobody knows how long the run will be, and optimizer.schedule={config.optimizer.schedule} goes by "
            "it; use optimizer.schedule=constant, or end the run by runtime.steps"
        )
    if data.split_by != "time":
        raise ValueError(f"{key} with data.split_by={data.split_by}: later files hold out nothing; use split_by=time")
    if config.distill.predictions:
        raise ValueError(f"{key}: distill.predictions has none for files that come later; use distill.checkpoint")
    if own and (not data.time or data.column_names):
        raise ValueError(
            f"{key}: data.histories.{own[0]} is of earlier rows, which may stand in other files: data.time must name "
            "their time, and files need names of columns of their own (data.column_names)"
        )


class Follower:
    """The parts of a run after the first, and what is trained on now."""

    def __init__(self, config: Config, world: World, run_dir: Path, source: Source) -> None:
        assert isinstance(config.data, EventsConfig)
        assert isinstance(source, PreparedSource)
        self._data, self._epochs, self._world, self._run_dir = config.data, config.runtime.epochs, world, run_dir
        self.first = self.source = source

    def begin(self) -> list[Part]:
        """The parts of a run that begins."""
        found = self._world.by_first(lambda: _sizes(find_files(self._data.files, self._data.root)))
        return [self._part(found, self.first, 0)]

    def restore(self, parts: Sequence[Part], epoch: int, consumed: int) -> None:
        """Go on within the last of a checkpoint's parts, or after it. ValueError for a file that has changed."""
        self._world.by_first(lambda: self.first.keep_mapping(self._run_dir))
        if epoch < parts[-1]["end"] and len(parts) > 1:
            names = [name for name, _ in parts[-1]["files"]]
            now = dict(self._world.by_first(lambda: _sizes(find_files(names, self._data.root))))
            for name, before in parts[-1]["files"]:
                if now[name] != before:
                    raise ValueError(
                        f"{name} had {before} bytes when the run began to train on it, and has {now[name]}: a file "
                        "that is complete must stay as it is; put the former back, or begin another run"
                    )
            self.source = self._prepare([name for part in parts[:-1] for name, _ in part["files"]], names)
        log.info(
            "%s; of the newest %s requests %s are trained on",
            _told(parts),
            f"{parts[-1]['requests']:,}",
            f"{consumed:,}" if epoch < parts[-1]["end"] else "all",
        )

    def take(self, parts: list[Part], epoch: int, between: Callable[[], None]) -> bool:
        """Append a part of all files that have come, and have its `source`; wait for them if there are none.

        False, on all ranks, if none has come for `data.follow_wait` seconds. `between` is called from look to look.
        Raises ValueError, naming file and row, for bad input.
        """
        known = {name for part in parts for name, _ in part["files"]}
        deadline = time.monotonic() + self._data.follow_wait
        while not (found := self._look(known, parts)):
            if self._world.broadcast(time.monotonic() >= deadline):
                self._warn_of_unfinished(known)
                log.info("%s; no other has come for %g s (data.follow_wait)", _told(parts), self._data.follow_wait)
                return False
            between()
            time.sleep(min(POLL, max(self._data.follow_wait / 10, 0.01)))
        names = [name for name, _ in found]
        self.source = self._prepare(sorted(known), names)
        parts.append(self._part(found, self.source, epoch))
        shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
        rows, requests = parts[-1]["rows"], parts[-1]["requests"]
        log.info("new: %s with %s rows, %s requests; %s", shown, f"{rows:,}", f"{requests:,}", _told(parts))
        return True

    def _part(self, files: list[tuple[str, int]], source: PreparedSource, epoch: int) -> Part:
        rows, requests = source.num_candidates("train"), source.num_requests("train")
        return {
            "files": [list(file) for file in files], "rows": rows, "requests": requests, "end": epoch + self._epochs
        }  # fmt: skip

    def _look(self, known: set[str], parts: list[Part]) -> list[tuple[str, int]]:
        """Files that have come, on all ranks; those without a row are noted as known."""

        def look() -> tuple[list[tuple[str, int]], int]:
            data = self._data
            held = {_name(file) for file in find_files([*data.valid_files, *data.test_files], data.root)}
            new = [each for each in _sizes(complete(data)) if each[0] not in known | held]
            files = dataclasses.replace(data, files=[name for name, _ in new])
            return new, row_files(files, set()).count() if new else 0

        new, rows = self._world.by_first(look)
        if new and not rows:
            parts[-1]["files"] += new
            known |= {name for name, _ in new}
        return new if rows else []

    def _warn_of_unfinished(self, known: set[str]) -> None:
        if not self._world.is_first or self._data.manifest:
            return
        for file in _matching(self._data):
            if _name(file) not in known and not _is_complete(file):
                log.warning("%s is not complete, and is left out", file)

    def _prepare(self, before: Sequence[str], names: list[str]) -> PreparedSource:
        """Files as training rows, with the vocabulary and the scales of the first; histories know all files."""
        data = self._data
        rows = [*before, *names, *data.valid_files, *data.test_files]
        histories = {
            name: each
            if each.files or each.lists
            else dataclasses.replace(each, files=rows, known_at=known_at(data, each))
            for name, each in data.histories.items()
        }
        vectors = {name: dataclasses.replace(each, files=[]) for name, each in data.table_vectors.items()}
        part = dataclasses.replace(
            data,
            files=names,
            valid_files=[],
            test_files=[],
            split=[1.0, 0.0, 0.0],
            max_candidates=self.first.spec.max_candidates,  # of the model, which is built
            histories=histories,
            table_vectors=vectors,
            vocabulary_of=str(self._run_dir),
            new_ids=False,
            follow=[],
            follow_wait=0,
        )
        source = build_source(part, self._world.by_first)
        assert isinstance(source, PreparedSource)
        if source.fingerprint != self.first.fingerprint:
            raise ValueError(f"{self._run_dir}/vocabulary is not that of the run's first files; begin another run")
        return source


def complete(data: EventsConfig) -> list[DataFile]:
    """The files of `data.follow` that nobody writes any more, by name.

    These are the ones that `data.manifest` lists; without it all whose name is final, and of Parquet, ORC and Arrow
    files those that end as such a file does.
    """
    found = _matching(data)
    if not data.manifest:
        return [file for file in found if _is_complete(file)]
    (manifest,) = find_files([data.manifest], data.root)
    with random_access(manifest) as file:
        lines = file.read().decode().split("\n")[:-1]  # the last one is still being written
    by_name = {_name(file): file for file in found}
    listed = []
    for number, line in enumerate(lines, start=1):
        if not (line := line.strip()):
            continue
        name = line if is_remote(line) else f"{data.root}/{line}" if is_remote(data.root) else _local(data.root, line)
        if name not in by_name:
            raise ValueError(
                f"{manifest}, line {number}: {line!r} is not there, or no pattern of data.files={data.follow} finds it"
            )
        listed.append(by_name[name])
    return list(dict.fromkeys(listed))


def _matching(data: EventsConfig) -> list[DataFile]:
    """Files that match a pattern, each once. A pattern may have none: files may be removed after their use."""
    found: dict[str, DataFile] = {}
    for pattern in data.follow:
        try:
            files = find_files([pattern], data.root)
        except ValueError:
            continue
        found |= {_name(file): file for file in files}
    return list(found.values())


def _is_complete(file: DataFile) -> bool:
    if file.name.startswith((".", "_")) or file.name.endswith(UNFINISHED):
        return False
    name = ENDED.get(Path(file.name).suffix)
    return is_whole(file, name) if name else size(file) > 0


def _name(file: DataFile) -> str:
    return str(file.resolve())


def _local(root: str, name: str) -> str:
    return str(Path(root, name).expanduser().resolve())


def _sizes(files: Sequence[DataFile]) -> list[tuple[str, int]]:
    return [(_name(file), size(file)) for file in files]


def _told(parts: Sequence[Mapping[str, Any]]) -> str:
    files, rows = sum(len(part["files"]) for part in parts), sum(part["rows"] for part in parts)
    return f"{files:,} files with {rows:,} training rows so far"
