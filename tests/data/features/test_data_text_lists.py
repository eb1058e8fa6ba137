"""Lists and times as text, as JSON, Python, numpy, pandas and logs write them."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.events.test_data_events import rows_of
from tests.data.sources import events_config, source_of, whole
from train.config.schema import HistoryConfig
from train.data.features import columns, times
from train.data.features.columns import read_lists, read_milliseconds, read_vectors


def lists_of(texts: list[str | None], separator: str) -> list[list[str | None]]:
    lists = read_lists(pa.chunked_array([pa.array(texts, pa.string())]), separator)
    items = [None if code < 0 else lists.values[int(code)].as_py() for code in lists.codes]
    return [items[begin:end] for begin, end in zip(lists.offsets, lists.offsets[1:], strict=False)]


@pytest.mark.parametrize("separator", ["|", ",", " ", "\\", "\\1", ".*", "$"])
@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('["Clothing, Shoes & Jewelry", "Women"]', ["Clothing, Shoes & Jewelry", "Women"]),
        ("""['Clothing, Shoes', "Women's"]""", ["Clothing, Shoes", "Women's"]),
        ('["A [old]", "B"]', ["A [old]", "B"]),
        (r'["caf\u00e9", "\ud83d\ude00", "a\"b\\c"]', ["café", "😀", 'a"b\\c']),
        (r"['it\'s', '\xe9\n']", ["it's", "é\n"]),
        ("['it's', 'b']", ["it's", "b"]),
        ("[1, null, 2]", ["1", None, "2"]),
        ("[1, None, nan, NaN]", ["1", None, None, None]),
        ("['null', 'None']", ["null", "None"]),
        ("(1, 2)", ["1", "2"]),
        ("(1,)", ["1"]),
        ("{1, 2.5}", ["1", "2.5"]),
        ("{'a', 'b'}", ["a", "b"]),
        ("[1, 2,]", ["1", "2"]),
        ("[ 1.5  2\n -3 ]", ["1.5", "2", "-3"]),
        ("[1 2 3]", ["1", "2", "3"]),
        ("[nan 2. 30.]", [None, "2", "30"]),
        ("[ True False]", ["1", "0"]),
        ("""['a, b' "it's"\n 'c']""", ["a, b", "it's", "c"]),
        ("[1 None 'a b']", ["1", None, "a b"]),
        ("()", []),
        ("set()", []),
        ("[a, b c]", ["a", "b", "c"]),
        ("[]", []),
        ("[ ]", []),
        ("", []),
        (None, []),
        ("[1.0, 2]", ["1", "2"]),
        ("[True, False]", ["1", "0"]),
    ],
)
def test_lists_as_languages_write_them(text: str | None, items: list[str | None], separator: str) -> None:
    if text == "[a, b c]" and separator != " ":
        items = ["a", "b c"]
    assert lists_of([text, "x"], separator) == [items, ["x"]]


@pytest.mark.parametrize(
    ("text", "separator", "items"),
    [
        ("1|2|3|", "|", ["1", "2", "3"]),
        ("|", "|", []),
        ("1||3||", "|", ["1", None, "3"]),
        ("|1", "|", [None, "1"]),
        ("1 2  3 ", " ", ["1", "2", "3"]),
        (" a ,b", ",", ["a", "b"]),
        ("(no genres listed)", "|", ["(no genres listed)"]),
        ("a (x, y)|b", "|", ["a (x, y)", "b"]),
        ("{a} b|[c", "|", ["{a} b", "[c"]),
        ("[x],[y]", ",", ["[x]", "[y]"]),
        ("[a|b]", "|", ["a", "b"]),
        ("null|b", "|", ["null", "b"]),
    ],
)
def test_lists_that_a_separator_joins(text: str, separator: str, items: list[str | None]) -> None:
    assert lists_of([text], separator) == [items]


@pytest.mark.parametrize(
    "text", ["[[1, 2], [3]]", '{"a": 1}', "{'a': .5, 'b': 1}", '{"a":1}', '[{"a": 1}]', "([1], 2)"]
)
def test_lists_of_lists_and_mappings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is a list of lists or a mapping, expected a list of single values"):
        lists_of(["[1]", text], "|")


@pytest.mark.parametrize("items", [range(2000), "ab" * 1000])
def test_lists_that_numpy_shortens_are_refused(items: Sequence[object]) -> None:
    array = np.array(list(items))
    for text in (str(array), np.array2string(array, separator=", ")):
        with pytest.raises(ValueError, match=r"has \.\.\. in place of items"):
            lists_of(["[1]", text], "|")
    assert lists_of(["1|...", '["..."]'], "|") == [["1", "..."], ["..."]]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read(seed: int) -> None:
    draw = random.Random(seed)
    parts = ["a", "B", "1", ",", "|", " x", "é", "\\", '"', "'", "[", "]", "\n", "(", "}", "😀", "\t"]
    lists = [
        ["x" + "".join(draw.choices(parts, k=draw.randrange(4))).strip() for _ in range(draw.randrange(1, 5))]
        for _ in range(40)
    ]
    for write in (json.dumps, repr, lambda each: json.dumps(each, ensure_ascii=False)):
        texts = [write(each) for each in lists]
        for portion in (1 << 30, 60):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(columns, "MOST_TEXT", portion)
                assert lists_of(texts, "|") == lists, texts


def test_a_column_of_lists_beyond_what_an_array_holds_is_read_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's arrays of text have offsets of 32 bits."""
    monkeypatch.setattr(columns, "MOST_TEXT", 50)
    texts = [f"{i}|x{i % 3}" for i in range(200)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.chunked_array([pa.array(texts[:90]).cast(kind), pa.array(texts[90:]).cast(kind)])
        lists = read_lists(column, "|")
        assert [lists.values[int(code)].as_py() for code in lists.codes] == "|".join(texts).split("|")
        vectors, offsets = read_vectors(column, "|")
        assert (vectors[::2].tolist(), offsets[-1]) == (list(map(float, range(200))), 400)


def test_vectors_as_languages_write_them() -> None:
    texts = ["[0.5, -1]", "[ 0.5 -1. ]", "(0.5, -1)", "0.5|-1", "0.5|-1|", "[0.5, null]", "[0.5, x]", "", None]
    values, offsets = read_vectors(pa.chunked_array([pa.array(texts)]), "|")
    assert np.diff(offsets).tolist() == [2] * 7 + [0, 0]
    np.testing.assert_array_equal(values, [0.5, -1] * 5 + [0.5, np.nan] * 2)


@pytest.mark.parametrize(
    ("item", "brand", "expected"),
    [
        ("1|2|3|", "a|b|c|", [(1, "a"), (2, "b"), (3, "c")]),
        ("1|2|3", "a|b|", [(1, "a"), (2, "b"), (3, None)]),
        ("1|2|3|", "a|b||", [(1, "a"), (2, "b"), (3, None)]),
        ("1|2|", "a|b|c", [(1, "a"), (2, "b"), (None, "c")]),
        ("|", "|", []),
        ("1", "", [(1, None)]),
        ("1", None, [(1, None)]),
        ("1|2", "a", None),
        ("1|2|3", "a|", None),
    ],
)
def test_separators_at_the_end_of_aligned_lists(
    tmp_path: Path, item: str, brand: str | None, expected: list | None
) -> None:
    """They end a list, unless another field has an event there; what cannot be is not aligned."""
    known = {"item": ["1|2|3", "1|2|3"], "brand": ["a|b|c", "a|b|c"]}
    rows = {"user": [1, 2, 3], "time": [1000, 2000, 3000], "click": [0, 1, 1], "other": [1, 1, 1]}
    rows |= {"item": [*known["item"], item], "brand": [*known["brand"], brand]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    config = events_config(
        tmp_path,
        candidate_categorical=["other"],
        histories={"past": HistoryConfig(["item", "brand"], lists=True)},
        split=[1.0, 0.0, 0.0],
    )
    if expected is None:
        with pytest.raises(ValueError, match=r"row 3: column '\w+' is .*expected as many items as"):
            source_of(config)
        return
    batch = whole(source_of(config))
    past = [rows_of(batch.histories, f"past.{name}") for name in ("item", "brand")]
    words = [{"1": 1, "2": 2, "3": 3}, {"a": 1, "b": 2, "c": 3}]
    wanted = [[words[at].get(str(event[at]), 0) for event in expected] for at in (0, 1)]
    assert [each[2] for each in past] == wanted


FORMATS = ["%Y-%m-%d %H:%M:%S", "%d/%m/%y %H:%M:%S", "%Y%m%d%H%M%S", "%d %b %Y %I:%M:%S %p", "%F %T", "%B %d, %Y"]


@pytest.mark.parametrize("time_format", [*FORMATS, "%Y-%m-%dT%H:%M:%S%z", "%a, %d %b %Y %H:%M:%S %z"])
@pytest.mark.parametrize("seed", [0, 1])
def test_times_are_those_of_python_and_impossible_days_are_bad(time_format: str, seed: int) -> None:
    draw = random.Random(seed)
    zones = [datetime.timezone(datetime.timedelta(minutes=draw.choice([0, 330, -480, 840]))) for _ in range(300)]
    moments = [datetime.datetime.fromtimestamp(draw.randrange(2**31), zone).replace(microsecond=0) for zone in zones]
    python = time_format.replace("%F", "%Y-%m-%d").replace("%T", "%H:%M:%S")
    texts = [moment.strftime(python) for moment in moments]
    wanted = [datetime.datetime.strptime(text, python) for text in texts]
    wanted = [each if each.tzinfo else each.replace(tzinfo=datetime.UTC) for each in wanted]
    read, bad = read_milliseconds(pa.chunked_array([texts]), time_format)
    assert not bad.any()
    assert (read // 1000).tolist() == [int(each.timestamp()) for each in wanted]
    start = datetime.datetime(2023, 2, 28, 23, 30, tzinfo=zones[0])
    for year, month, day in ((2023, 2, 29), (2024, 2, 30), (2023, 2, 31), (2023, 4, 31), (2023, 11, 31)):
        parts = {"%Y": f"{year}", "%y": f"{year % 100}", "%m": f"{month:02}", "%d": f"{day}"}
        names = {"%b": start.replace(month=month).strftime("%b"), "%B": start.replace(month=month).strftime("%B")}
        pattern = python
        for directive, text in (parts | names).items():
            pattern = pattern.replace(directive, text)
        assert read_milliseconds(pa.chunked_array([[start.strftime(pattern)]]), time_format)[1].all(), pattern


@pytest.mark.parametrize("directive", ["%Z", "%G", "%V", "%c", "%x", "%U", "%s", "%Q", "%", "%-d", "%f"])
def test_directives_that_would_be_passed_over_are_named(directive: str) -> None:
    assert times.unknown_directive(f"%Y-%m-%d {directive}") == directive[:2]
    assert times.unknown_directive("%Y-%m-%d %H:%M:%S.%f %z 100%%") is None
