"""Tables handed over in Python, kept as files: workers, other ranks, a resumed run and an evaluation read those."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from train.process.files import summed

ROW_GROUP = 1 << 17


def keep_table(table: Any, folder: Path) -> Path:
    """Write a table to a parquet file of `folder`, named by its content, and return that; equal tables are one file.

    Takes what exports an Arrow stream (`__arrow_c_stream__`: a DataFrame of pandas from 2.2 on or Polars, a
    `pyarrow.Table` or `RecordBatchReader`, a relation of DuckDB), batch after batch, or a mapping of columns. Raises
    ValueError for anything else, and for a table without rows.
    """
    reader = _batches(table)
    schema = pa.schema([pa.field(field.name, plain(field.type)) for field in reader.schema])
    if repeated := [name for name in schema.names if schema.names.count(name) > 1]:
        raise ValueError(f"the table has more than one column {repeated[0]!r}; rename all but one")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{uuid.uuid4().hex}"
    try:
        rows = 0
        with pq.ParquetWriter(partial, schema) as writer:
            for batch in reader:
                rows += batch.num_rows
                columns = [as_plain(pa.chunked_array([column])) for column in batch.columns]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=ROW_GROUP)
        if not rows:
            raise ValueError(f"the table has no rows; its columns are {schema.names}")
        sums = summed(partial)
        kept = folder / f"table-{rows}-{sums['bytes']:x}-{sums['crc32']:08x}.parquet"
        if kept.exists():
            partial.unlink()  # a file that stays as it is is not prepared again
        else:
            partial.rename(kept)
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"the table has a column of a type that no file holds: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return kept


def _batches(table: Any) -> pa.RecordBatchReader:
    if isinstance(table, Mapping):
        table = pa.table({name: _column(name, values) for name, values in table.items()})
    if not hasattr(table, "__arrow_c_stream__"):
        raise ValueError(
            f"a {type(table).__module__}.{type(table).__name__} is no table; give a DataFrame of pandas (2.2 or later) "
            "or Polars, a pyarrow.Table, or a mapping of columns, e.g. {'user': [1, 2], 'click': [0, 1]}"
        )
    return pa.RecordBatchReader.from_stream(table)


def _column(name: Any, values: Any) -> pa.Array | pa.ChunkedArray:
    if not isinstance(name, str) or isinstance(values, str | bytes):
        raise ValueError(f"column {name!r} must have a text as its name and a list or an array of values, one a row")
    try:
        return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}; give values of one type, e.g. all numbers or all text") from error


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that parquet files and `train.data.features.columns` know in place of Arrow's others."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.uuid":
        return plain(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return plain(kind.value_type)
    if pa.types.is_dictionary(kind) and kind.value_type not in (pa.string(), pa.large_string()):
        return plain(kind.value_type)
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        return pa.list_(plain(kind.value_type))
    if pa.types.is_large_list(kind) or _is_list_view(kind):
        return pa.large_list(plain(kind.value_type))
    return kind


def as_plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in the type that is `plain`."""
    kind = plain(column.type)
    return column if column.type == kind else pa.chunked_array(map(_as_plain, column.chunks), kind)


def _as_plain(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind == plain(kind):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return _as_plain(array.storage)
    if pa.types.is_run_end_encoded(kind):
        return _as_plain(pc.run_end_decode(array))
    if _is_list_view(kind):  # which Arrow 26 casts to lists without their items
        offsets = np.append(0, np.cumsum(pc.list_value_length(array).fill_null(0).to_numpy(), dtype=np.int64))
        array = pa.LargeListArray.from_arrays(offsets, _as_plain(pc.list_flatten(array)), mask=array.is_null())
    return array.cast(plain(kind))


def _is_list_view(kind: pa.DataType) -> bool:
    return pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
