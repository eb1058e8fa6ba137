"""The text of an id: one for a value, whichever file, table, request or Python type it comes in.

12, 12.0, "12", Decimal("12.00") and b"12" are one id, and so are true, "True" and 1, and 1e16 and "1e+16". Nothing,
NaN and empty text are missing. Numbers that float32 holds are written with its digits, so that .1 is "0.1" in both
widths.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BOOLEANS = (("1", pa.array(["True", "true", "TRUE"])), ("0", pa.array(["False", "false", "FALSE"])))
"""Digits of truth values, and the texts that stand for them."""
FLOAT = r"^-?\d(\.\d+[eE]\+?|[eE]\+)\d{1,2}$"
"""How pandas, Spark and Arrow write large floats to CSV: 1.2345678901234568e+18, 1.2345678E7."""
CONTROL = r"[\x00-\x1f\x7f-\x9f]"
"""No character of a text: bytes that have one are a hash or a number, also where they happen to be UTF-8."""


def texts(values: pa.Array) -> pa.StringArray:
    """The ids of an array of scalars, null where one is missing. ValueError for a type that is no id."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return pa.array([each and str(uuid.UUID(bytes=each)) for each in values.storage.to_pylist()], pa.string())
        return texts(values.storage)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return (values.cast(pa.int8()) if pa.types.is_boolean(kind) else values).cast(pa.string())
    if pa.types.is_floating(kind):
        return _of_floats(values)
    if pa.types.is_decimal(kind) and kind.scale:
        return pa.array([None if each is None else _of_decimal(each) for each in values.to_pylist()], pa.string())
    if pa.types.is_duration(kind):
        return values.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.string())
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        if pa.types.is_timestamp(kind):
            values = values.cast(pa.timestamp(kind.unit))  # in UTC
        whole = pc.replace_substring_regex(values.cast(pa.string()), r"\.0+$", "")
        return pc.replace_substring_regex(whole, r"(\.\d*[1-9])0+$", r"\1")
    try:
        made = _of_binary(values) if _is_binary(kind) else values.cast(pa.string())
    except pa.ArrowNotImplementedError:
        raise ValueError(f"it is {kind}, expected one number or text a row") from None
    made = pc.replace_substring_regex(made, r"^(-?\d+)\.0+$", r"\1")
    if pc.any(floats := pc.match_substring_regex(made, FLOAT)).as_py():
        numbers = pc.if_else(floats, made, pa.scalar(None, pa.string())).cast(pa.float64())
        made = pc.coalesce(_of_floats(numbers), made)
    made = pc.if_else(pc.equal(made, "-0"), "0", made)
    return booleans_as_digits(pc.if_else(pc.equal(made, ""), pa.scalar(None, pa.string()), made))


def texts_of(values: Sequence[Any]) -> pa.StringArray:
    """`texts` of Python's and numpy's values. TypeError for a list or another object, which is no id."""
    made: list[str | None] = [None] * len(values)
    groups: dict[pa.DataType | None, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, str):
            made[place] = value
        elif type(value) is int or isinstance(value, np.integer):
            made[place] = str(int(value))
        elif value is not None:
            kind = next((kind for types, kind, _ in KINDS if isinstance(value, types)), None)
            if kind is None:
                raise TypeError(f"{type(value).__name__} is no id")
            groups.setdefault(kind, []).append(place)
    for kind, places in groups.items():
        plain = next(plain for _, each, plain in KINDS if each is kind)
        found = texts(pa.array([plain(values[place]) for place in places], kind)).to_pylist()
        for place, text in zip(places, found, strict=True):
            made[place] = text
    return texts(pa.array(made, pa.string()))


def booleans_as_digits(made: pa.StringArray) -> pa.StringArray:
    for digit, spellings in BOOLEANS:
        made = pc.if_else(pc.is_in(made, value_set=spellings), digit, made)
    return made


def _in_utc(value: Any) -> datetime.datetime:
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]").item()
    return value.astimezone(datetime.UTC).replace(tzinfo=None) if value and value.tzinfo else value


KINDS: tuple[tuple[tuple[type, ...], pa.DataType, Callable[[Any], Any]], ...] = (
    ((bool, np.bool_), pa.bool_(), bool),
    ((float, np.floating), pa.float64(), float),
    ((bytes,), pa.binary(), bytes),
    ((datetime.datetime, np.datetime64), pa.timestamp("us"), _in_utc),
    ((datetime.date,), pa.date32(), lambda value: value),
    ((datetime.time,), pa.time64("us"), lambda value: value),
    ((datetime.timedelta,), pa.duration("us"), lambda value: value),
    ((decimal.Decimal, uuid.UUID), pa.string(), lambda v: str(v) if isinstance(v, uuid.UUID) else _of_decimal(v)),
)
"""Types of scalars, the Arrow type that holds them, and how they get there."""


def _of_floats(values: pa.Array) -> pa.StringArray:
    values = values.cast(pa.float64())
    missing = pa.scalar(None, pa.float64())
    values = pc.if_else(pc.is_nan(values), missing, values)
    # Arrow writes 12345678901.0 as 1.2345678901e+10.
    whole = pc.equal(values, pc.trunc(values))
    small, large = (pc.and_(whole, pc.less(pc.abs(values), bound)) for bound in (2.0**63, 2.0**64))
    large = pc.and_(large, pc.greater(values, 0))
    narrow = values.cast(pa.float32(), safe=False)
    held = pc.if_else(pc.equal(narrow.cast(pa.float64()), values), narrow, pa.scalar(None, pa.float32()))
    return pc.coalesce(
        pc.if_else(small, values, missing).cast(pa.int64()).cast(pa.string()),
        pc.if_else(large, values, missing).cast(pa.uint64()).cast(pa.string()),
        held.cast(pa.string()),
        values.cast(pa.string()),
    )


def _of_decimal(value: decimal.Decimal) -> str:
    if not value.is_finite():
        return "" if value.is_nan() else str(float(value))
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _is_binary(kind: pa.DataType) -> bool:
    return any(is_one(kind) for is_one in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary))


def _of_binary(values: pa.Array) -> pa.StringArray:
    """Bytes that are text as that text, others as hexadecimal digits."""
    try:
        made = values.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        made = None
    if made is not None and not pc.any(pc.match_substring_regex(made, CONTROL)).as_py():
        return made
    return pa.array([None if each is None else _of_bytes(each) for each in values.to_pylist()], pa.string())


def _of_bytes(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return value.hex() if re.search(CONTROL, text) else text
