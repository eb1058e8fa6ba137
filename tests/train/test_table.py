"""Tables handed over in Python train as their files do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.launching import ROOT
from train.commands.table import fit
from train.data.storage.tables import as_plain, keep_table


class Stream:
    """What Polars and pandas hand over: an Arrow stream and nothing else."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def test_equal_tables_are_one_file_of_plain_types(tmp_path: Path) -> None:
    columns = {"user": [1, 2], "item": ["a", None], "tags": [["x"], []]}
    plain = pa.table(columns)
    viewed = plain.set_column(1, "item", plain["item"].cast(pa.string_view()))
    kept = keep_table(Stream(viewed), tmp_path)
    stamp = kept.stat().st_mtime_ns
    assert keep_table(Stream(viewed), tmp_path) == kept
    assert kept.stat().st_mtime_ns == stamp
    assert pq.read_table(kept).to_pydict() == columns
    assert pa.types.is_large_string(pq.read_schema(kept).field("item").type)
    assert pq.read_table(keep_table(columns, tmp_path)).to_pydict() == columns
    assert keep_table(columns | {"user": [1, 3]}, tmp_path) != kept
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match="a builtins.list is no table; give a DataFrame"):
        keep_table([{"user": 1}], tmp_path)
    with pytest.raises(ValueError, match=r"the table has no rows; its columns are \['user'"):
        keep_table(plain.slice(0, 0), tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({1: [1]}, "column 1 must have a text as its name"),
        ({"user": "abc"}, "column 'user' must have .* a list or an array of values"),
        ({"user": 5}, "column 'user': "),
        ({"user": None}, "column 'user': "),
        ({"user": ["a", 1]}, "column 'user': Expected bytes, got a 'int' object; give values of one type"),
        ({"user": [10**30]}, "column 'user': .* too large"),
        ({"user": ["\ud800"]}, "column 'user': .* surrogates not allowed"),
        ({"user": np.zeros((2, 2))}, "column 'user': only handle 1-dimensional arrays"),
        ({"user": np.array([1j])}, "column 'user': Unsupported numpy type"),
        (Stream(pa.Table.from_arrays([[1], [2]], ["user", "user"])), "more than one column 'user'"),
        (Stream(pa.table({"of": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})), "a type that no file holds"),
    ],
)
def test_a_column_that_is_none_is_named(table: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        keep_table(table, tmp_path)
    assert not list(tmp_path.iterdir())


LISTS = [[3], None, [], [1, 2, None], [9] * 4, None, [5]]
WORDS = [each and [None if item is None else f"w{item}" for item in each] for each in LISTS]
VIEWS = {
    "scattered": pa.ListViewArray.from_arrays([3, 0, 1], [2, 1, 2], pa.array([10, 11, 12, 13, 14])),
    **{f"{of.__name__} {kind}": pa.array(values, of(kind))
        for of in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
        for kind, values in ((pa.int64(), LISTS), (pa.string_view(), WORDS), (pa.binary_view(), WORDS))},
    "text": pa.array(["a", None, ""], pa.string_view()),
    "runs": pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None])),
    **{f"dictionary of {kind}": pa.array([3, None, 5, 3], kind).dictionary_encode()
        for kind in (pa.int64(), pa.float64(), pa.timestamp("ms"), pa.decimal128(5, 2))},
    **{str(kind): pa.array([3, None], kind) for kind in (pa.decimal32(5, 2), pa.decimal64(12, 0))},
}  # fmt: skip


@pytest.mark.parametrize("array", VIEWS.values(), ids=VIEWS)
def test_plain_types_hold_what_views_do(array: pa.Array, tmp_path: Path) -> None:
    expected = [*array.to_pylist(), *array[1:].to_pylist()]
    column = pa.chunked_array([array, array[1:]])
    assert as_plain(column).to_pylist() == expected
    as_plain(column).validate(full=True)
    assert not any(is_it(as_plain(column).type) for is_it in (pa.types.is_dictionary, pa.types.is_decimal32))
    columns = pa.table({"user": list(range(len(column))), "item": column})
    assert pq.read_table(keep_table(Stream(columns), tmp_path))["item"].to_pylist() == expected


def example() -> str:
    """The Python of the page that shows it."""
    text = (ROOT / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```python\n(from train\.commands\.table import fit\n.*?)```", text, re.DOTALL)
    return block


def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    size = 300
    frame = Stream(
        pa.table(
            {
                "user_id": generator.integers(20, size=size),
                "item_id": generator.integers(30, size=size),
                "time": np.arange(size) * 100,
                "clicked": generator.integers(2, size=size),
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    small = (
        "data.num_workers=0",
        "runtime.device=cpu",
        "model.dim=8",
        "tracking.tensorboard=false",
    )

    def fewer(*arguments, **settings):
        return fit(*arguments, *small, **settings)

    with mock.patch("train.record.plots.plot_run"), mock.patch("train.commands.table.fit", fewer):
        names = {"frame": frame}
        exec(example(), names)
    assert names["results"]["test"]["click/examples"] == 30
    assert (tmp_path / "runs" / "clicks" / "results.json").exists()
    with pytest.raises(ValueError, match=r"data\.usr is no key of the configuration; did you mean data\.user\?"):
        fit(frame, run_dir=tmp_path / "other", usr="x")
    with pytest.raises(ValueError, match=r"files=\['a'\] has rows of its own; give them as table"):
        fit(frame, run_dir=tmp_path / "other", files=["a"])
