"""Files by name, folder or glob, here or in an object store, and columns that stand in the names of folders."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import unquote

from train.data.storage.remote import DataFile, find_remote, is_remote

WITHOUT_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""Value of a folder whose column is null."""


def find_files(patterns: Sequence[str], root: str | Path = ".") -> list[DataFile]:
    """Files, files in folders (recursively) and what matches globs, of folders their files, sorted by name.

    A file is left out if a part of its name below the folder that is named, or below the part of a glob without
    wildcards, begins with a dot or an underscore: what is not whole, or no data. Not so `_x=...`, the folder of a
    column, and what a part of a glob names by that character. A pattern or the root may be the URL of an object store,
    see `train.data.storage.remote`.
    """
    found: list[DataFile] = []
    for pattern in patterns:
        matches: Sequence[DataFile]
        if is_remote(pattern) or (is_remote(root) and not Path(pattern).is_absolute()):
            shown = pattern if is_remote(pattern) else f"{str(root).rstrip('/')}/{pattern}"
            named, remote = find_remote(shown)
            matches = [file for file in remote if _is_visible(PurePosixPath(file.path), PurePosixPath(named))]
        else:
            start = Path(root).expanduser()
            path = start / Path(pattern).expanduser()
            shown = str(path.absolute())
            matches = [file for file in _find_local(path, start) if _is_visible(file, path)]
        if not matches:
            start_of = "" if is_remote(pattern) or Path(pattern).is_absolute() else f", from data.root={root} on"
            raise ValueError(
                f"no file matches {shown!r}; name a file, a folder or a glob{start_of}, e.g. 'logs/*.parquet'"
            )
        found.extend(matches)
    return found


def _find_local(path: Path, root: Path) -> list[Path]:
    start, parts, unread = path, tuple[str, ...](), dict[Path, str | None]()
    if not path.exists():  # in a glob, the name of the root has no wildcards
        own, start = (path.relative_to(root), root) if path.is_relative_to(root) else (path, Path())
        parts = own.parts
    found = sorted({file for file in _expanded(start, (*parts, "**"), unread) if not file.is_dir()})
    for folder, reason in unread.items():
        if _is_visible(folder, path):
            raise ValueError(f"{folder}: the folder cannot be read ({reason}); change its mode, or name others")
    for file in found:
        if file.is_symlink() and not file.exists() and _is_visible(file, path):
            raise ValueError(f"{file} is a link to {os.readlink(file)}, which is not there; restore or remove it")
    return [file for file in found if file.is_file()]


def _expanded(
    path: Path, parts: Sequence[str], unread: dict[Path, str | None], above: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """What there is of a glob's parts below a path, and folders that cannot be read, which Python's glob leaves out.

    Links to folders are followed, except to one that they are in.
    """
    if not parts:
        yield from [path] if path.exists() or path.is_symlink() else []
        return
    part, *rest = parts
    if part != "**" and not glob.has_magic(part):
        yield from _expanded(path / part, rest, unread, above)
        return
    if part == "**":
        yield from _expanded(path, rest, unread, above)
    if not path.is_dir() or (real := os.path.realpath(path)) in above:
        return
    try:
        names = os.listdir(path)
    except OSError as error:
        unread[path] = error.strerror
        return
    for name in names:
        if part == "**":
            yield from _expanded(path / name, parts, unread, above | {real})
        elif fnmatchcase(name, part):
            yield from _expanded(path / name, rest, unread, above | {real})


def _is_visible(file: PurePath, named: PurePath) -> bool:
    fixed = tuple(takewhile(lambda part: not glob.has_magic(part), named.parts))
    if file.parts[: len(named.parts)] == named.parts:  # the file or folder itself, whatever characters it has
        fixed = named.parts
    own = named.parts[len(fixed) :]
    *folders, last = file.parts[len(fixed) :] or ("",)

    def is_hidden(part: str, depth: int) -> bool:
        patterns = own if "**" in own else own[depth : depth + 1]
        return part.startswith((".", "_")) and not any(p[0] == part[0] and fnmatchcase(part, p) for p in patterns)

    if is_hidden(last, len(folders)):
        return False
    return not any(is_hidden(each, depth) and not is_column(each) for depth, each in enumerate(folders))


def is_column(folder: str) -> bool:
    return "=" in folder[1:] and not folder.startswith(".")


def partitions(file: DataFile) -> dict[str, str | None]:
    """Columns that stand in the names of a file's folders, as in dt=2026-02-01/hour=3."""
    pairs = [folder.split("=", 1) for folder in PurePosixPath(str(file)).parts[:-1] if is_column(folder)]
    return {unquote(name): None if value == WITHOUT_VALUE else unquote(value) for name, value in pairs}
