"""Metrics in the text format of Prometheus, of runs and of servers."""

from __future__ import annotations

import math
from collections.abc import Mapping

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def metric(name: str, what: str, values: Mapping[str, float], kind: str = "gauge") -> list[str]:
    """Its lines; `values` by `labels`, which begin with the `_sum` and the like of a histogram's parts."""
    if not values:
        return []
    lines = [f"{name}{each} {_number(value)}" for each, value in values.items()]
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *lines]


def labels(**values: object) -> str:
    escaped = {
        name: str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in values.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
