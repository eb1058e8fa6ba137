"""Arrow columns as numpy: ids as codes into distinct texts, lists, numbers and times; what cannot be read is masked.

Ids are compared as text, so 12 in a parquet file, "12" in a CSV file and 12.0 in a column that pandas made float are
one id. Null and empty text are missing. True and false are 1 and 0, also as a CSV file spells them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from train.data.batch import ranges
from train.data.features import ids

logger = logging.getLogger(__name__)

NUMBER = r"^-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
NAN = r"^[+-]?(?i:nan)$"
LIST = r"^\s*\[[^\[\]]*\]\s*$"
"""A list as Python and JSON write it, e.g. in a CSV file of pandas: its brackets belong to no item."""
QUOTED = r"""^(?:'(.*)'|"(.*)")$"""
"""An item of such a list, without the quotes around it."""
TIME_FORMATS = (
    *(f"%Y-%m-%d{between}%H:%M:%S{end}" for end in ("", "Z", ".%f", ".%fZ") for between in (" ", "T")),
    *("%Y-%m-%d %H:%M", "%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "s", "ms"),
)
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

    def take(self, rows: np.ndarray) -> CodedLists:
        """The given rows; row -1 is an empty list."""
        lengths = np.append(np.diff(self.offsets), 0)[rows]
        starts = self.offsets[rows]
        offsets = np.append(0, np.cumsum(lengths))
        return CodedLists(self.codes[ranges(starts, lengths)], offsets, self.values)


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
    """A list column, or text whose items are joined by `separator`. Null and empty text are empty lists."""
    items, offsets, rows = _lists(column, separator)
    coded = read_ids(pa.chunked_array([items]))
    lists = CodedLists(coded.codes, offsets, coded.values)
    return lists if rows is None else lists.take(rows)


def read_time_lists(
    column: pa.ChunkedArray, separator: str, time_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times of all rows one after another, bad, offsets [N + 1]) of a list column of times, as `read_milliseconds`."""
    items, offsets, rows = _lists(column, separator)
    times, bad = read_milliseconds(pa.chunked_array([items]), time_format)
    if rows is None:
        return times, bad, offsets
    lengths = np.append(np.diff(offsets), 0)[rows]
    picked = ranges(offsets[rows], lengths)
    return times[picked], bad[picked], np.append(0, np.cumsum(lengths))


def _lists(column: pa.ChunkedArray, separator: str) -> tuple[pa.Array, np.ndarray, np.ndarray | None]:
    """(items, offsets of lists, list of each row or None when they are one to one): equal texts are split once."""
    rows = bracketed = None
    if is_text(column.type):
        rows, values = _dictionary(column)
        texts = values.cast(pa.string())
        bracketed = pc.match_substring_regex(texts, LIST).fill_null(False)
        texts = pc.if_else(bracketed, pc.replace_substring_regex(texts, r"[\[\]]", ""), texts)
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        column = pa.chunked_array([pc.split_pattern(texts, separator)])
    elif not _is_list(column.type):
        raise ValueError(f"it is {column.type}, expected a list type or text joined by {separator!r}")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    items = pc.list_flatten(column).combine_chunks()
    if bracketed is not None:
        items = pc.utf8_trim_whitespace(items)
        quoted = pa.array(np.repeat(bracketed.to_numpy(zero_copy_only=False), lengths))
        items = pc.if_else(quoted, pc.replace_substring_regex(items, QUOTED, r"\1\2"), items)
    return items, np.append(0, np.cumsum(lengths)), rows


def read_vectors(column: pa.ChunkedArray, separator: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 of all rows one after another, NaN for what is no number; offsets [N + 1]) of a column of vectors.

    Text is a list as JSON writes it, [0.5, -1], or numbers joined by `separator`. Null and empty text are of length 0.
    """
    if is_text(column.type):
        texts = column.cast(pa.string())
        bracketed = pc.match_substring_regex(texts, LIST).fill_null(False)
        separated = pc.replace_substring(pc.replace_substring_regex(texts, r"[\[\]]", ""), ",", separator)
        texts = pc.if_else(bracketed, separated, texts)
        texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), pa.scalar(None, pa.string()), texts)
        column = pc.split_pattern(texts, separator)
    elif not _is_list(column.type):
        raise ValueError(f"it is {column.type}, expected a list of numbers, or text such as [0.5, -1]")
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    numbers, bad = read_numbers(pc.list_flatten(column))
    bad |= np.abs(numbers) > np.finfo(np.float32).max
    return np.where(bad, np.nan, numbers).astype(np.float32), np.append(0, np.cumsum(lengths))


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
        times = stamps.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()).fill_null(0).to_numpy()
        return np.where(bad, 0, times), bad
    if "%" in time_format:
        coded = read_ids(column)
        texts = coded.values
        if ".%f" in time_format:  # which Arrow does not support
            texts, time_format = (
                pc.replace_substring_regex(texts, r"(:\d\d)\.\d+", r"\1"),
                time_format.replace(".%f", ""),
            )
        stamps = pc.strptime(texts, format=time_format, unit="s", error_is_null=True)
        unread = np.append(stamps.is_null().to_numpy(zero_copy_only=False), True)
        seconds = np.append(stamps.cast(pa.int64()).fill_null(0).to_numpy(), 0)
        unread |= np.abs(seconds) > LATEST // 1000
        return np.where(unread, 0, seconds)[coded.codes] * 1000, unread[coded.codes]
    numbers, bad = read_numbers(column)
    bad |= np.isnan(numbers)
    times = np.floor(numbers * {"s": 1000.0, "ms": 1.0}[time_format])
    bad |= np.abs(times) > LATEST
    return np.where(bad, 0.0, times).astype(np.int64), bad


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
