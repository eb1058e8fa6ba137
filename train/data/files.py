"""Reads parquet and CSV files into one Arrow table that remembers the file and row of each of its rows."""

from __future__ import annotations

import glob
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

NULLS = ["", "NULL", r"\N"]
"""Texts of a CSV file that stand for a missing value."""

TEXT = pa.dictionary(pa.int32(), pa.string())

MOST_SHOWN = 200
"""Characters of a malformed row that an error shows."""

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


def find_files(patterns: Sequence[str], root: str | Path = ".") -> list[Path]:
    """Files, files in folders (recursively, hidden ones left out) and files that match globs, sorted by name."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(root, pattern).expanduser()
        if path.is_dir():
            matches = [p for p in path.rglob("*") if not p.name.startswith((".", "_"))]
        else:
            matches = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        matches = sorted(p for p in matches if p.is_file())
        if not matches:
            start = "" if Path(pattern).is_absolute() else f", from data.root={root} on"
            raise ValueError(
                f"no file matches {str(path.absolute())!r}; name a file, a folder or a glob{start}, "
                "e.g. 'logs/*.parquet'"
            )
        found.extend(matches)
    return found


def column_names(path: Path, layout: Layout) -> list[str]:
    """Names of a file's columns."""
    if _is_parquet(path):
        return list(_guard(path, lambda: pq.read_schema(path).names))
    if layout.column_names:
        return list(layout.column_names)
    return list(_guard(path, lambda: csv.open_csv(*_csv(path, layout, lambda row: "skip")).schema.names))


def read_files(files: Sequence[Path], columns: Sequence[str], layout: Layout, skip_malformed: bool) -> Table:
    """These columns of all the files. Columns of text files arrive as text: nothing is guessed from the first rows.

    Raises ValueError for an empty or unreadable file, a missing column, and rows of a text file with too many or too
    few columns, unless `skip_malformed` leaves those out with a warning.
    """
    tables, numbers, first_row = [], [], [0]
    for path in files:
        names = column_names(path, layout)
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {names}")
        repeated = [name for name in columns if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{path} has more than one column {repeated[0]!r}: {names}; rename all but one")
        if _is_parquet(path):
            table = _guard(path, partial(pq.read_table, path, columns=list(columns)))
            number, total = np.arange(table.num_rows), table.num_rows
        else:
            table, number, total = _read_csv(path, columns, layout, skip_malformed)
        tables.append(table)
        numbers.append(number + first_row[-1])
        first_row.append(first_row[-1] + total)
    if first_row[-1] == 0:
        raise ValueError(f"no rows in {', '.join(map(str, files))}")
    try:
        joined = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"the files from {files[0]} to {files[-1]} disagree on column types: {error}; CSV files hold "
            "text in every column, so let all be CSV files or all parquet"
        ) from None
    return Table(joined, [str(path) for path in files], first_row[:-1], np.concatenate(numbers))


def _read_csv(
    path: Path, columns: Sequence[str], layout: Layout, skip_malformed: bool
) -> tuple[pa.Table, np.ndarray, int]:
    """(table, number in the file of each row that was read, rows in the file)."""
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

    table = _guard(path, lambda: csv.read_csv(*_csv(path, layout, note), convert))
    if not malformed:
        return table, np.arange(table.num_rows), table.num_rows
    malformed.clear()
    table = _guard(path, lambda: csv.read_csv(*_csv(path, layout, note, numbered=True), convert))
    lines = np.array([row.number for row in malformed]) - (1 if layout.column_names else 2)
    row = malformed[0]
    held = f"{row.actual_columns} columns, expected {row.expected_columns}: {_brief(repr(row.text))}"
    flaw = f"{path}, row {lines[0] + 1}: {held}"
    if not skip_malformed:
        raise ValueError(f"{flaw}; data.bad_rows=skip leaves such input out")
    logger.warning("skipped %d malformed rows, the first is %s", len(lines), flaw)
    total = table.num_rows + len(lines)
    return table, np.setdiff1d(np.arange(total), lines), total


def _csv(
    path: Path, layout: Layout, note: Callable[[csv.InvalidRow], str], numbered: bool = False
) -> tuple[Any, csv.ReadOptions, csv.ParseOptions]:
    """Input and options of Arrow's reader, which numbers malformed rows only when it reads in one thread."""
    source: Any = path
    separator = layout.separator
    if len(separator) > 1:
        source, separator = io.BytesIO(path.read_bytes().replace(separator.encode(), b"\x1f")), "\x1f"
    return (
        source,
        csv.ReadOptions(column_names=list(layout.column_names), encoding=layout.encoding, use_threads=not numbered),
        csv.ParseOptions(delimiter=separator, quote_char='"' if layout.quoted else False, invalid_row_handler=note),
    )


def _guard(path: Path, read: Callable[[], Result]) -> Result:
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    try:
        return read()
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({_brief(str(error))})") from None


def _brief(text: str) -> str:
    """Behind a quote that is not closed, a row is the rest of the file."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters; an open quote?)"


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"
