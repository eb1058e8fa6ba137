"""Values of a request as they come from outside: what is none is refused by its name, and shown in few letters."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np

from train.data.features.columns import LATEST, NAN, NUMBER
from train.data.features.numeric import LARGEST

LETTERS = 100
"""Of a value in an error: whoever sent it knows the rest."""
TEXT = re.compile(f"{NUMBER}|{NAN}", re.ASCII)
"""Numbers as text, as files have them: neither 1_0 nor 0x1."""
WRONG = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What is raised for a request that is none."""
T = TypeVar("T")
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 2 * LETTERS
_shown.maxlist = _shown.maxdict = _shown.maxtuple = _shown.maxset = 20


def shown(value: object) -> str:
    """A value's representation, in at most `LETTERS` letters however large or nested it is."""
    try:
        text = _shown.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."


def mapping_of(row: Any, whose: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{whose} is {shown(row)}; it must be a mapping of columns")
    return row


def value_of(row: Any, name: str, whose: str) -> Any:
    """A value of a row. ValueError where there is none."""
    if name not in mapping_of(row, whose):
        has = shown(sorted(map(str, row)))
        raise ValueError(f"{whose} has no {name!r}, it has {has}; None is a missing value, [] no event")
    return row[name]


def refuse_unknown(rows: Iterable[Any], known: frozenset[str], whose: str, what: str = "column of the data") -> None:
    """ValueError for the first name in a row that is none of `known`."""
    for row in rows:
        if isinstance(row, Mapping) and not row.keys() <= known:
            unknown = shown(next(name for name in row if name not in known))
            raise ValueError(f"{whose} has {unknown}, which is no {what}; there are {', '.join(sorted(known))}")


def several(value: object) -> bool:
    """Whether a value is a list or the like."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def as_float(value: object) -> float:
    """A number, or text that is one in files, too; infinity for anything else, booleans included."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        if not TEXT.fullmatch(value.strip()):
            return math.inf
    elif isinstance(value, bool) or not isinstance(value, int | float | np.number | Decimal):
        return math.inf
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # 10**400, complex numbers, signalling NaN
        return math.inf


def vector_of(given: Any, width: int) -> np.ndarray | None:
    """[width] float64, or None for what is no such list of finite numbers that float32 holds."""
    if not several(given):
        return None
    try:
        if not isinstance(given, np.ndarray) and not {*map(type, given)} <= {float}:
            given = [as_float(each) for each in given]
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        return None
    fits = numbers.shape == (width,) and bool((np.abs(numbers) <= LARGEST).all())
    return numbers if fits else None


def seconds(value: Any, whose: str) -> int:
    """Seconds since 1970 of a number or a datetime; one without a time zone is of UTC."""
    given = value
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    a_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not a_number or not abs(value) <= LATEST // 1000:
        raise ValueError(
            f"{whose} has time={shown(given)}; it must be in seconds since 1970, up to the year 9999, e.g. 1700000000 "
            "(milliseconds are divided by 1000)"
        )
    return math.floor(value)


def equal(value: Any, other: Any) -> bool:
    if several(value) and several(other):
        return list(value) == list(other)
    return bool(value == other or (value != value and other != other))  # of missing numbers, too


def first_wrong(items: Sequence[T], work: Callable[[Sequence[T]], Any]) -> tuple[int, Exception] | None:
    """Place of the first item that `work` refuses, found by halves, and its error; None where it takes each alone."""
    error: Exception | None = None
    first, end = 0, len(items)
    while end > first and not (end - first == 1 and error):
        middle = max(first + 1, (first + end) // 2)
        try:
            work(items[first:middle])
        except WRONG as own:
            end, error = middle, own
        else:
            first, error = middle, None
    return None if error is None else (first, error)
