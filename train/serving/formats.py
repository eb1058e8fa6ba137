"""Requests as JSON, JSON lines and Arrow: each becomes the mappings that `RequestReader.batch` takes.

An Arrow table has one row a request, with columns like the keys of the mapping: `request` a struct, `candidates` a list
of structs, `histories` a struct of lists of structs, `time` a number or a timestamp.

Texts and bytes are hostile until read: whatever is wrong with them is a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from train.data.reader import PARTS
from train.data.values import cut, shown
from train.serving.weight import refuse_heavy

NO_STREAM = "the body is no Arrow stream of requests"
DEEPEST = 8
"""Levels of types in a column; a request needs four."""
OF_BYTES = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary),
    pa.types.is_fixed_size_binary,
)
SCALARS = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    *(pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_duration, *OF_BYTES),
)


def from_json(text: str | bytes, most: int | None = None) -> list[dict[str, Any]]:
    """One request or a list of up to `most`. ValueError for other text."""
    value = _loads(text, "the request")
    requests = value if isinstance(value, list) else [value]
    _refuse_many(len(requests), most)
    return requests


def from_json_lines(text: str | bytes, most: int | None = None) -> list[dict[str, Any]]:
    """A request a line; empty lines are passed over. ValueError with the number of a line that is none."""
    lines = (text.decode() if isinstance(text, bytes) else text).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    _refuse_many(len(numbered), most)
    return [_loads(line, f"line {number}") for number, line in numbered]


def from_arrow(
    data: pa.Table | pa.RecordBatch | pa.RecordBatchReader, most_bytes: int | None = None
) -> list[dict[str, Any]]:
    """A request a row. ValueError for columns that are no part of a request, damaged ones, and `most_bytes` of text."""
    names = data.schema.names
    if unknown := sorted(set(names) - set(PARTS)):
        raise ValueError(f"column {shown(unknown[0])} is no part of a request, which has {', '.join(PARTS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a column stands twice: {shown(names)}")
    batches = data.to_batches() if isinstance(data, pa.Table) else [data] if isinstance(data, pa.RecordBatch) else data
    requests = []
    for batch in batches:
        batch.validate(full=True)  # a reader trusts offsets, and would follow them out of the buffers
        if most_bytes is not None and sum(map(_expanded, batch.columns)) > most_bytes:
            raise ValueError(f"a body has up to {most_bytes} bytes, each text of a dictionary where it stands")
        requests += batch.to_pylist()
    return requests


def from_arrow_stream(data: bytes, most: int | None = None, most_bytes: int | None = None) -> list[dict[str, Any]]:
    """A request a row of an Arrow IPC stream, of up to `most` rows and `most_bytes` decompressed.

    ValueError for bytes that are none.
    """
    try:
        refuse_heavy(data, most, most_bytes)
        source = pa.BufferReader(data)
        reader = pa.ipc.open_stream(source)
        for field in reader.schema:
            _refuse_type(field.type, f"column {shown(field.name)}")
        requests = from_arrow(reader, most_bytes)
        if behind := len(data[source.tell() :].strip(b"\0")):
            raise ValueError(f"{behind} bytes stand behind the end of the Arrow stream; send one stream a call")
        return requests
    except ValueError as error:
        if not isinstance(error, pa.ArrowException):
            raise
        raise ValueError(f"{NO_STREAM}: {cut(str(error))}") from error
    except Exception as error:  # of Arrow, of Python's values, of memory: whatever bytes from outside bring about
        raise ValueError(f"{NO_STREAM}: {type(error).__name__} {cut(str(error))}") from error


def to_arrow_stream(results: list[Mapping[str, Any]]) -> bytes:
    """What `Service` gives, as an Arrow IPC stream with a row a request and a column a task."""
    table = pa.Table.from_pylist([dict(result) for result in results])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _loads(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"{what} is no JSON of a request: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is no JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(name for name in names if names.count(name) > 1))} stands twice")
    return made


def _refuse_many(count: int, most: int | None) -> None:
    if most is not None and count > most:
        raise ValueError(f"a call has up to {most} requests, got {count}; send them in several calls")


def _refuse_type(kind: pa.DataType, what: str, depth: int = 1) -> None:
    """ValueError for types that no request has, among them all by which a few bytes stand for many values."""
    if depth > DEEPEST:
        raise ValueError(f"{what} has more than {DEEPEST} levels of types")
    if pa.types.is_struct(kind):
        for field in kind:
            _refuse_type(field.type, f"{what}.{shown(field.name)}" if depth < 3 else what, depth + 1)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _refuse_type(kind.value_type, what, depth + 1)
    elif isinstance(kind, pa.BaseExtensionType):
        _refuse_type(kind.storage_type, what, depth + 1)
    elif pa.types.is_dictionary(kind):
        _refuse_type(kind.value_type, what, DEEPEST)
    elif not any(is_one(kind) for is_one in SCALARS):
        raise ValueError(f"{what} is {cut(str(kind))}; cast it to numbers, text, times, structs or lists")


def _expanded(array: pa.Array) -> int:
    """Bytes of an array's texts that stand in a dictionary, each as often as it is used."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        if not any(is_one(kind.value_type) for is_one in OF_BYTES):
            return 0
        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(_expanded(array.field(index)) for index in range(kind.num_fields))
    if isinstance(kind, pa.BaseExtensionType):
        return _expanded(array.storage)
    return _expanded(array.values) if pa.types.is_nested(kind) else 0
