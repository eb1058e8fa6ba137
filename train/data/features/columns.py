"""Arrow columns as numpy: ids as codes into distinct texts, lists, numbers and times; what cannot be read is masked.

Ids are compared as text, so 12 in a parquet file, "12" in a CSV file and 12.0 in a column that pandas made float are
one id. Null and empty text are missing. True and false are 1 and 0, also as a CSV file spells them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from train.data.batch import ranges
from train.data.features import ids, text_lists, times

logger = logging.getLogger(__name__)

NUMBER = r"^-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
NAN = r"^[+-]?(?i:nan)$"
TIME_FORMATS = (
    *(f"%Y-%m-%d{between}%H:%M:%S{end}" for end in ("", "Z", ".%f", ".%fZ") for between in (" ", "T")),
    *("%Y-%m-%d %H:%M", "%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "s", "ms"),
)
MOST_TEXT = 1 << 30
"""Bytes of text that are split at once: Arrow's arrays of text hold less than twice as many."""
LATEST = 253_402_300_799_999
"""Milliseconds to the end of the year 9999. Numbers beyond it are milliseconds read as seconds, or nanoseconds."""


@dataclass
class Coded:
    """One id a row: `values[codes[i]]`, or missing where the code is -1."""

    codes: np.ndarray  # [N] int32
    values: pa.StringArray

    def take(self, rows: np.ndarray) -> Coded:
        """The given rows; row -1 is missing."""
        return Coded(np.append(self.codes, np.int32(-1))[rows], self.values)

    def recode(self, values: pa.StringArray) -> np.ndarray:
        """[N] int32 position of each row's id in `values`, -1 where it is missing or not among them."""
        position = pc.index_in(self.values, value_set=values, skip_nulls=True).fill_null(-1).to_numpy()
        return np.append(position, -1).astype(np.int32)[self.codes]

    def isin(self, accepted: Sequence[object]) -> np.ndarray:
        """[N] bool: rows whose id is one of `accepted`, compared as text; None accepts missing ones."""
        known = pc.is_in(self.values, value_set=ids.texts_of(accepted)).to_numpy(zero_copy_only=False)
        return np.append(known, None in accepted)[self.codes]


@dataclass
class CodedLists:
    """A list of ids a row: codes `codes[offsets[i]:offsets[i + 1]]`."""

    codes: np.ndarray
    offsets: np.ndarray  # [N + 1] int64
    values: pa.StringArray
    spare: np.ndarray | None = None  # [N] int64: missing items that may follow, by separators at the end of a text

    def take(self, rows: np.ndarray) -> CodedLists:
        """The given rows; row -1 is an empty list."""
        lengths = np.append(np.diff(self.offsets), 0)[rows]
        starts = self.offsets[rows]
        offsets = np.append(0, np.cumsum(lengths))
        spare = None if self.spare is None else np.append(self.spare, 0)[rows]
        return CodedLists(self.codes[ranges(starts, lengths)], offsets, self.values, spare)

    def padded(self, lengths: np.ndarray) -> CodedLists:
        """Lists of these lengths [N], of which missing items are the end, where they are spare; else as they are."""
        own = np.diff(self.offsets)
        added = np.maximum(lengths - own, 0)
        added[added > (0 if self.spare is None else self.spare)] = 0
        codes = np.insert(self.codes, np.repeat(self.offsets[1:], added), np.int32(-1))
        return CodedLists(codes, np.append(0, np.cumsum(own + added)), self.values)


def coded_integers(numbers: np.ndarray) -> Coded:
    """Integers as ids."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    return Coded(codes.astype(np.int32), pa.array(distinct).cast(pa.string()))


def relabel(codes: np.ndarray, texts: pa.StringArray) -> Coded:
    """The ids `texts[codes]`, of which texts may be equal or null; code -1 is missing."""
    distinct = pc.unique(texts.drop_null())
    return Coded(Coded(codes, texts).recode(distinct), distinct)


def read_ids(column: pa.ChunkedArray) -> Coded:
    """A categorical column of any scalar type."""
    codes, values = _dictionary(column)
    return relabel(codes, ids.texts(values))


def read_lists(column: pa.ChunkedArray, separator: str) -> CodedLists:
    """A list column, or text as `text_lists` reads it. Null and empty text are empty lists."""

    def read(part: pa.ChunkedArray) -> CodedLists:
        items, offsets, rows, spare = _lists(part, separator)
        coded = read_ids(items)
        lists = CodedLists(coded.codes, offsets, coded.values)
        return lists if rows is None else replace(lists.take(rows), spare=spare)

    return concat_lists([read(part) for part in _portions(column)])


def read_time_lists(
    column: pa.ChunkedArray, separator: str, time_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times of all rows one after another, bad, offsets [N + 1]) of a list column of times, as `read_milliseconds`."""
    return _read_items(column, separator, lambda items: read_milliseconds(items, time_format))


def read_vectors(column: pa.ChunkedArray, separator: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 of all rows one after another, NaN for what is no number; offsets [N + 1]) of a column of vectors.

    Text is a list as JSON writes it, [0.5, -1], or numbers joined by `separator`. Null and empty text are of length 0.
    """

    def read(items: pa.ChunkedArray) -> tuple[np.ndarray]:
        numbers, bad = read_numbers(items)
        bad |= np.abs(numbers) > np.finfo(np.float32).max
        return (np.where(bad, np.nan, numbers).astype(np.float32),)

    return _read_items(column, separator, read)


def _read_items(column: pa.ChunkedArray, separator: str, read: Callable[[pa.ChunkedArray], Any]) -> Any:
    """(what `read` returns of the items of all rows, offsets [N + 1])."""

    def of_part(part: pa.ChunkedArray) -> tuple[np.ndarray, ...]:
        items, offsets, rows, _ = _lists(part, separator)
        arrays = read(items)
        if rows is None:
            return (*arrays, offsets)
        lengths = np.append(np.diff(offsets), 0)[rows]
        picked = ranges(offsets[rows], lengths)
        return (*(array[picked] for array in arrays), np.append(0, np.cumsum(lengths)))

    return concat_ragged([of_part(part) for part in _portions(column)])


def _lists(
    column: pa.ChunkedArray, separator: str
) -> tuple[pa.ChunkedArray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(items, offsets of lists, list of each row or None when they are one to one, `CodedLists.spare` of the rows).

    Equal texts are split once.
    """
    if is_text(column.type):
        rows, values = _dictionary(column)
        made = text_lists.split(values.cast(pa.string()), separator)
        return (
            pa.chunked_array([made.items]),
            np.append(0, np.cumsum(made.lengths)),
            rows,
            np.append(made.spare, 1)[rows],
        )
    if not _is_list(column.type) or pa.types.is_nested(column.type.value_type):
        raise ValueError(f"it is {column.type}, expected a list of single values or text joined by {separator!r}")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    return pc.list_flatten(column), np.append(0, np.cumsum(lengths)), None, None


def _portions(column: pa.ChunkedArray) -> list[pa.ChunkedArray]:
    """A column of text in parts of at most `MOST_TEXT` bytes, where rows allow it."""
    if not is_text(column.type) or column.nbytes <= MOST_TEXT:
        return [column]
    portions, held, size = list[pa.ChunkedArray](), list[pa.Array](), 0
    pending = list(reversed(column.chunks))
    while pending:
        chunk = pending.pop()
        if chunk.nbytes > MOST_TEXT and len(chunk) > 1 and not pa.types.is_dictionary(chunk.type):
            half = len(chunk) // 2
            pending += [chunk.slice(half), chunk.slice(0, half)]
            continue
        if held and size + chunk.nbytes > MOST_TEXT:
            portions.append(pa.chunked_array(held))
            held, size = [], 0
        held.append(chunk)
        size += chunk.nbytes
    return [*portions, pa.chunked_array(held)]


def concat_ids(parts: Sequence[Coded]) -> Coded:
    """Parts of a column, whose distinct ids may differ."""
    if len(parts) == 1:
        return parts[0]
    chunks = [pa.DictionaryArray.from_arrays(_nullable(part.codes), part.values) for part in parts]
    codes, values = _dictionary(pa.chunked_array(chunks))
    return Coded(codes, values)


def concat_lists(parts: Sequence[CodedLists]) -> CodedLists:
    if len(parts) == 1:
        return parts[0]
    coded = concat_ids([Coded(part.codes, part.values) for part in parts])
    counts = [len(part.offsets) - 1 for part in parts]
    spare = [np.zeros(n, np.int64) if p.spare is None else p.spare for n, p in zip(counts, parts, strict=True)]
    _, offsets = concat_ragged([(part.codes, part.offsets) for part in parts])
    return CodedLists(coded.codes, offsets, coded.values, np.concatenate(spare))


def concat_ragged(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Of tuples whose last array are offsets [N + 1] in the others."""
    if len(parts) == 1:
        return parts[0]
    *values, lengths = zip(*((*arrays, np.diff(offsets)) for *arrays, offsets in parts), strict=True)
    return (*map(np.concatenate, values), np.append(0, np.cumsum(np.concatenate(lengths))))


def concat_arrays(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    return parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))


def _nullable(codes: np.ndarray) -> pa.Array:
    return pa.array(codes, pa.int32(), mask=codes < 0)


def read_numbers(column: pa.ChunkedArray, nan_is_missing: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [N] float64 with NaN for missing, bad [N] bool: no number, infinity, or a NaN that is not missing)."""
    if is_text(column.type):
        codes, values = _dictionary(column)
        texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
        texts = ids.booleans_as_digits(pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts))
        if nan_is_missing:
            texts = pc.if_else(pc.match_substring_regex(texts, NAN), pa.scalar(None, pa.string()), texts)
        valid = pc.match_substring_regex(texts, NUMBER).fill_null(True)
        numbers = pc.if_else(valid, texts, None).cast(pa.float64()).to_numpy(zero_copy_only=False)
        bad = ~valid.to_numpy(zero_copy_only=False) | np.isinf(numbers)
        return np.append(numbers, np.nan)[codes], np.append(bad, False)[codes]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or _is_exact(column.type)):
        raise ValueError(f"it is {column.type}, expected numbers")
    missing = column.is_null().to_numpy()
    numbers = column.cast(pa.float64(), safe=False).to_numpy()
    if nan_is_missing:
        missing |= np.isnan(numbers)
    return numbers, ~missing & ~np.isfinite(numbers)


def read_milliseconds(column: pa.ChunkedArray, time_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(times [N] int64 milliseconds since 1970 in UTC, bad [N] bool: missing, unreadable or after the year 9999).

    Arrow timestamps and dates are read as such. `time_format` says what numbers and text are: s, ms, or a strptime
    pattern, e.g. "%y%m%d%H", whose ".%f" after the seconds is read and dropped.
    """
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        bad = column.is_null().to_numpy()
        stamps = column if pa.types.is_timestamp(column.type) else column.cast(pa.timestamp("s"))
        counts = stamps.cast(pa.int64()).fill_null(0).to_numpy()
        per_ms = {"s": 1e-3, "ms": 1.0, "us": 1e3, "ns": 1e6}[stamps.type.unit]
        bad |= np.abs(counts / per_ms) > LATEST  # of floats: in integers a count of seconds would overflow
        milliseconds = stamps.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()).fill_null(0).to_numpy()
        return np.where(bad, 0, milliseconds), bad
    if "%" in time_format:
        coded = read_ids(column)
        read, bad = times.read(coded.values, time_format)
        seconds, unread = np.append(read, 0), np.append(bad, True)
        unread |= np.abs(seconds) > LATEST // 1000
        return np.where(unread, 0, seconds)[coded.codes] * 1000, unread[coded.codes]
    numbers, bad = read_numbers(column)
    bad |= np.isnan(numbers)
    made = np.floor(numbers * {"s": 1000.0, "ms": 1.0}[time_format])
    bad |= np.abs(made) > LATEST
    return np.where(bad, 0.0, made).astype(np.int64), bad


def time_format_of(text: str) -> str | None:
    """The first of the usual `time_format`s that reads a text; None if none does."""
    column = pa.chunked_array([[text]], pa.string())
    return next((usual for usual in TIME_FORMATS if not read_milliseconds(column, usual)[1][0]), None)


def _dictionary(column: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """(codes [N] with -1 for null, distinct values)."""
    if isinstance(column.type, pa.BaseExtensionType):
        storage = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        codes, values = _dictionary(storage)
        return codes, pa.ExtensionArray.from_storage(column.type, values)
    if not len(column):  # of which Arrow makes no dictionary
        dictionary = pa.types.is_dictionary(column.type)
        return np.zeros(0, np.int32), pa.array([], column.type.value_type if dictionary else column.type)
    if pa.types.is_null(column.type):
        column = column.cast(pa.string())
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())  # Arrow neither rounds halves nor joins dictionaries of them
    if pa.types.is_dictionary(column.type) and any(chunk.dictionary.null_count for chunk in column.chunks):
        column = column.cast(column.type.value_type)  # Arrow does not join dictionaries that hold null
    if not pa.types.is_dictionary(column.type):
        try:
            column = column.dictionary_encode()
        except pa.ArrowNotImplementedError:
            raise ValueError(f"it is {column.type}, expected one number or text a row") from None
    encoded = column.unify_dictionaries().combine_chunks()
    return encoded.indices.fill_null(-1).to_numpy().astype(np.int32), encoded.dictionary


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_exact(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_decimal(kind)
