"""Ids as text, lists, numbers and times out of Arrow columns, and their way to table rows."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.data.features.columns import (
    Coded,
    coded_integers,
    read_ids,
    read_lists,
    read_milliseconds,
    read_numbers,
    read_time_lists,
    time_format_of,
)
from train.data.features.vocabulary import Hashing, Vocabulary, hash_texts, occurrences


def column(values, kind=None) -> pa.ChunkedArray:
    """In two chunks, since files arrive in pieces."""
    whole, middle = pa.array(values, kind), len(values) // 2
    return pa.chunked_array([whole[:middle], whole[middle:]])


def texts(ids: Coded) -> list[str | None]:
    return [None if code < 0 else ids.values[code].as_py() for code in ids.codes]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([12, None, 7, 12345678901], pa.int64()),
        ([12.0, float("nan"), 7.0, 12345678901.0], pa.float64()),
        (["12", "", "7", "12345678901.0"], pa.string()),
        (["12", None, "7", "12345678901"], pa.dictionary(pa.int32(), pa.string())),
        (["12", None, "7", "12345678901"], pa.large_string()),
    ],
    ids=["int", "float", "text", "dictionary", "large text"],
)
def test_ids_are_the_same_in_every_type(values, kind):
    assert texts(read_ids(column(values, kind))) == ["12", None, "7", "12345678901"]


def test_a_column_of_nothing_is_missing_everywhere():
    nothing = column([None, None, None], pa.null())
    assert texts(read_ids(nothing)) == [None] * 3
    assert read_lists(nothing, "|").offsets.tolist() == [0] * 4
    numbers, bad = read_numbers(nothing)
    assert np.isnan(numbers).all()
    assert not bad.any()


def test_other_id_types():
    assert texts(read_ids(column([True, False, None], pa.bool_()))) == ["1", "0", None]
    assert texts(read_ids(column(["True", "false", "", "Truest"]))) == ["1", "0", None, "Truest"]
    assert texts(read_ids(column([2**63 + 1, 5], pa.uint64()))) == [str(2**63 + 1), "5"]
    assert texts(read_ids(column([0.5, -2.0, 1e300, None], pa.float64()))) == ["0.5", "-2", "1e+300", None]
    assert texts(read_ids(column([0.5, 2.0, float("nan")], pa.float16()))) == ["0.5", "2", None]
    assert texts(read_ids(column(["-1", "1.50", "007", "1.00"]))) == ["-1", "1.50", "007", "1"]
    assert read_ids(column([], pa.string())).codes.size == 0


def test_ids_that_match():
    ids = read_ids(column([1, 2, None, 3]))
    assert ids.isin([1, "3"]).tolist() == [True, False, False, True]
    assert ids.isin([None, 2.0]).tolist() == [False, True, True, False]
    assert read_ids(column([True, False])).isin([True]).tolist() == [True, False]
    assert read_ids(column(["True", "False"])).isin([True]).tolist() == [True, False]


def test_take_turns_minus_one_into_missing():
    assert texts(coded_integers(np.array([5, 9])).take(np.array([1, -1, 0]))) == ["9", None, "5"]
    lists = read_lists(column([[1, 2], None, [3]], pa.list_(pa.int64())), "|")
    taken = lists.take(np.array([2, -1, 0, 0]))
    assert taken.offsets.tolist() == [0, 1, 1, 3, 5]
    assert [lists.values[c].as_py() for c in taken.codes] == ["3", "1", "2", "1", "2"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[1, 2], [], None, [2]], pa.list_(pa.int32())),
        ([[1, 2], [], None, [2]], pa.large_list(pa.int64())),
        (["1^2", "", None, "2"], pa.string()),
        (["1^2", "", None, "2"], pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=["list", "large list", "text", "dictionary"],
)
def test_lists_are_the_same_in_every_type(values, kind):
    lists = read_lists(column(values, kind), "^")
    assert lists.offsets.tolist() == [0, 2, 2, 2, 3]
    assert [lists.values[c].as_py() for c in lists.codes] == ["1", "2", "2"]


def test_lists_in_text_as_pandas_and_json_write_them():
    ids = read_lists(column(["[1, 2]", "['a', \"b\"]", "[]", " a ,b", "[x],[y]"]), ",")
    items = [ids.values[code].as_py() for code in ids.codes]
    assert items == ["1", "2", "a", "b", "a", "b", "[x]", "[y]"]
    assert np.diff(ids.offsets).tolist() == [2, 2, 0, 2, 2]
    ids = read_lists(column(["[\"women's\", '5\" pipe']", "it's"]), ",")
    assert [ids.values[code].as_py() for code in ids.codes] == ["women's", '5" pipe', "it's"]
    times, bad, offsets = read_time_lists(column(["[5, 7]", "6"]), ",", "s")
    assert (times.tolist(), bad.any(), offsets.tolist()) == ([5000, 7000, 6000], False, [0, 2, 3])


def test_numbers():
    numbers, bad = read_numbers(column(["1", "-2.5e1", " .5", "", None, "x", "nan", "inf", "1e999"]))
    np.testing.assert_array_equal(numbers[:5], [1, -25, 0.5, np.nan, np.nan])
    assert bad.tolist() == [False] * 5 + [True] * 4
    numbers, bad = read_numbers(column(["True", "false", "TRUE", "yes"]))
    assert (numbers[:3].tolist(), bad.tolist()) == ([1, 0, 1], [False] * 3 + [True])
    numbers, bad = read_numbers(column([1, None, 3], pa.int32()))
    np.testing.assert_array_equal(numbers, [1, np.nan, 3])
    assert not bad.any()
    _, bad = read_numbers(column([1.0, None, float("nan"), float("-inf")]))
    assert bad.tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.timestamp("s")])
def test_numbers_of_another_type_are_an_error(kind):
    with pytest.raises(ValueError, match="expected numbers"):
        read_numbers(pa.chunked_array([], kind))


def test_times():
    def read(values, time_format, kind=None):
        times, bad = read_milliseconds(column(values, kind), time_format)
        return [None if b else t for t, b in zip(times.tolist(), bad.tolist(), strict=True)]

    assert read([5, None], "s") == [5000, None]
    assert read(["5", "x"], "ms") == [5, None]
    assert read([-1500], "ms") == [-1500]
    # Milliseconds read as seconds, and nanoseconds read as either, of which some do not fit in an int64.
    assert read([1_700_000_000, 1_700_000_000_000, 1_700_000_000_000_000_000], "s") == [1_700_000_000_000, None, None]
    assert read([1_700_000_000_000, 1_700_000_000_000_000_000], "ms") == [1_700_000_000_000, None]
    assert read(["14102105", "tomorrow"], "%y%m%d%H") == [1413867600000, None]
    assert read([14102105, None], "%y%m%d%H") == [1413867600000, None]
    assert read(["1970-01-02T00:00:01.987Z", "1970-01-02T00:00:01Z"], "%Y-%m-%dT%H:%M:%S.%fZ") == [86401000] * 2
    assert read(["1970.01.02 00:00:01.5"], "%Y.%m.%d %H:%M:%S.%f") == [86401000]
    moment = datetime.datetime(1970, 1, 2, 0, 0, 1)
    assert read([moment, None], "s", pa.timestamp("us")) == [86401000, None]
    assert read([moment.date(), None], "s", pa.date32()) == [86400000, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-03-01 00:00:47", "%Y-%m-%d %H:%M:%S"),
        ("2024-03-01T00:00:47.25Z", "%Y-%m-%dT%H:%M:%S.%fZ"),
        ("2024/03/01", "%Y/%m/%d"),
        ("1709251247", "s"),
        ("1709251247000", "ms"),
        ("soon", None),
        ("", None),
    ],
)
def test_a_usual_time_format_is_found(text, expected):
    assert time_format_of(text) == expected


def test_vocabulary_knows_training_ids_only(tmp_path):
    ids = read_ids(column(["b", "a", "c", "a", None, "z"]))
    training = np.array([True, True, True, True, True, False])
    vocabulary = Vocabulary([("item", ids.values, occurrences(ids, training))], min_count={"item": 1})
    assert vocabulary.size("item") == 4
    assert vocabulary.ids("item", ids).tolist() == [2, 1, 3, 1, 0, 0]
    rare = Vocabulary([("item", ids.values, occurrences(ids, training))], min_count={"item": 2})
    assert rare.ids("item", ids).tolist() == [0, 1, 0, 1, 0, 0]
    vocabulary.save(tmp_path / "vocabulary")
    saved = pq.read_table(tmp_path / "vocabulary" / "item.parquet").to_pydict()
    assert saved == {"row": [1, 2, 3], "value": ["a", "b", "c"], "count": [2, 1, 1]}


def test_columns_of_one_table_share_its_rows():
    left, right = read_ids(column([1, 2])), read_ids(column(["3", "2"]))
    vocabulary = Vocabulary([("item", side.values, occurrences(side)) for side in (left, right)], min_count={"item": 1})
    assert vocabulary.ids("item", left).tolist() == [1, 2]
    assert vocabulary.ids("item", right).tolist() == [3, 2]


def test_hashing_needs_no_vocabulary_and_keeps_the_unknown_row():
    values = [str(i) for i in range(2000)] + [None]
    ids = Hashing(101).ids("item", read_ids(column(values)))
    assert ids[-1] == 0
    assert (ids[:-1].min(), ids.max()) == (1, 100)
    # 2,000 ids over 100 rows: 20 a row, standard deviation 4.5; ten of those is no accident.
    assert np.abs(np.bincount(ids[:-1])[1:] - 20).max() < 45
    assert Hashing(101).ids("item", read_ids(column([7, 12]))).tolist() == [ids[7], ids[12]]
    with pytest.raises(ValueError, match=r"data\.hash_rows=1"):
        Hashing(1)


def test_hash_of_texts_depends_on_every_byte_and_on_nothing_else():
    words = pa.array(["", "a", "b", "ab", "ba", "aa", "aab", "\u00e9"])
    hashes = hash_texts(words)
    assert len(set(hashes.tolist())) == len(words)
    assert hash_texts(words[3:6]).tolist() == hashes[3:6].tolist()
    assert hash_texts(pa.array([""])).tolist() == hashes[:1].tolist()
    # Pinned: tables trained with hashed ids are read back by them.
    assert hashes[1] == 17189161910051005891
