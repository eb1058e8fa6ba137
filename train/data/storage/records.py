"""Records of text files: where each begins, before anything parses them.

Blocks are cut at the ends of records, however long those are. Quotes follow RFC 4180: one at the start of a field opens
it, a doubled one is a quote, and separators and line ends within are text. In files that are not quoted a field may
begin with one as well; without `data.csv_quotes` these are told by the rows that such a quote would join.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from train.data.storage.remote import DataFile

logger = logging.getLogger(__name__)

BLOCK = 1 << 22
"""Bytes that are read at a time, if rows are not longer."""
LONGEST = 1 << 30
"""Bytes of a row."""
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

    @property
    def delimiter(self) -> bytes:
        """One byte: `UNIT` stands for a longer separator."""
        own = self.separator.encode(self.encoding)
        if own in (b"", b"\n", b"\r", b'"'):
            raise ValueError(f"data.csv_separator={self.separator!r} must be text between columns, e.g. ','")
        return UNIT if len(own) > 1 else own


class Block(NamedTuple):
    """Some whole records of a file."""

    data: bytes  # in which fields whose first quote is text are quoted
    starts: np.ndarray  # [records] place of each record in the data; empty lines are none
    spans: bool  # whether a record has several lines
    open: list[int]  # records with a quote that nothing closes


class Records:
    """Those of one file. `names` has its columns, `rows` the number of rows so far, after the header."""

    def __init__(self, path: DataFile, file: Any, layout: Layout, names_of: Callable[[bytes], list[str]]) -> None:
        """`names_of`: the columns that the line of a header names."""
        self._path, self._file, self._layout = path, file, layout
        self._separator = layout.delimiter
        own = layout.separator.encode(layout.encoding)
        self._replaced = own if len(own) > 1 else b""
        own = re.escape(self._separator)
        # A quoted field that ends on its line, or any other text up to the separator.
        field = rb'(?:\A|%b)(?:("[^"]*(?:""[^"]*)*")(?=[ ]*(?:%b|\r?\Z))[ ]*|([^%b]*))' % (own, own, own)
        self.fields, self._closing = re.compile(field), re.compile(rb'[^"]*(?:""[^"]*)*"(?!")')
        self._edge = np.zeros(256, bool)
        self._edge[[LF, CR, self._separator[0]]] = True
        self._pending = 0  # bytes of a record that has begun
        self._as_text = self._first_text = 0  # rows with quotes that are text, and the first of them
        self.names, self.rows = list(layout.column_names), 0
        self._count = len(self.names)  # of columns
        self._blocks = self._scan()
        self._first = None if self.names else self._read_header(names_of)

    def blocks(self) -> Iterator[Block]:
        """The rows of the file, whose number so far is `rows`."""
        yield from filter(None, [self._first])
        yield from self._blocks
        if self._as_text:
            logger.warning(
                "%s: in %d rows, from row %d on, a field begins with a quote that does not enclose it: it is text; %s",
                self._path, self._as_text, self._first_text, ADVICE,
            )  # fmt: skip

    def _read_header(self, names_of: Callable[[bytes], list[str]]) -> Block:
        """The rows that come with the header, whose names are kept."""
        block = next((block for block in self._blocks if len(block.starts)), None)
        if block is None:
            raise ValueError(f"{self._path}: the file is empty")
        end = int(block.starts[1]) if len(block.starts) > 1 else len(block.data)
        self.names = names_of(block.data[int(block.starts[0]) : end])
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
            self._count = len(self.fields.findall(lines.text(lines.first)))
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
        fields = self.fields.findall(lines.text(line))
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
            opener = next((m.start(2) for m in self.fields.finditer(text) if m[2] and m[2][0] == QUOTE), None)
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
        rows = [[quoted or plain for quoted, plain in self.fields.findall(lines.text(line))] for line in told]
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


def _alike(fields: list[bytes]) -> bool:
    """Whether these are numbers or empty, and not all empty."""
    numbers = [NUMBER.fullmatch(text) is not None for text in fields]
    return not fields or (any(numbers) and all(n or EMPTY.fullmatch(t) for n, t in zip(numbers, fields, strict=True)))


def _in_quotes(plain: bytes) -> bytes:
    return b'"%b"' % plain.replace(b'"', b'""') if plain.startswith(b'"') else plain


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
