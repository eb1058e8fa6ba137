"""Which format a file has, by its first bytes; Parquet, ORC and Arrow files as pieces of tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq

from train.data.storage.remote import DataFile, random_access, size, stream
from train.data.storage.text import Piece, brief

BATCH = 1 << 18
"""Rows that are decoded at a time."""
MAGIC = {"parquet": b"PAR1", "orc": b"ORC", "arrow": b"ARROW1"}
"""With which a file of each format begins, and ends once it is whole (of ORC, a byte before the end)."""
OTHERS = {
    "a zip archive or an Excel sheet": rb"PK\x03\x04",
    "JSON": rb'\s*(\{\s*("|\})|\[\s*[\[{])',
    "HTML or XML": rb"(?i)\s*<(\?xml|!doctype|html)",
    "UTF-16 text": rb"\xff\xfe|\xfe\xff",
    "Avro": rb"Obj\x01",
    "encrypted Parquet": rb"PARE[\x00-\x1f\x80-\xff]",
    "an Arrow stream": rb"\xff\xff\xff\xff",
    "an old Feather file (version 1)": rb"FEA1\x00",
    "a numpy array": rb"\x93NUMPY",
    "HDF5": rb"\x89HDF\r\n",
    "an SQLite database": rb"SQLite format 3\x00",
    "a pickle": rb"\x80[\x02-\x05]",
    "a file packed by xz": rb"\xfd7zXZ",
    "a 7z archive": rb"7z\xbc\xaf\x27\x1c",
    "a tar archive": rb"(?s).{257}ustar",
}
"""Formats that are not read, with patterns of how they begin."""
BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x7f]")
"""Bytes that tell such a file from text that begins with the same letters."""
SHOWN = 512
"""Bytes by which a format is told."""
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow raises for damaged files."""

Lost = Callable[[int, str], None]
"""Is told how many rows of a file were left out, and what is wrong with the first of them."""
Result = TypeVar("Result")


def format_of(path: DataFile) -> str:
    """parquet, orc, arrow or text. Raises ValueError for an empty file, and for another format by its name."""
    with guarded(path, lambda: random_access(path)) as file:
        head = guarded(path, lambda: file.read(SHOWN))
    if not head:
        raise ValueError(f"{path}: the file is empty")
    found = next((name for name, magic in MAGIC.items() if head.startswith(magic) and BINARY.search(head)), "")
    if found:
        return found
    with guarded(path, lambda: stream(path)) as unpacked:
        head = guarded(path, lambda: unpacked.read(SHOWN))
    for name, pattern in OTHERS.items():
        if re.match(pattern, head):
            raise ValueError(
                f"{path} is {name}, which is not read here; Parquet, ORC, Arrow (Feather) and CSV files are, the last "
                "also packed by gzip, bz2, zstd or lz4"
            )
    return "text"


def is_whole(path: DataFile, name: str) -> bool:
    """Whether a file ends as one of this format does."""
    magic, length = MAGIC[name], size(path)
    if length < 3 * len(magic):
        return False
    with random_access(path) as file:
        tail = file.seek(length - len(magic) - (name == "orc")) and file.read(len(magic))
        return bool(tail == magic)


def schema_of(path: DataFile, name: str) -> pa.Schema:
    with random_access(path) as file:
        return guarded(path, lambda: _Parts(file, name).schema)


def count_of(path: DataFile, name: str) -> int:
    """Rows of a file."""
    with random_access(path) as file:
        parts = guarded(path, lambda: _Parts(file, name, []))
        if parts.rows is not None:
            return parts.rows
        return sum(table.num_rows for part in range(len(parts.sizes)) for table in parts.read(part, BATCH))


def pieces(path: DataFile, name: str, columns: Sequence[str], most: int | None, lost: Lost | None) -> Iterator[Piece]:
    """These columns of a file, one row group, stripe or record batch after the other.

    Without `lost`, a row group of a Parquet file that cannot be read is an error; others always are.
    Raises ValueError for fewer or more rows than the file says that it has.
    """
    with random_access(path) as file:
        parts = guarded(path, lambda: _Parts(file, name, columns))
        end = 0
        for part, rows in enumerate(parts.sizes):
            begin, first = end, end
            try:
                for table in parts.read(part, most or BATCH):
                    first += table.num_rows
                    yield table, np.arange(first - table.num_rows, first), first
            except UNREADABLE as error:
                if rows is None:
                    raise ValueError(f"{path}: cannot be read ({brief(str(error))})") from None
                end = begin + rows
                told = f"row {first + 1}" if end - first == 1 else f"rows {first + 1} to {end}"
                flaw = f"{path}, row group {part + 1} of {len(parts.sizes)}, {told}"
                flaw = f"{flaw}: cannot be read ({brief(str(error))})"
                if lost is None:
                    raise ValueError(f"{flaw}; data.bad_rows=skip leaves such input out") from None
                lost(end - first, flaw)
                yield parts.nothing, np.zeros(0, np.int64), end
                continue
            end = first
            if rows not in (None, end - begin):
                raise ValueError(f"{path}, row group {part + 1}: has {end - begin} rows and should have {rows}")
        if parts.rows not in (None, end):
            raise ValueError(f"{path}: has {end} rows and should have {parts.rows}; write it again")


def guarded(path: DataFile, read: Callable[[], Result]) -> Result:
    """What a reader returns; its errors name the file."""
    try:
        return read()
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({brief(str(error))})") from None


class _Parts:
    """Row groups, stripes or record batches, and some columns of them (None: all)."""

    def __init__(self, file: Any, name: str, columns: Sequence[str] | None = None) -> None:
        self._name = name
        self.sizes: list[int | None]  # rows of each, where the file says so by itself
        self.rows: int | None = None  # of the file, likewise
        if name == "parquet":
            self._file: Any = pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
            about = self._file.metadata
            self.schema: pa.Schema = self._file.schema_arrow
            self.sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
            self.rows = about.num_rows
        elif name == "orc":
            self._file = orc.ORCFile(file)
            self.schema = self._file.schema
            self.sizes, self.rows = [None] * self._file.nstripes, self._file.nrows
        else:
            self._file = pa.ipc.open_file(file)
            self.schema = self._file.schema
            if columns is not None:
                fields = [self.schema.get_field_index(column) for column in columns]
                self._file = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
            self.sizes = [None] * self._file.num_record_batches
        self._columns = self.schema.names if columns is None else list(columns)

    @property
    def nothing(self) -> pa.Table:
        return self.schema.empty_table().select(self._columns)

    def read(self, part: int, most: int) -> Iterator[pa.Table]:
        if self._name == "parquet":
            yield from map(_table, self._file.iter_batches(min(most, BATCH), row_groups=[part], columns=self._columns))
        elif self._name == "orc":
            yield _table(self._file.read_stripe(part, columns=self._columns))
        else:
            batch = self._file.get_batch(part)
            batch.validate(full=True)
            yield _table(batch.select(self._columns))


def _table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])
