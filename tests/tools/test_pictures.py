"""The drawings of the documentation."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.pictures import FOLDER, PICTURES


def test_committed_pictures_are_those_that_the_script_draws() -> None:
    assert {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")} == {
        name: draw().svg() for name, draw in PICTURES.items()
    }


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_whole(name: str) -> None:
    root = ElementTree.fromstring(PICTURES[name]().svg())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = [part for part in root.iter() if part.tag.endswith("rect")]
    assert boxes
    for box in boxes:
        right, bottom = (float(box.get(a, 0)) + float(box.get(b, 0)) for a, b in (("x", "width"), ("y", "height")))
        assert right <= width
        assert bottom <= height
