"""Reads parquet and CSV files into Arrow tables that remember the file and row of each of their rows."""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from train.data.storage.remote import DataFile, find_remote, is_remote, random_access, size, stream

NULLS = ["", "NULL", r"\N"]
"""Texts of a CSV file that stand for a missing value."""

TEXT = pa.dictionary(pa.int32(), pa.string())

MOST_SHOWN = 200
"""Characters of a malformed row that an error shows."""
BATCH = 1 << 18
"""Rows of a parquet file that are decoded at a time."""
SAMPLED = 1 << 20
"""Bytes of a text file from which its number of rows is estimated."""
COMPRESSION = 6
"""Bytes of text to a compressed one, about."""

UNREADABLE = (pa.ArrowInvalid, OSError)
"""What Arrow raises for damaged files."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Layout:
    """How text files are written."""

    separator: str = ","
    column_names: Sequence[str] = ()  # of files without a header
    encoding: str = "utf8"
    quoted: bool = True


@dataclass
class Table:
    """Columns of one or more files."""

    columns: pa.Table
    files: list[str]
    first_row: list[int]  # number of each file's first row, if the rows of all files are numbered consecutively from 0
    number: np.ndarray  # [N] int64, that number of each row here; malformed rows that were skipped leave gaps

    def locate(self, index: int) -> str:
        """File and row, counted from 1 after the header, of the index-th row."""
        return locate(self.files, self.first_row, int(self.number[index]))


def locate(files: Sequence[str], first_row: Sequence[int], number: int) -> str:
    file = int(np.searchsorted(first_row, number, side="right")) - 1
    return f"{files[file]}, row {number - first_row[file] + 1}"


def find_files(patterns: Sequence[str], root: str | Path = ".") -> list[DataFile]:
    """Files, files in folders (recursively, hidden ones left out) and files that match globs, sorted by name.

    A pattern or the root may be the URL of an object store, see `train.data.storage.remote`.
    """
    found: list[DataFile] = []
    for pattern in patterns:
        if is_remote(pattern) or (is_remote(root) and not Path(pattern).is_absolute()):
            shown = pattern if is_remote(pattern) else f"{str(root).rstrip('/')}/{pattern}"
            matches: Sequence[DataFile] = find_remote(shown)
        else:
            path = Path(root, pattern).expanduser()
            shown, matches = str(path.absolute()), _find_local(path)
        if not matches:
            start = "" if is_remote(pattern) or Path(pattern).is_absolute() else f", from data.root={root} on"
            raise ValueError(
                f"no file matches {shown!r}; name a file, a folder or a glob{start}, e.g. 'logs/*.parquet'"
            )
        found.extend(matches)
    return found


def _find_local(path: Path) -> list[Path]:
    if path.is_dir():
        matches = [p for p in path.rglob("*") if not p.name.startswith((".", "_"))]
    else:
        matches = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    return sorted(p for p in matches if p.is_file())


def column_names(path: DataFile, layout: Layout) -> list[str]:
    """Names of a file's columns."""
    if not is_parquet(path) and layout.column_names:
        return list(layout.column_names)
    return list(_schema(path, None, layout).names)


Lost = Callable[[int, str], None]
"""Is told how many rows of a file were left out, and what is wrong with the first of them."""


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
    Raises ValueError for an empty or unreadable file, a missing column, and rows of a text file with too many or too
    few columns, unless `skip_malformed` leaves those out and tells `lost`. The same holds for row groups of a parquet
    file that cannot be read, or have not the checksums of their pages where these were written.
    """
    no_rows = _no_rows(files, columns, layout)
    names: list[str] = []
    first_row: list[int] = []
    end = 0
    held, numbers, rows, yielded = [no_rows], [np.zeros(0, np.int64)], 0, False

    def table() -> Table:
        joined = pa.concat_tables(held, promote_options="permissive")
        return Table(joined, list(names), list(first_row), np.concatenate(numbers))

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
                held, numbers, rows = [no_rows], [np.zeros(0, np.int64)], 0
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
        if is_parquet(path):
            with random_access(path) as file:
                total += pq.ParquetFile(file).metadata.num_rows
        else:
            with stream(path) as file:
                sample = file.read(SAMPLED)
            unpacked = size(path) * (COMPRESSION if path.name.endswith((".gz", ".bz2", ".zst")) else 1)
            total += int(unpacked * sample.count(b"\n") / max(len(sample), 1)) + 1
    return total


def _no_rows(files: Sequence[DataFile], columns: Sequence[str], layout: Layout) -> pa.Table:
    """An empty table of the columns' types, which the files must agree on."""
    schemas = []
    for path in files:
        names = column_names(path, layout)
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {names}")
        repeated = [name for name in columns if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{path} has more than one column {repeated[0]!r}: {names}; rename all but one")
        schemas.append(_schema(path, columns, layout))
    try:
        return pa.concat_tables([schema.empty_table() for schema in schemas], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"the files from {files[0]} to {files[-1]} disagree on column types: {error}; CSV files hold "
            "text in every column, so let all be CSV files or all parquet"
        ) from None


def _schema(path: DataFile, columns: Sequence[str] | None, layout: Layout) -> pa.Schema:
    """Names and types of these columns, of all of them if there are none given."""
    if not is_parquet(path):
        if columns is not None:
            return pa.schema([(name, TEXT) for name in columns])
        names = _guard(path, lambda: csv.open_csv(*_csv(path, layout, lambda row: "skip")).schema.names)
        return pa.schema([(name, TEXT) for name in names])
    with random_access(path) as file:
        schema = _guard(path, lambda: pq.read_schema(file))
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


Piece = tuple[pa.Table, np.ndarray, int]
"""(table, number in the file of each of its rows, rows of the file so far)."""


def _pieces(
    path: DataFile, columns: Sequence[str], layout: Layout, skip_malformed: bool, most: int | None, lost: Lost
) -> Iterator[Piece]:
    if not is_parquet(path):
        yield from _csv_pieces(path, columns, layout, skip_malformed, most, lost)
        return
    with random_access(path) as file:
        if most is None:
            try:
                table = pq.read_table(file, columns=list(columns), page_checksum_verification=True)
                yield table, np.arange(table.num_rows), table.num_rows
                return
            except UNREADABLE:
                pass  # by row groups, to find the damaged one
        yield from _row_groups(path, file, columns, most or BATCH, lost if skip_malformed else None)


def _row_groups(path: DataFile, file: Any, columns: Sequence[str], most: int, lost: Lost | None) -> Iterator[Piece]:
    """One row group of a parquet file after the other; without `lost`, one that cannot be read is an error."""
    parquet = _guard(path, lambda: pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True))
    end = 0
    for group in range(parquet.num_row_groups):
        begin, end = end, end + parquet.metadata.row_group(group).num_rows
        first = begin
        try:
            for batch in parquet.iter_batches(min(most, BATCH), row_groups=[group], columns=list(columns)):
                first += batch.num_rows
                yield pa.Table.from_batches([batch]), np.arange(first - batch.num_rows, first), first
        except UNREADABLE as error:
            rows = f"row {first + 1}" if end - first == 1 else f"rows {first + 1} to {end}"
            part = f"{path}, row group {group + 1} of {parquet.num_row_groups}, {rows}"
            flaw = f"{part}: cannot be read ({_brief(str(error))})"
            if lost is None:
                raise ValueError(f"{flaw}; data.bad_rows=skip leaves such input out") from None
            lost(end - first, flaw)
            nothing = parquet.schema_arrow.empty_table().select(list(columns))
            yield nothing, np.zeros(0, np.int64), end


def _csv_pieces(
    path: DataFile, columns: Sequence[str], layout: Layout, skip_malformed: bool, most: int | None, lost: Lost
) -> Iterator[Piece]:
    convert = csv.ConvertOptions(
        include_columns=columns,
        column_types=dict.fromkeys(columns, TEXT),
        null_values=NULLS,
        strings_can_be_null=True,
    )
    malformed: list[csv.InvalidRow] = []

    def note(row: csv.InvalidRow) -> str:
        malformed.append(row)
        return "skip"

    def flaw() -> str:
        row = malformed[0]
        held = f"{row.actual_columns} columns, expected {row.expected_columns}: {_brief(repr(row.text))}"
        return f"{path}, row {row.number - header + 1}: {held}"

    header = 1 if layout.column_names else 2
    if most is None:
        table = _guard(path, lambda: csv.read_csv(*_csv(path, layout, note), convert))
        if not malformed:
            yield table, np.arange(table.num_rows), table.num_rows
            return
        malformed.clear()
        table = _guard(path, lambda: csv.read_csv(*_csv(path, layout, note, numbered=True), convert))
        pieces = iter([table])
    else:
        reader = _guard(path, lambda: csv.open_csv(*_csv(path, layout, note, numbered=True), convert))
        pieces = (pa.Table.from_batches([batch]) for batch in reader)
    good = 0
    while True:
        table = _guard(path, lambda: next(pieces, None))
        if malformed and not skip_malformed:
            raise ValueError(f"{flaw()}; data.bad_rows=skip leaves such input out")
        if table is None:
            break
        # A malformed row after i good ones and j malformed ones is number i + j.
        before = np.array([row.number - header - j for j, row in enumerate(malformed)], np.int64)
        index = np.arange(good, good + table.num_rows)
        good += table.num_rows
        yield table, index + np.searchsorted(before, index, side="right"), good + len(malformed)
    if malformed:
        lost(len(malformed), flaw())
        nothing = pa.schema([(name, TEXT) for name in columns]).empty_table()
        yield nothing, np.zeros(0, np.int64), good + len(malformed)


def _csv(
    path: DataFile, layout: Layout, note: Callable[[csv.InvalidRow], str], numbered: bool = False
) -> tuple[Any, csv.ReadOptions, csv.ParseOptions]:
    """Input and options of Arrow's reader, which numbers malformed rows only when it reads in one thread."""
    source: Any = stream(path)
    separator = layout.separator
    if len(separator) > 1:
        with source:
            source, separator = io.BytesIO(source.read().replace(separator.encode(), b"\x1f")), "\x1f"
    return (
        source,
        csv.ReadOptions(column_names=list(layout.column_names), encoding=layout.encoding, use_threads=not numbered),
        csv.ParseOptions(delimiter=separator, quote_char='"' if layout.quoted else False, invalid_row_handler=note),
    )


def _guard(path: DataFile, read: Callable[[], Result]) -> Result:
    if size(path) == 0:
        raise ValueError(f"{path}: the file is empty")
    try:
        return read()
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({_brief(str(error))})") from None


def _brief(text: str) -> str:
    """Behind a quote that is not closed, a row is the rest of the file."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters; an open quote?)"


def is_parquet(path: DataFile) -> bool:
    with random_access(path) as file:
        return file.read(4) == b"PAR1"
