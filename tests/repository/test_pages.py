"""Pages and pictures that scripts write are those that the scripts would write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pictures, reliability


def test_pages_and_pictures_are_current() -> None:
    for path, text in {pictures.FILE: pictures.speed().svg(), reliability.PAGE: reliability.page()}.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python tools/reliability.py, tools/pictures.py"


def test_marks_become_rows_in_order(tmp_path: Path) -> None:
    (tmp_path / "test_b.py").write_text("@pytest.mark.reliability('c', 'd')\ndef test_second(): pass\n")
    mark = "@pytest.mark.parametrize('x', [1])\n@pytest.mark.reliability('a', 'b1 '\n 'b2')\n"
    (tmp_path / "test_a.py").write_text(f"{mark}def test_first(): pass\ndef test_unmarked(): pass\n")
    rows = reliability.table(tmp_path).splitlines()[2:]
    assert rows == ["| a | b1 b2 | `test_a.py::test_first` |", "| c | d | `test_b.py::test_second` |"]


@pytest.mark.parametrize("texts", ["'a'", "'a', name", "'a', 'b', 'c'", "'a', holds='b'"])
def test_a_mark_without_two_texts_is_refused(texts: str, tmp_path: Path) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(f"@pytest.mark.reliability({texts})\ndef test_first(): pass\n")
    with pytest.raises(ValueError, match="test_a.py::test_first: .* takes two texts"):
        list(reliability.rows(path))
