"""JSON files of a run: written whole or not at all, and readable by every JSON parser."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write aside and rename. JSON has no NaN and no infinity: they become null."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(json.dumps(_finite(value), indent=1, allow_nan=False))
    aside.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
