"""Rows of text files, whose records are found and counted here before Arrow parses them.

Arrow ends a quoted field in silence at the end of a block, and needs to be told the length of the longest row. Here
blocks are cut at the ends of records, however long those are, and what Arrow makes of a block must be as many rows as
it has records. Quotes follow RFC 4180: one at the start of a field opens it, a doubled one is a quote, and separators
and line ends within are text. In files that are not quoted a field may begin with one as well; without
`data.csv_quotes` these are told by the rows that such a quote would join.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from train.data.storage.remote import DataFile, stream

logger = logging.getLogger(__name__)

NULLS = ["", "NULL", r"\N"]
"""Texts of a file that stand for a missing value."""
TEXT = pa.dictionary(pa.int32(), pa.string())
BLOCK = 1 << 22
"""Bytes that are read at a time, if rows are not longer."""
LONGEST = 1 << 30
"""Bytes of a row."""
MOST_SHOWN = 200
"""Characters of a malformed row that an error shows."""
TELLING = 16, 4
"""Lines by which a quote that may join them is known to be text: of the first one in a file, and of further ones."""
QUOTE, LF, CR = b'"\n\r'
BOM = b"\xef\xbb\xbf"
UNIT = b"\x1f"
"""In the place of a separator of several bytes, which Arrow does not know."""
NUMBER = re.compile(rb'\s*"?[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"?\s*')
EMPTY = re.compile(rb'\s*"?(NULL|\\N)?"?\s*')
ADVICE = "data.csv_quotes=false takes quotes as text, data.csv_quotes=true lets what they enclose span lines"


@dataclass(frozen=True)
class Layout:
    """How text files are written."""

    separator: str = ","
    column_names: Sequence[str] = ()  # of files without a header
    encoding: str = "utf8"
    quoted: bool | None = None  # None: as the rows tell


class Block(NamedTuple):
    """Some whole records of a file."""

    data: bytes  # in which fields whose first quote is text are quoted
    starts: np.ndarray  # [records] place of each record in the data; empty lines are none
    spans: bool  # whether a record has several lines
    open: list[int]  # records with a quote that nothing closes


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
        return _Reader(path, file, layout).names


def pieces(
    path: DataFile, columns: Sequence[str], layout: Layout, skip_malformed: bool, lost: Callable[[int, str], None]
) -> Iterator[Piece]:
    """These columns of a file as text. Raises ValueError for a malformed row; if those are skipped, tells `lost`."""
    first, skipped = "", 0
    with stream(path) as file:
        reader = _Reader(path, file, layout)
        for block in reader.blocks():
            table, number, flaws = reader.parse(block, columns)
            begin = reader.rows - len(block.starts)
            if flaws:
                told = f"{path}, row {begin + flaws[0].row + 1}: {flaws[0].text}"
                if not skip_malformed:
                    raise ValueError(f"{told}; data.bad_rows=skip leaves such input out")
                first, skipped = first or told, skipped + len(flaws)
            yield table, number + begin, reader.rows
    if skipped:
        lost(skipped, first)


class _Reader:
    """The records of one file."""

    def __init__(self, path: DataFile, file: Any, layout: Layout) -> None:
        self._path, self._file, self._layout = path, file, layout
        separator = layout.separator.encode(layout.encoding)
        self._replaced, self._separator = (separator, UNIT) if len(separator) > 1 else (b"", separator)
        if self._separator in (b"", b"\n", b"\r", b'"'):
            raise ValueError(f"data.csv_separator={layout.separator!r} must be text between columns, e.g. ','")
        own = re.escape(self._separator)
        # A quoted field that ends on its line, or any other text up to the separator.
        field = rb'(?:\A|%b)(?:("[^"]*(?:""[^"]*)*")(?=[ ]*(?:%b|\r?\Z))[ ]*|([^%b]*))' % (own, own, own)
        self._fields, self._closing = re.compile(field), re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
        self._edge = np.zeros(256, bool)
        self._edge[[LF, CR, self._separator[0]]] = True
        self._pending = 0  # bytes of a record that has begun
        self._as_text = self._first_text = 0  # rows with quotes that are text, and the first of them
        self.names, self.rows = list(layout.column_names), 0
        self._count = len(self.names)  # of columns
        self._blocks = self._scan()
        self._first = None if self.names else self._read_header()

    def blocks(self) -> Iterator[Block]:
        """The rows of the file, whose number so far is `rows`."""
        yield from filter(None, [self._first])
        yield from self._blocks
        if self._as_text:
            logger.warning(
                "%s: in %d rows, from row %d on, a field begins with a quote that does not enclose it: it is text; %s",
                self._path, self._as_text, self._first_text, ADVICE,
            )  # fmt: skip

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
            self._read_options(self.names, len(data)),
            self._parse_options(block.spans, note),
            convert,
        )
        bad = [row.number - 1 for row in malformed]
        if table.num_rows + len(bad) != len(kept):
            raise ValueError(
                f"{self._path}, rows {self.rows - len(block.starts) + 1} to {self.rows}: {len(kept)} rows were "
                f"counted, and {table.num_rows + len(bad)} read; {ADVICE}"
            )
        if self._replaced:  # within quotes it is text
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
        return f"{count} columns, expected {len(self.names)}: {brief(repr(text))}{hint}"

    def _read_header(self) -> Block:
        """The rows that come with the header, whose names are kept."""
        block = next((block for block in self._blocks if len(block.starts)), None)
        if block is None:
            raise ValueError(f"{self._path}: the file is empty")
        end = int(block.starts[1]) if len(block.starts) > 1 else len(block.data)
        line = block.data[int(block.starts[0]) : end]
        options = self._read_options([], len(line)), self._parse_options(True)
        self.names = csv.open_csv(pa.BufferReader(line), *options).schema.names
        self.rows -= 1
        return Block(block.data[end:], block.starts[1:] - end, block.spans, [row - 1 for row in block.open if row])

    def _scan(self) -> Iterator[Block]:
        held = b""  # a record that has begun
        for lines, last in self._lines():
            block, held = self._cut(held + lines, last)
            self._pending = len(held)
            if len(held) > LONGEST:
                raise ValueError(f"{self._path}, row {self.rows + 1}: more than {LONGEST >> 20} MiB long; {ADVICE}")
            yield block

    def _lines(self) -> Iterator[tuple[bytes, bool]]:
        """Whole lines, and whether they are the last."""
        rest, length, begun = list[bytes](), 0, False
        while chunk := self._file.read(max(BLOCK, length, self._pending)):
            if not begun:
                chunk, begun = chunk.removeprefix(BOM), True
            # A carriage return at the end may be half of a line end.
            cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, len(chunk) - 1)) + 1
            if cut:
                yield self._separated(b"".join([*rest, chunk[:cut]])), False
                rest, length = [], 0
            rest.append(chunk[cut:])
            length += len(chunk) - cut
            if length > LONGEST:
                raise ValueError(f"{self._path}, row {self.rows + 1}: a line of more than {LONGEST >> 20} MiB")
        tail = b"".join(rest)
        yield self._separated(tail if not tail or tail.endswith((b"\n", b"\r")) else tail + b"\n"), True

    def _separated(self, lines: bytes) -> bytes:
        return lines.replace(self._replaced, UNIT) if self._replaced else lines

    def _cut(self, data: bytes, last: bool) -> tuple[Block, bytes]:
        """The records that lines have, and the lines of one that goes on."""
        lines = _Lines.of(data)
        joined = np.zeros(len(lines.ends), bool)  # with the line before
        edits: dict[int, bytes] = {}  # line -> what it is instead
        stop = len(lines.ends)
        if not self._count and lines.first < len(lines.ends):
            self._count = len(self._fields.findall(lines.text(lines.first)))
        if self._layout.quoted is not False and b'"' in data:
            stop = self._join(lines, last, joined, edits)
        cut = int(lines.starts[stop]) if stop < len(lines.ends) else len(data)
        begins = lines.starts[:stop][~joined[:stop] & ~lines.empty[:stop]]
        held, data = data[cut:], data[:cut]
        unclosed = [int(np.searchsorted(begins, lines.starts[line])) for line in edits if not edits[line]]
        data, begins = _edited(data, {lines.span(line): text for line, text in edits.items() if text}, begins)
        self.rows += len(begins)
        return Block(data, begins, bool(joined[:stop].any()), unclosed), held

    def _join(self, lines: _Lines, last: bool, joined: np.ndarray, edits: dict[int, bytes]) -> int:
        """Mark lines that go on a record; returns the first line of a record that goes on after the data."""
        if (stop := self._join_quoted(lines, last, joined)) is not None:
            return stop
        after = 0
        for line in map(int, self._unpaired(lines)):
            if line < after:
                continue
            end = self._last_line(lines, line)
            if end == line:
                self._take_as_text(lines, line, joined, edits)
                continue
            several = range(line, len(lines.ends) if end is None else end + 1)
            kind = self._kind(lines, several, end is not None, last, joined)
            if kind == "goes on":
                return line
            if kind == "one row":
                after = several.stop
                joined[line + 1 : after] = True
                continue
            if self._layout.quoted:
                edits[line] = b""
                continue
            self._take_as_text(lines, line, joined, edits, True)
        return len(lines.ends)

    def _take_as_text(
        self, lines: _Lines, line: int, joined: np.ndarray, edits: dict[int, bytes], joins: bool = False
    ) -> None:
        """Quote the fields of a line that begin with a quote that does not enclose them.

        If it `joins` lines, always; else only where the line then has all columns.
        """
        fields = self._fields.findall(lines.text(line))
        begin = any(plain.startswith(b'"') for _, plain in fields)
        if not begin or not (joins or (self._layout.quoted is None and len(fields) == self._count)):
            return
        self._as_text, self._first_text = self._as_text + 1, self._first_text or self._row_of(lines, line, joined)
        edits[line] = self._separator.join(quoted or _in_quotes(plain) for quoted, plain in fields)

    def _join_quoted(self, lines: _Lines, last: bool, joined: np.ndarray) -> int | None:
        """`_join` where every quote belongs to a field that is quoted, and no such field joins rows; else None."""
        quotes = np.flatnonzero(lines.buffer == QUOTE)
        before, after = lines.buffer[quotes - 1], lines.buffer[quotes + 1]
        opens, closes = (before == QUOTE) | self._edge[before], (after == QUOTE) | self._edge[after]
        if not (opens[::2].all() and closes[1::2].all()):
            return None
        inside = np.searchsorted(quotes, lines.ends) % 2 > 0  # ends of lines
        if not inside.any():
            return len(lines.ends)
        goes_on = np.append(False, inside[:-1])
        begins, stop = np.flatnonzero(~goes_on), len(lines.ends)
        if inside[-1]:
            begins, stop = begins[:-1], int(begins[-1])
            if last or not stop:
                return None
        if not self._layout.quoted:
            separators = np.bincount(
                np.searchsorted(lines.ends, np.flatnonzero(lines.buffer == self._separator[0])),
                minlength=len(lines.ends),
            )
            separators[lines.empty] = self._count
            several = np.diff(np.append(begins, stop))
            least = np.minimum.reduceat(separators[:stop], begins)
            for begin, count in np.stack([begins, several])[:, (several > 1) & (least >= self._count - 1)].T.tolist():
                if self._kind(lines, range(begin, begin + count), True, last, goes_on) != "one row":
                    return None
        joined[:stop] = goes_on[:stop]
        return stop

    def _unpaired(self, lines: _Lines) -> np.ndarray:
        """Lines with quotes that do not just enclose fields; the others end outside quotes if they begin so."""
        quotes = np.flatnonzero(lines.buffer == QUOTE)
        line = np.searchsorted(lines.ends, quotes)
        own = np.arange(len(quotes)) - np.searchsorted(line, line)
        before, after = lines.buffer[quotes - 1], lines.buffer[quotes + 1]
        opens = (before == QUOTE) & (own > 0) | self._edge[before]
        closes = (after == QUOTE) | self._edge[after]
        irregular = ~np.where(own % 2 == 0, opens, closes)
        odd = np.bincount(line, minlength=len(lines.ends)) % 2 > 0
        odd[line[irregular]] = True
        return np.flatnonzero(odd)

    def _last_line(self, lines: _Lines, line: int) -> int | None:
        """The line in which a record ends that begins with this one; None if a quoted field does not end."""
        place = int(lines.starts[line])
        while True:
            text = lines.data[place : int(lines.ends[line])]
            opener = next((m.start(2) for m in self._fields.finditer(text) if m[2] and m[2][0] == QUOTE), None)
            if opener is None:
                return line
            closed = self._closing.match(lines.data, place + opener + 1)
            if closed is None:
                return None
            place = closed.end()
            line = int(np.searchsorted(lines.ends, place))

    def _kind(self, lines: _Lines, several: range, closed: bool, last: bool, joined: np.ndarray) -> str:
        """Whether lines that a quoted field joins are "one row", or "rows" each, so that the quote is text.

        "goes on": the data do not tell yet. Each line is a row if it has all columns, and numbers where the first has.
        """
        if not closed and last:
            return "rows"
        if self._layout.quoted or not (self.names or lines.first < several[0]):  # or it is the header
            return "one row" if closed else "goes on"
        telling = TELLING[self._as_text > 0]
        told = [line for line in several[:telling] if not lines.empty[line]]
        rows = [[quoted or plain for quoted, plain in self._fields.findall(lines.text(line))] for line in told]
        numbers = [at for at, text in enumerate(rows[0]) if NUMBER.fullmatch(text)]
        if not all(len(row) == self._count and _alike([row[at] for at in numbers]) for row in rows):
            return "one row" if closed else "goes on"
        if len(told) == telling or (closed and numbers):
            return "rows"
        if closed:
            raise ValueError(
                f"{self._path}, row {self._row_of(lines, several[0], joined)}: a quote at the start of a field closes "
                f"{len(several) - 1} lines below, and each line has all columns: one row, or several? {ADVICE}"
            )
        return "goes on"

    def _row_of(self, lines: _Lines, line: int, joined: np.ndarray) -> int:
        """From 1, after the header."""
        before = np.count_nonzero(~joined[:line] & ~lines.empty[:line])
        return self.rows + int(before) + (1 if self.names else 0)

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
            fields = self._fields.findall(record) if quoted else [(b"", f) for f in record.split(self._separator)]
            if len(fields) != len(self.names):
                flaws.append(Flaw(row, self._counted(len(fields), record.decode(errors="replace"))))
                continue
            for name, (inside, plain) in zip(self.names, fields, strict=True):
                if name in columns and not _is_utf8(inside or plain):
                    text = brief(repr(inside or plain))
                    flaws.append(Flaw(row, f"column {name!r} is {text}, expected UTF-8 text"))
                    break
        return flaws


@dataclass
class _Lines:
    """Whole lines, which end in a line feed, a carriage return or both."""

    data: bytes
    buffer: np.ndarray
    starts: np.ndarray
    ends: np.ndarray  # of the last byte of each
    empty: np.ndarray
    first: int  # that is not empty

    @classmethod
    def of(cls, data: bytes) -> _Lines:
        buffer = np.frombuffer(data, np.uint8)
        feeds = buffer == LF
        returns = buffer == CR if b"\r" in data else np.zeros(0, bool)
        if len(returns):
            alone = returns & ~np.append(feeds[1:], False)
            feeds = feeds | alone
        ends = np.flatnonzero(feeds)
        starts = np.append(0, ends + 1)[: len(ends)]
        empty = ends == starts
        if len(returns):
            empty |= (ends == starts + 1) & returns[starts]
        return cls(data, buffer, starts, ends, empty, int(np.argmin(np.append(empty, False))))

    def span(self, line: int) -> tuple[int, int]:
        begin, end = int(self.starts[line]), int(self.ends[line])
        return begin, end - (end > begin and self.data[end - 1] == CR)

    def text(self, line: int) -> bytes:
        begin, end = self.span(line)
        return self.data[begin:end]


def brief(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def _alike(fields: list[bytes]) -> bool:
    """Whether these are numbers or empty, and not all empty."""
    numbers = [NUMBER.fullmatch(text) is not None for text in fields]
    return not fields or (any(numbers) and all(n or EMPTY.fullmatch(t) for n, t in zip(numbers, fields, strict=True)))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _in_quotes(plain: bytes) -> bytes:
    return b'"%b"' % plain.replace(b'"', b'""') if plain.startswith(b'"') else plain


def _spans(block: Block) -> list[tuple[int, int]]:
    return list(pairwise([*block.starts.tolist(), len(block.data)]))


def _without(block: Block, rows: Sequence[int]) -> bytes:
    left_out = set(rows)
    return b"".join(block.data[begin:end] for row, (begin, end) in enumerate(_spans(block)) if row not in left_out)


def _edited(data: bytes, edits: dict[tuple[int, int], bytes], begins: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Data with other text at some places, and where its records begin then."""
    if not edits:
        return data, begins
    ordered = sorted(edits.items())
    parts, end = list[bytes](), 0
    for (begin, stop), text in ordered:
        parts += [data[end:begin], text]
        end = stop
    grown = np.cumsum([0, *(len(text) - (stop - begin) for (begin, stop), text in ordered)])
    before = np.searchsorted([begin for (begin, _), _ in ordered], begins, side="left")
    return b"".join([*parts, data[end:]]), begins + grown[before]
