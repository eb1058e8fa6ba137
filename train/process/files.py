"""Files and folders of a run: JSON that is written whole or not at all, and a folder that no other run has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a temporary file and rename it. JSON has no NaN and no infinity: they become null."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(json.dumps(_finite(value), indent=1, allow_nan=False))
    aside.replace(path)


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
