"""Ids in YAML files that YAML takes for other values."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.launching import ROOT
from train.config import written
from train.config.files import composed


def folder_of(tmp_path: Path, value: str, key: str) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("defaults: [events_schema, base, _self_]\nfiles: [a.csv]\n")
    (tmp_path / "data" / "base.yaml").write_text(key % value)
    return tmp_path


KEYS = [
    "histories:\n  view: {where: {zip: %s}, fields: [item]}\n",
    "histories:\n  view:\n    fields: [item]\n    where:\n      zip: [a, %s]\n",
    "data:\n  histories: {view: {where: {zip: %s}}}\n",
    "column_names: [a, %s]\n",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "value", ["01234", "1_000", "12:30", "0x1F", "0b11", "+5", "1e5", "1.50", ".5", "NO", "yes", "off"]
)
def test_ids_that_yaml_reads_as_others_are_refused(tmp_path: Path, value: str, key: str) -> None:
    folder = folder_of(tmp_path, value, key)
    with pytest.raises(
        ValueError, match=rf"base\.yaml, line \d: .* has {value.replace('+', '.')}, .*in quotes, \""
    ) as told:
        written.check([folder], {"data": "mine"})
    assert f'"{value}"' in str(told.value)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "value", ["1234", "-7", "0", "12.0", "0.25", "true", '"01234"', "'NO'", "2024-01-01", "a1", "08:x"]
)
def test_ids_that_are_what_they_look_like_are_taken(tmp_path: Path, value: str, key: str) -> None:
    written.check([folder_of(tmp_path, value, key)], {"data": "mine"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1]\n" + "".join(f"{b}: &{b} [{','.join(9 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefgh")),
         "more than 100,000 values"),
        ("a: &a [*a]\n", "more than 100,000 values"),
        ("a: " + "[" * 60 + "]" * 60, "50 levels"),
        ("a: " + "[" * 3000, "50 levels"),
        ("a: [1\n", "cannot be read as YAML: while parsing a flow sequence"),
        ("a: 1\n---\nb: 2\n", "cannot be read as YAML: expected a single document"),
    ],
)  # fmt: skip
@pytest.mark.reliability("a YAML file with endless aliases or levels", "refused by name before it is expanded")
def test_a_file_that_grows_or_is_no_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"mine\.yaml .*{message}"):
        composed(["data=mine"], tmp_path)


def test_other_keys_may_have_such_numbers(tmp_path: Path) -> None:
    written.check([folder_of(tmp_path, "1_000", "hash_rows: %s\nlog_numeric: [a]\n")], {"data": "mine"})


def test_shipped_files_are_fine() -> None:
    for file in (ROOT / "configs").glob("*/*.yaml"):
        written.check([ROOT / "configs"], {file.parent.name: file.stem})
