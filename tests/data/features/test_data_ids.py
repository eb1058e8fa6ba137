"""An id is one text, whichever type it has: in Arrow columns of files, and as Python and JSON hand it over."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.features.columns import Coded, read_ids
from train.data.features.ids import texts_of
from train.data.features.transforms import texts_as_ids


def texts(ids: Coded) -> list[str | None]:
    return [None if code < 0 else ids.values[code].as_py() for code in ids.codes]


def decimals(digits: int, places: int) -> st.SearchStrategy[decimal.Decimal]:
    most = 10**digits - 1
    return st.integers(-most, most).map(lambda n: decimal.Decimal(n).scaleb(-places, decimal.Context(prec=80)))


MOMENTS = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))  # that 64 bits of nanoseconds hold
WHOLE = MOMENTS.map(lambda moment: moment.replace(microsecond=0))
MILLIS = MOMENTS.map(lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000))
IN_UTC = MOMENTS.map(lambda moment: moment.replace(tzinfo=datetime.UTC))
SPANS = st.integers(-(10**12), 10**12).map(lambda seconds: datetime.timedelta(seconds=seconds))
HUNDREDTHS = st.integers(-(10**6), 10**6).map(lambda number: number / 100)
# Few letters, so that numbers, truth values and empty text come up; and any text.
TEXT = st.one_of(st.text("0123.-eTruefals ", max_size=6), st.text(), st.sampled_from(["True", "false", "12.0", "nan"]))
BYTES = st.one_of(st.binary(max_size=20), TEXT.map(str.encode))
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((kind, st.integers(-(2**7), 2**7 - 1)) for kind in (pa.int8(), pa.int16(), pa.int32())),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.floats(width=16)),
    (pa.float32(), st.one_of(st.floats(width=32), HUNDREDTHS.map(np.float32).map(float))),
    (pa.float64(), st.one_of(st.floats(), st.integers(-(2**70), 2**70).map(float), HUNDREDTHS)),
    (pa.bool_(), st.booleans()),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), BYTES),
    (pa.large_binary(), BYTES),
    (pa.binary(16), st.binary(min_size=16, max_size=16)),
    (pa.binary(2), st.sampled_from([b"de", b"fr", b"\x00\xff"])),
    (pa.uuid(), st.uuids().map(lambda each: each.bytes)),
    (pa.decimal128(20, 0), decimals(20, 0)),
    (pa.decimal128(12, 4), decimals(12, 4)),
    (pa.decimal128(12, 12), decimals(12, 12)),
    (pa.decimal256(50, 3), decimals(50, 3)),
    (pa.timestamp("s"), WHOLE),
    (pa.timestamp("ms"), MILLIS),
    (pa.timestamp("us"), MOMENTS),
    (pa.timestamp("ns"), MOMENTS),
    (pa.timestamp("us", "UTC"), IN_UTC),
    (pa.timestamp("us", "Asia/Kolkata"), IN_UTC),
    (pa.date32(), st.dates()),
    (pa.date64(), st.dates()),
    (pa.time32("s"), st.times().map(lambda time: time.replace(microsecond=0))),
    (pa.time64("ns"), st.times()),
    (pa.duration("s"), SPANS),
    (pa.duration("ms"), SPANS),
    (pa.dictionary(pa.int32(), pa.string()), TEXT),
    (pa.dictionary(pa.int8(), pa.float64()), st.floats()),
    (pa.dictionary(pa.int8(), pa.binary()), BYTES),
    (pa.null(), st.none()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
@settings(deadline=None, max_examples=30, derandomize=True)
@given(data=st.data())
def test_a_column_and_its_values_are_the_same_ids(
    kind: pa.DataType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """Of every type that a column can have: as a file is read, and as a request has it after `to_pylist`."""
    given_values = data.draw(st.lists(st.one_of(st.none(), values), max_size=8))
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.ExtensionArray.from_storage(kind, pa.array(given_values, kind.storage_type))
    elif pa.types.is_dictionary(kind):
        column = pa.array(given_values, kind.value_type).dictionary_encode().cast(kind)
    else:
        column = pa.array(given_values, kind)
    middle = len(column) // 2
    expected = texts(read_ids(pa.chunked_array([column[:middle], column[middle:]], column.type)))
    asked = column.to_pylist()
    assert texts_of(asked).to_pylist() == texts(texts_as_ids(asked)) == expected
    # A client of a server sends text and numbers; what JSON cannot say, bytes and times, it sends as the id's text.
    spoken = [v if isinstance(v, bool | int | float | str | None) else t for v, t in zip(asked, expected, strict=True)]
    assert texts(texts_as_ids(json.loads(json.dumps(spoken)))) == expected
    assert texts(texts_as_ids(expected)) == expected
    if pa.types.is_float64(kind):  # as pandas and Arrow write a column to CSV
        assert (
            texts(
                texts_as_ids(
                    [
                        None if v is None else repr(v) if abs(v) > 1e15 else t
                        for v, t in zip(asked, expected, strict=True)
                    ]
                )
            )
            == expected
        )


@pytest.mark.parametrize(
    ("same", "text"),
    [
        ((12, 12.0, "12", "12.0", np.float32(12), np.int8(12), decimal.Decimal("12.00"), b"12"), "12"),
        ((10**16, 1e16, np.float64(1e16), "10000000000000000", "1e+16", "1.0E16"), "10000000000000000"),
        (("1.2345678901234568e+18", 1.2345678901234568e18, b"1.2345678901234568E18"), "1234567890123456768"),
        (("1e16",), "1e16"),
        (("12E5", b"12E5"), "12E5"),  # an article number
        ((2**63, float(2**63), np.uint64(2**63)), str(2**63)),
        ((0.1, np.float32(0.1), "0.1", decimal.Decimal("0.10"), b"0.1"), "0.1"),
        ((1e-5, np.float32(1e-5), np.float64(1e-5)), "0.00001"),
        ((True, "True", "true", 1, np.True_, 1.0), "1"),
        ((None, "", float("nan"), np.float32("nan"), b"", np.datetime64("NaT")), None),
        ((0.0, -0.0, decimal.Decimal("-0.0"), "0", "-0.0", False), "0"),
        ((b"\xff\x00", "ff00"), "ff00"),
        ((uuid.UUID(int=1), str(uuid.UUID(int=1))), "00000000-0000-0000-0000-000000000001"),
        (
            (
                datetime.datetime(2024, 1, 2, 3, 4, 5),
                datetime.datetime(2024, 1, 2, 4, 4, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
                np.datetime64("2024-01-02T03:04:05", "ns"),
                "2024-01-02 03:04:05",
            ),
            "2024-01-02 03:04:05",
        ),
        ((datetime.date(2024, 1, 2), "2024-01-02"), "2024-01-02"),
    ],
    ids=lambda each: str(each) if isinstance(each, str | None) else "",
)
def test_one_id_in_all_its_types(same: tuple[Any, ...], text: str | None) -> None:
    assert texts_of(same).to_pylist() == [text] * len(same)


@pytest.mark.parametrize("value", [["2"], {"a": 1}, (1, 2), {1}, object(), 1j])
def test_other_objects_are_no_ids(value: object) -> None:
    with pytest.raises(TypeError, match="is no id"):
        texts_of(["3", value])


def test_ids_of_16_bytes_come_out_of_a_file(tmp_path) -> None:
    given_ids = [uuid.UUID(int=2**127 + n) for n in (5, 7, 5)]
    storage = pa.array([each.bytes for each in given_ids], pa.binary(16))
    table = pa.table({"uuid": pa.ExtensionArray.from_storage(pa.uuid(), storage), "md5": storage})
    pq.write_table(table, tmp_path / "ids.parquet")
    read = pq.read_table(tmp_path / "ids.parquet")
    assert texts(read_ids(read["uuid"])) == [str(each) for each in given_ids]
    assert texts(read_ids(read["md5"])) == [each.hex for each in given_ids]
