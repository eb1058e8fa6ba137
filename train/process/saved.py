"""JSON files as they were written: fields of their types, or a ValueError that names file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from modules.config import is_of

Kinds = Mapping[str, Any]
"""Field -> its type, such as str, int | None, list[str] or dict[str, int]."""


def fields(content: bytes, path: Path | str, kinds: Kinds, later: Kinds | None = None) -> dict[str, Any]:
    """What a file holds, all `kinds` among it; those of `later` are lacking in files of earlier versions."""
    try:
        about = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path} is damaged ({_shown(about)} is no mapping)")
    if lacking := [name for name in kinds if name not in about]:
        raise ValueError(f"{path} has no {lacking[0]!r}: it is damaged, or of another version")
    for name, kind in {**kinds, **(later or {})}.items():
        if name in about and not is_of(kind, about[name]):
            kind = kind.__name__ if type(kind) is type else kind
            raise ValueError(f"{path} is damaged ({name}={_shown(about[name])} is no {kind})")
    return about


def check_sums(sums: Mapping[str, Any], path: Path | str) -> None:
    """Refuse what are no sizes and checksums of files below a folder, the field `files` of a file."""
    for name, each in sums.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name:
            raise ValueError(f"{path} is damaged (files names {name!r}, a file of another folder)")
        if not is_of(dict[str, int], each) or each.keys() != {"bytes", "crc32"}:
            raise ValueError(f"{path} is damaged (files.{name}={_shown(each)} is no pair of bytes and crc32)")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
