"""Reads files of rows into Arrow tables that remember the file and row of each of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from train.data.storage import formats, text
from train.data.storage.find import partitions
from train.data.storage.formats import Lost, format_of
from train.data.storage.records import Layout
from train.data.storage.remote import DataFile, packed_by, size, stream
from train.data.storage.tables import as_plain
from train.data.storage.text import TEXT, Piece

SAMPLED = 1 << 20
"""Bytes of a text file from which its number of rows is estimated."""
COMPRESSION = 6
"""Bytes of text to a compressed one, about."""


@dataclass
class Table:
    """Columns of one or more files, whose types need not be the same in all files."""

    parts: list[pa.Table]  # one after another; neighbours differ in a type
    files: list[str]
    first_row: list[int]  # number of each file's first row, if the rows of all files are numbered consecutively from 0
    number: np.ndarray  # [N] int64, that number of each row here; malformed rows that were skipped leave gaps

    @property
    def names(self) -> list[str]:
        return self.parts[0].column_names

    def column(self, name: str) -> list[tuple[str, pa.ChunkedArray]]:
        """A column in parts of one type each, with the file in which each begins."""
        first, placed = 0, list[tuple[str, pa.ChunkedArray]]()
        for part in self.parts:
            placed.append((self._file(first), part[name]))
            first += part.num_rows
        joined = list[tuple[str, pa.ChunkedArray]]()
        for kind, same in groupby(placed, lambda each: each[1].type):
            (file, column), *others = same
            chunks = [chunk for _, other in others for chunk in other.chunks]
            joined.append((file, pa.chunked_array([*column.chunks, *chunks], kind)))
        return joined

    def value(self, name: str, index: int) -> pa.Scalar:
        for part in self.parts:
            if index < part.num_rows:
                return part[name][index]
            index -= part.num_rows
        raise IndexError(index)

    def _file(self, index: int) -> str:
        number = self.number[index] if index < len(self.number) else 0
        return self.files[max(int(np.searchsorted(self.first_row, number, side="right")) - 1, 0)]

    def locate(self, index: int) -> str:
        """File and row, counted from 1 after the header, of the index-th row."""
        return locate(self.files, self.first_row, int(self.number[index]))


def locate(files: Sequence[str], first_row: Sequence[int], number: int) -> str:
    file = int(np.searchsorted(first_row, number, side="right")) - 1
    return f"{files[file]}, row {number - first_row[file] + 1}"


def column_names(path: DataFile, layout: Layout) -> list[str]:
    """Names of a file's columns, and of those that its folders name."""
    own = _own_names(path, format_of(path), layout)
    return [*own, *(name for name in partitions(path) if name not in own)]


def stream_files(
    files: Sequence[DataFile],
    columns: Sequence[str],
    layout: Layout,
    skip_malformed: bool,
    most: int | None = None,
    lost: Lost = lambda rows, part: None,
) -> Iterator[Table]:
    """These columns of all the files: tables of `most` rows and a smaller last one, or (None) one with all rows.

    Columns of text files arrive as text: nothing is guessed from the first rows. `Table.files` are those read so far.
    A column that a file lacks is taken from the names of its folders. Raises ValueError for an empty or unreadable
    file, a missing column, and rows of a text file with too many or too few columns, unless `skip_malformed` leaves
    those out and tells `lost`. The same holds for row groups of a parquet file that cannot be read, or have not the
    checksums of their pages where these were written.
    """
    nothing = _check(files, columns, layout)
    names: list[str] = []
    first_row: list[int] = []
    end = 0
    held, numbers, rows, yielded = list[pa.Table](), [np.zeros(0, np.int64)], 0, False

    def table() -> Table:
        kinds = groupby((piece for piece in held if piece.num_rows), lambda piece: piece.schema)
        parts = [pa.concat_tables(pieces) for _, pieces in kinds]
        return Table(parts or [nothing], list(names), list(first_row), np.concatenate(numbers))

    for path in files:
        names.append(str(path))
        first_row.append(end)
        for piece, number, total in _pieces(path, columns, layout, skip_malformed, most, lost):
            end = first_row[-1] + total
            while most and rows + piece.num_rows >= most:
                taken = most - rows
                held.append(piece.slice(0, taken))
                numbers.append(number[:taken] + first_row[-1])
                yield table()
                yielded = True
                piece, number = piece.slice(taken), number[taken:]
                held, numbers, rows = [], [np.zeros(0, np.int64)], 0
            held.append(piece)
            numbers.append(number + first_row[-1])
            rows += piece.num_rows
    if end == 0:
        raise ValueError(f"no rows in {', '.join(map(str, files))}")
    if rows or not yielded:
        yield table()


def count_rows(files: Sequence[DataFile], layout: Layout) -> int:
    """About how many rows the files have: exactly of parquet, from the length of the first lines of text."""
    total = 0
    for path in files:
        if (form := format_of(path)) != "text":
            total += formats.count_of(path, form)
            continue
        with stream(path) as file:
            sample = file.read(SAMPLED)
        unpacked = size(path) * (COMPRESSION if packed_by(path) else 1)
        total += int(unpacked * sample.count(b"\n") / max(len(sample), 1)) + 1
    return total


def _own_names(path: DataFile, form: str, layout: Layout) -> list[str]:
    return (
        formats.guarded(path, lambda: text.header(path, layout))
        if form == "text"
        else list(formats.schema_of(path, form).names)
    )


def _check(files: Sequence[DataFile], columns: Sequence[str], layout: Layout) -> pa.Table:
    """An empty table of the columns, which every file must have, once."""
    nothing = None
    for path in files:
        form = format_of(path)
        own = _own_names(path, form, layout)
        names = column_names(path, layout)
        if missing := [name for name in columns if name not in names]:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {names}")
        if repeated := [name for name in columns if own.count(name) > 1]:
            raise ValueError(f"{path} has more than one column {repeated[0]!r}: {own}; rename all but one")
        if nothing is None:
            schema = None if form == "text" else formats.schema_of(path, form)
            kinds = [schema.field(name).type if schema and name in own else TEXT for name in columns]
            nothing = pa.schema(list(zip(columns, kinds, strict=True))).empty_table()
    assert nothing is not None
    return _plain(nothing, columns, {})


def _pieces(
    path: DataFile, columns: Sequence[str], layout: Layout, skip_malformed: bool, most: int | None, lost: Lost
) -> Iterator[Piece]:
    form = format_of(path)
    own = _own_names(path, form, layout)
    read, of_folders = [name for name in columns if name in own] or own[:1], partitions(path)
    if form == "text":
        pieces = text.pieces(path, read, layout, skip_malformed, lost)
    else:
        pieces = formats.pieces(path, form, read, most, lost if skip_malformed else None)
    while piece := formats.guarded(path, lambda: next(pieces, None)):
        table, number, total = piece
        yield _plain(table, columns, of_folders), number, total


def _plain(table: pa.Table, columns: Sequence[str], of_folders: dict[str, str | None]) -> pa.Table:
    """These columns in types that are read here; those that the table lacks are as folders name them."""
    arrays = []
    for name in columns:
        if name not in table.column_names:
            value = of_folders[name]
            codes = pa.array(np.zeros(len(table), np.int32), mask=np.full(len(table), value is None))
            arrays.append(
                pa.DictionaryArray.from_arrays(codes, pa.array([] if value is None else [value], pa.string()))
            )
            continue
        arrays.append(as_plain(table[name]))
    return pa.Table.from_arrays(arrays, list(columns))
