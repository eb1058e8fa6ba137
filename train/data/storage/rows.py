"""Labelled rows as numpy columns, joined with side tables; malformed rows raise or are skipped and named."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from train.data.features import columns
from train.data.features.columns import Coded, CodedLists
from train.data.features.numeric import TOO_LARGE, too_large
from train.data.features.transforms import Transforms
from train.data.storage.files import Layout, Table, column_names, count_rows, stream_files
from train.data.storage.remote import DataFile

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TOO_MUCH = "with a lower data.rows_at_once, less is read at a time"
NEVER = int(np.iinfo(np.int64).min)
"""The time of what did not happen."""
HEAVIEST = 1e30
"""Weight of a row: the sums over a batch and its products with losses stay finite in float32."""


@dataclass(frozen=True)
class Join:
    """A side table with one row for each value of `key`, to which `column` of the main rows refers."""

    files: Sequence[DataFile]
    key: str
    column: str
    layout: Layout


class RowFiles:
    """Columns of the rows of some files. A column that those lack is taken from the first joined table that has it.

    NaN in the number columns `nan_missing` is a missing number, in others it is malformed.

    `bad_rows` "raise": the first malformed row is a ValueError that names it; "skip": such rows are marked in
    `Rows.bad` and `report` names them. A malformed value in a joined table is then a missing one.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        wanted: Collection[str],
        layout: Layout,
        bad_rows: str,
        joins: Sequence[Join] = (),
        nan_missing: Collection[str] = (),
        transforms: Transforms | None = None,
    ) -> None:
        self.files, self.layout, self.bad_rows, self.nan_missing = files, layout, bad_rows, nan_missing
        self._transforms = Transforms({}) if transforms is None else transforms
        wanted = self._transforms.inputs(wanted)
        names = column_names(files[0], layout)
        if taken := [name for name in names if name in self._transforms]:
            raise ValueError(f"{files[0]} has a column {taken[0]!r}, which data.transforms makes; name that otherwise")
        absent = sorted(wanted - set(names))
        known = {files[0]: names}
        self._sides: list[tuple[Join, Rows]] = []
        for join in joins:
            known[join.files[0]] = theirs = column_names(join.files[0], join.layout)
            taken = [name for name in absent if name in theirs]
            absent = [name for name in absent if name not in theirs]
            if taken:
                side = RowFiles(join.files, [join.key, *taken], join.layout, bad_rows, nan_missing=nan_missing)
                self._sides.append((join, side.whole()))
        if absent:
            held = "; ".join(f"{file} has {theirs}" for file, theirs in known.items())
            raise ValueError(f"no column {absent[0]!r}: {held}{_header_hint(absent[0], known.values())}")
        self.columns = {name for theirs in known.values() for name in theirs}
        """Of the files and those joined to them."""
        self._own = sorted({name for name in wanted if name in names} | {join.column for join, _ in self._sides})
        self._notes = Notes(str(files[0]))

    def whole(self) -> Rows:
        """All rows at once."""
        return next(self.chunks(None))

    def chunks(self, most: int | None) -> Iterator[Rows]:
        """The rows in order, `most` at a time (None: all)."""
        tables = stream_files(self.files, self._own, self.layout, self.bad_rows == "skip", most, self._notes.lost)
        return (
            Rows(table, self._sides, self.bad_rows, self.nan_missing, self._notes, self._transforms) for table in tables
        )

    def count(self) -> int:
        """About how many rows there are."""
        return count_rows(self.files, self.layout)


@dataclass
class Notes:
    """What was found in the rows of some files, in all chunks of them."""

    start: str  # the first file
    rows: int = 0
    bad: int = 0
    flaws: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)  # kind -> (rows, the first of them)
    unmet: dict[str, list[Any] | None] = field(default_factory=dict)  # condition -> values met instead; None: it is met

    def flaw(self, kind: tuple[str, str], count: int, first: str) -> None:
        known, example = self.flaws.get(kind, (0, first))
        self.flaws[kind] = known + count, example

    def lost(self, rows: int, first: str) -> None:
        """Rows that could not be read."""
        self.rows += rows
        self.bad += rows
        self.flaw((first, "lost"), rows, first)

    def condition(self, condition: str, met: bool, values: pa.StringArray) -> None:
        if met:
            self.unmet[condition] = None
        else:
            self.unmet.setdefault(condition, values[:5].to_pylist())

    def report(self, max_skipped: float) -> None:
        for condition, values in self.unmet.items():
            if values is not None:
                logger.warning("no row meets %s; the column holds e.g. %s", condition, values)
        flaws = [f"{count} rows, the first is {first}" for count, first in self.flaws.values()]
        for flaw in flaws:
            logger.warning("bad input: %s", flaw)
        share, told = self.bad / max(self.rows, 1), f"{self.bad} of {self.rows} rows from {self.start} on"
        if share:
            logger.warning("skipped %s", told)
        if share > max_skipped:
            raise ValueError(
                f"{told} are malformed, more than data.max_skipped={max_skipped} lets data.bad_rows=skip leave "
                f"out: {'; '.join(flaws)}. If the configuration is right, set e.g. "
                f"data.max_skipped={math.ceil(100 * share) / 100}"
            )


class Rows:
    """Some rows of `RowFiles`, as numpy columns."""

    def __init__(
        self,
        table: Table,
        sides: Sequence[tuple[Join, Rows]],
        bad_rows: str,
        nan_missing: Collection[str],
        notes: Notes,
        transforms: Transforms,
    ) -> None:
        self.table, self.sides, self.bad_rows, self.nan_missing, self.notes = table, sides, bad_rows, nan_missing, notes
        self.transforms = transforms
        self.bad = np.zeros(len(self), bool)
        self._matches: dict[int, np.ndarray] = {}
        self._read_before: dict[tuple[Any, ...], Any] = {}

    def __len__(self) -> int:
        return len(self.table.number)

    def ids(self, name: str) -> Coded:
        if name in self.transforms:
            return self.transforms.ids(name, self)
        side = self._side(name)
        return (
            side[0].once("ids", name).take(side[1]) if side else self._read(name, columns.read_ids, columns.concat_ids)
        )

    def required_ids(self, name: str) -> Coded:
        """Ids of which none may be missing."""
        ids = self.ids(name)
        self.flag(ids.codes < 0, name, "expected an id")
        return ids

    def lists(self, name: str, separator: str) -> CodedLists:
        if name in self.transforms:
            source = self.transforms.copied(name)
            if source is None:
                raise ValueError(f"data.transforms.{name} makes one value a row, and lists are needed")
            return self.lists(source, separator)
        side = self._side(name)
        if side:
            return side[0].once("lists", name, separator).take(side[1])
        return self._read(name, lambda column: columns.read_lists(column, separator), columns.concat_lists)

    def vectors(self, name: str, width: int, separator: str) -> np.ndarray:
        """[N, width] float32, NaN in all of a missing vector; one of another length or with a gap is malformed."""
        if name in self.transforms:
            raise ValueError(f"data.transforms.{name} makes one value a row, and vectors are needed")
        side = self._side(name)
        if side:
            theirs = side[0].once("vectors", name, width, separator)
            return np.append(theirs, np.full((1, width), np.nan, np.float32), 0)[side[1]]
        values, offsets = self._read(
            name, lambda column: columns.read_vectors(column, separator), columns.concat_ragged
        )
        lengths = np.diff(offsets)
        self.flag((lengths != width) & (lengths != 0), name, f"expected {width} numbers or nothing")
        expected = "expected finite numbers that float32 can hold"
        self.flag(self.owners(np.isnan(values), offsets), name, expected)
        vectors = np.full((len(self), width), np.nan, np.float32)
        whole = np.flatnonzero(lengths == width)
        vectors[whole] = values[offsets[whole][:, None] + np.arange(width)]
        vectors[np.isnan(vectors).any(1)] = np.nan
        return vectors

    def numbers(self, name: str, otherwise: str = "") -> np.ndarray:
        """[N] float64 with NaN for missing; text that is no number, infinity and NaN are malformed.

        In a column of `nan_missing` NaN is missing. `otherwise`: what else can be done, for the error.
        """
        if name in self.transforms:
            return self.transforms.numbers(name, self)
        side = self._side(name)
        if side:
            return np.append(side[0].once("numbers", name, otherwise), np.nan)[side[1]]
        nan_is_missing = name in self.nan_missing
        numbers, bad = self._read(
            name, lambda column: columns.read_numbers(column, nan_is_missing), columns.concat_arrays
        )
        expected = "expected a finite number or nothing"
        if bad.any() and self._value(name, int(np.flatnonzero(bad)[0])).lower() == "nan":
            expected += f" (with data=events, data.missing_nan=[{name}] takes NaN for nothing)"
        else:
            expected += otherwise
        self.flag(bad, name, expected)
        return np.where(bad, np.nan, numbers)

    def features(self, name: str, logarithmic: bool) -> np.ndarray:
        """`numbers` of a feature, which are float32 in a batch; of one that is `logarithmic` only the logarithm is."""
        numbers = self.numbers(name)
        if not logarithmic:
            self.flag(too_large(numbers), name, TOO_LARGE)
            numbers = np.where(too_large(numbers), np.nan, numbers)
        return numbers

    def labels(self, name: str, real: bool = False) -> np.ndarray:
        """[N] float64 of 0, 1 and NaN (empty: not observed), if `real` of any finite numbers.

        The name may compare a column, see `comparison`.
        """
        column, sign, value = comparison(name)
        if sign == "==":
            ids = self.ids(column)
            return np.where(ids.codes < 0, np.nan, self.having(ids, [value], name))
        numbers = self.numbers(column, f" (a label of words is a comparison: '{column} == WORD')")
        if sign:
            return np.where(np.isnan(numbers), np.nan, numbers >= float(value))
        if real:
            self.flag(too_large(numbers), column, TOO_LARGE)
            return np.where(too_large(numbers), np.nan, numbers)
        expected = (
            "expected a label of 0, 1 or nothing (with data=events, data.real_labels names tasks of real numbers)"
        )
        self.flag(~np.isnan(numbers) & (numbers != 0) & (numbers != 1), column, expected)
        return numbers

    def weights(self, name: str) -> np.ndarray:
        """[N] float64, 1 where it is missing."""
        numbers = self.numbers(name)
        self.flag(numbers < 0, name, "expected a weight of at least 0 or nothing")
        self.flag(numbers > HEAVIEST, name, f"expected a weight of at most {HEAVIEST:g}: sums are taken in float32")
        return np.where(np.isnan(numbers), 1.0, numbers)

    def milliseconds(self, name: str, time_format: str) -> np.ndarray:
        """[N] int64 since 1970; a missing or unreadable time is malformed."""
        times, bad = self._milliseconds(name, time_format)
        example = self._value(name, int(np.flatnonzero(bad)[0])) if bad.any() else ""
        self.flag(bad, name, _expected_time(time_format, example))
        return times

    def known(self, name: str, time_format: str) -> np.ndarray:
        """[N] int64 milliseconds as `milliseconds`, but NEVER where a time is missing."""
        missing = self.ids(name).codes < 0
        times, bad = self._milliseconds(name, time_format)
        self.flag(bad & ~missing, name, _expected_time(time_format))
        return np.where(missing, NEVER, times)

    def _milliseconds(self, name: str, time_format: str) -> tuple[np.ndarray, ...]:
        return self._read(name, lambda column: columns.read_milliseconds(column, time_format), columns.concat_arrays)

    def time_lists(self, name: str, separator: str, time_format: str) -> tuple[np.ndarray, np.ndarray]:
        """(milliseconds of all rows one after another, offsets [N + 1])."""
        times, bad, offsets = self._read(
            name, lambda column: columns.read_time_lists(column, separator, time_format), columns.concat_ragged
        )
        self.flag(self.owners(bad, offsets), name, _expected_time(time_format))
        return times, offsets

    def once(self, method: str, *arguments: str | int) -> Any:
        """What a method returns, which is called a single time: rows of several chunks join the same side table."""
        key = (method, *arguments)
        if key not in self._read_before:
            self._read_before[key] = getattr(self, method)(*arguments)
        return self._read_before[key]

    def having(self, ids: Coded, accepted: Sequence[object], condition: str) -> np.ndarray:
        """`ids.isin(accepted)`; `report` warns when no row meets the `condition`."""
        met = ids.isin(accepted)
        if any(isinstance(value, bool) for value in accepted):
            condition += " (YAML reads yes, no, on and off as true and false unless they are quoted)"
        self.notes.condition(condition, bool(met.any()), ids.values)
        return met

    def owners(self, chosen: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """[N] bool: rows that hold one of the `chosen` list items."""
        rows = np.zeros(len(self), bool)
        rows[np.searchsorted(offsets, np.flatnonzero(chosen), side="right") - 1] = True
        return rows

    def flag(self, bad: np.ndarray, name: str, expected: str, drop: bool = True) -> None:
        """Rows `bad` [N] do not hold what is `expected` in a column: raise, or note it and (if `drop`) skip them."""
        if not bad.any():
            return
        index = int(np.flatnonzero(bad)[0])
        mine = name in self.table.names
        value = f" is {self._value(name, index)[:100]}" if mine else ""
        flaw = f"{self.table.locate(index)}: column {name!r}{value}, {expected}"
        if self.bad_rows == "raise":
            raise ValueError(f"{flaw}; data.bad_rows=skip leaves such input out")
        self.notes.flaw((name, expected), int(bad.sum()), flaw)
        if drop:
            self.bad |= bad

    def finish(self) -> None:
        """All columns are read: count the rows and the malformed ones."""
        self.notes.rows += len(self)
        self.notes.bad += int(self.bad.sum())

    def report(self, max_skipped: float) -> None:
        """Once all columns of the last rows are read: a warning for each kind of flaw that was skipped in any rows.

        ValueError if more than this share of the rows was skipped, or all.
        """
        for _, side in self.sides:
            side.finish()
        for notes in (self.notes, *(side.notes for _, side in self.sides)):
            notes.report(max_skipped)
        if self.notes.bad == self.notes.rows:
            raise ValueError(f"every row of {', '.join(self.table.files)} is malformed; see the warnings above")

    def _side(self, name: str) -> tuple[Rows, np.ndarray] | None:
        """The joined table that serves a column, and its row for each row here: -1 where it has none."""
        if name in self.table.names:
            return None
        for index, (join, side) in enumerate(self.sides):
            if name in side.table.names:
                if index not in self._matches:
                    self._matches[index] = self._match(join, side)
                return side, self._matches[index]
        raise KeyError(name)

    def _match(self, join: Join, side: Rows) -> np.ndarray:
        keys, row_of = side.once("places", join.key)
        return row_of[self.ids(join.column).recode(keys)]

    def places(self, key: str) -> tuple[pa.StringArray, np.ndarray]:
        """(distinct keys, row of each of them, then -1)."""
        ids = self.required_ids(key)
        usable = np.flatnonzero(~self.bad)
        distinct, at = np.unique(ids.codes[usable], return_index=True)
        if len(distinct) < len(usable):
            again = int(np.delete(usable, at)[0])
            raise ValueError(f"{self.table.locate(again)}: {key}={ids.values[ids.codes[again]]} is a repeated key")
        row_of = np.full(len(ids.values) + 1, -1)
        row_of[distinct] = usable[at]
        return ids.values, row_of

    def _value(self, name: str, index: int) -> str:
        value = self.table.value(name, index)
        try:
            return str(value.as_py())
        except (ValueError, OverflowError):  # a time that Python's datetime cannot hold
            return str(value.cast(pa.int64()).as_py())

    def _read(
        self, name: str, read: Callable[[pa.ChunkedArray], Result], concat: Callable[[Sequence[Result]], Result]
    ) -> Result:
        """What a column is read as, of files that have it in different types each by its own."""
        if name not in self.table.names:
            raise ValueError(f"column {name!r} must stand in {self.table.files[0]} itself, not in a joined table")
        results = []
        for file, column in self.table.column(name):
            try:
                results.append(read(column))
            except pa.ArrowException as error:
                remedy = f"; {TOO_MUCH}" if re.search("overflow|capacity|exceed", str(error)) else ""
                raise ValueError(f"{file}: column {name!r}: {error}{remedy}") from None
            except ValueError as error:
                raise ValueError(f"{file}: column {name!r}: {error}") from None
        return concat(results)


def _header_hint(name: str, headers: Iterable[Sequence[str]]) -> str:
    """What a file that lacks a column may have been read with, by what its header says."""
    for header in headers:
        if name in map(str.strip, header):
            return "; the header has blanks around names: take them out, or name the columns as they are"
        for separator in (",", ";", "\t", "|", " "):
            if len(header) == 1 and name in map(str.strip, header[0].split(separator)):
                return f"; its columns are separated otherwise: data.csv_separator={separator!r}"
    return ""


def comparison(label: str) -> tuple[str, str, str]:
    """("rating", ">=", "4") of "rating >= 4", ("event", "==", "buy") of "event == buy"; a column alone has no sign."""
    column, sign, value = re.fullmatch(r"(.*?)(>=|==|$)(.*)", label, re.DOTALL).groups()  # type: ignore[union-attr]
    return column.strip(), sign, value.strip()


def _expected_time(time_format: str, value: str = "") -> str:
    written = {"s": "seconds since 1970", "ms": "milliseconds since 1970"}.get(time_format, repr(time_format))
    fitting = columns.time_format_of(value)
    other = f"{fitting!r} fits" if fitting else "s, ms or a strptime pattern, e.g. '%Y-%m-%d %H:%M:%S'"
    return f"expected a time as data.time_format (or that of its history) says: {written} ({other})"
