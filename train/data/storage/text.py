"""Rows of text files, of blocks of their records (`train.data.storage.records`) that Arrow parses.

Arrow ends a quoted field in silence at the end of a block, and needs to be told the length of the longest row: what it
makes of a block must be as many rows as that has records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from train.data.storage.records import ADVICE, UNIT, Block, Layout, Records
from train.data.storage.remote import DataFile, stream

NULLS = ["", "NULL", r"\N"]
"""Texts of a file that stand for a missing value."""
TEXT = pa.dictionary(pa.int32(), pa.string())
MOST_SHOWN = 200
"""Characters of a malformed row that an error shows."""


class Flaw(NamedTuple):
    row: int  # from 0, after the header
    text: str


Piece = tuple[pa.Table, np.ndarray, int]
"""(table, number in the file of each of its rows, rows of the file so far)."""


def header(path: DataFile, layout: Layout) -> list[str]:
    """Names of a file's columns."""
    if layout.column_names:
        return list(layout.column_names)
    with stream(path) as file:
        return _Parser(path, file, layout).records.names


def pieces(
    path: DataFile, columns: Sequence[str], layout: Layout, skip_malformed: bool, lost: Callable[[int, str], None]
) -> Iterator[Piece]:
    """These columns of a file as text. Raises ValueError for a malformed row; if those are skipped, tells `lost`."""
    first, skipped = "", 0
    with stream(path) as file:
        parser = _Parser(path, file, layout)
        records = parser.records
        for block in records.blocks():
            table, number, flaws = parser.parse(block, columns)
            begin = records.rows - len(block.starts)
            if flaws:
                told = f"{path}, row {begin + flaws[0].row + 1}: {flaws[0].text}"
                if not skip_malformed:
                    raise ValueError(f"{told}; data.bad_rows=skip leaves such input out")
                first, skipped = first or told, skipped + len(flaws)
            yield table, number + begin, records.rows
    if skipped:
        lost(skipped, first)


class _Parser:
    """Tables of one file's blocks."""

    def __init__(self, path: DataFile, file: Any, layout: Layout) -> None:
        self._path, self._layout, self._separator = path, layout, layout.delimiter
        self.records = Records(path, file, layout, self._names_of)

    def _names_of(self, header: bytes) -> list[str]:
        options = self._read_options([], len(header)), self._parse_options(True)
        return csv.open_csv(pa.BufferReader(header), *options).schema.names

    def parse(self, block: Block, columns: Sequence[str]) -> tuple[pa.Table, np.ndarray, list[Flaw]]:
        """(table, number in the block of each of its rows, malformed rows by their numbers in the block)."""
        flaws = [Flaw(row, "a quote that nothing closes; data.csv_quotes=false takes it as text") for row in block.open]
        flaws += self._not_text(block, columns)
        left_out = [flaw.row for flaw in flaws]
        kept = np.delete(np.arange(len(block.starts)), left_out)
        nothing = pa.schema([(name, TEXT) for name in columns]).empty_table()
        if not len(kept):
            return nothing, kept, flaws
        data = _without(block, left_out) if flaws else block.data
        malformed: list[csv.InvalidRow] = []

        def note(row: csv.InvalidRow) -> str:
            malformed.append(row)
            return "skip"

        convert = csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, TEXT),
            null_values=NULLS,
            strings_can_be_null=True,
        )
        table = csv.read_csv(
            pa.BufferReader(data),
            self._read_options(self.records.names, len(data)),
            self._parse_options(block.spans, note),
            convert,
        )
        bad = [row.number - 1 for row in malformed]
        if table.num_rows + len(bad) != len(kept):
            last = self.records.rows
            raise ValueError(
                f"{self._path}, rows {last - len(block.starts) + 1} to {last}: {len(kept)} rows were counted, and "
                f"{table.num_rows + len(bad)} read; {ADVICE}"
            )
        if self._separator == UNIT:  # within quotes it is text
            table = pa.table(
                {name: self._restored(column) for name, column in zip(columns, table.columns, strict=True)}
            )
        flaws += [Flaw(int(kept[at]), self._told(row)) for at, row in zip(bad, malformed, strict=True)]
        return table, np.delete(kept, bad), sorted(flaws)

    def _restored(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        unit, own = UNIT.decode(), self._layout.separator
        chunks = [(chunk.indices, pc.replace_substring(chunk.dictionary, unit, own)) for chunk in column.chunks]
        return pa.chunked_array([pa.DictionaryArray.from_arrays(*chunk) for chunk in chunks], TEXT)

    def _read_options(self, names: Sequence[str], length: int) -> csv.ReadOptions:
        encoding = self._layout.encoding
        return csv.ReadOptions(column_names=names, encoding=encoding, use_threads=False, block_size=length + 1)

    def _parse_options(self, spans: bool, note: Callable[[csv.InvalidRow], str] | None = None) -> csv.ParseOptions:
        return csv.ParseOptions(
            delimiter=self._separator.decode(),
            quote_char=False if self._layout.quoted is False else '"',
            newlines_in_values=spans,
            invalid_row_handler=note,
        )

    def _told(self, row: csv.InvalidRow) -> str:
        return self._counted(row.actual_columns, row.text)

    def _counted(self, count: int, text: str) -> str:
        hint = " (data.csv_quotes=false takes quotes as text)" if '"' in text and self._layout.quoted is None else ""
        return f"{count} columns, expected {len(self.records.names)}: {brief(repr(text))}{hint}"

    def _not_text(self, block: Block, columns: Sequence[str]) -> list[Flaw]:
        """Rows whose wanted columns are not UTF-8, and malformed ones that Arrow could not show."""
        if self._layout.encoding != "utf8" or _is_utf8(block.data):
            return []
        flaws = list[Flaw]()
        for row, (begin, end) in enumerate(_spans(block)):
            record = block.data[begin:end].rstrip(b"\r\n")
            if row in block.open or _is_utf8(record):
                continue
            quoted = self._layout.quoted is not False
            fields = (
                self.records.fields.findall(record) if quoted else [(b"", f) for f in record.split(self._separator)]
            )
            if len(fields) != len(self.records.names):
                flaws.append(Flaw(row, self._counted(len(fields), record.decode(errors="replace"))))
                continue
            for name, (inside, plain) in zip(self.records.names, fields, strict=True):
                if name in columns and not _is_utf8(inside or plain):
                    text = brief(repr(inside or plain))
                    flaws.append(Flaw(row, f"column {name!r} is {text}, expected UTF-8 text"))
                    break
        return flaws


def brief(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _spans(block: Block) -> list[tuple[int, int]]:
    return list(pairwise([*block.starts.tolist(), len(block.data)]))


def _without(block: Block, rows: Sequence[int]) -> bytes:
    left_out = set(rows)
    return b"".join(block.data[begin:end] for row, (begin, end) in enumerate(_spans(block)) if row not in left_out)
