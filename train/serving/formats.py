"""Requests as JSON, JSON lines and Arrow: each becomes the mappings that `RequestReader.batch` takes.

An Arrow table has one row a request, with columns like the keys of the mapping: `request` a struct, `candidates` a list
of structs, `histories` a struct of lists of structs, `time` a number or a timestamp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from train.data.reader import PARTS


def from_json(text: str | bytes) -> list[dict[str, Any]]:
    """One request or a list of them. ValueError for other text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the request is no JSON: {error}") from error
    return value if isinstance(value, list) else [value]


def from_json_lines(text: str | bytes) -> list[dict[str, Any]]:
    """A request a line; empty lines are passed over. ValueError with the number of a line that is none."""
    lines = (text.decode() if isinstance(text, bytes) else text).split("\n")
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error
    return requests


def from_arrow(data: pa.Table | pa.RecordBatch | pa.RecordBatchReader) -> list[dict[str, Any]]:
    """A request a row. ValueError for columns that are no part of a request."""
    if unknown := sorted(set(data.schema.names) - set(PARTS)):
        raise ValueError(f"column {unknown[0]!r} is no part of a request, which has {', '.join(PARTS)}")
    table = data.read_all() if isinstance(data, pa.RecordBatchReader) else data
    return table.to_pylist()


def from_arrow_stream(data: bytes) -> list[dict[str, Any]]:
    """A request a row of an Arrow IPC stream. ValueError for bytes that are none."""
    try:
        return from_arrow(pa.ipc.open_stream(data))
    except pa.ArrowException as error:
        raise ValueError(f"the body is no Arrow stream: {error}") from error


def to_arrow_stream(results: list[Mapping[str, Any]]) -> bytes:
    """What `Service` gives, as an Arrow IPC stream with a row a request and a column a task."""
    table = pa.Table.from_pylist([dict(result) for result in results])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
