"""`gemsmith keys`: every key with what the source says of it."""

from __future__ import annotations

import pytest

from train.commands.keys import keys, main


def test_names_types_defaults_choices_and_comments() -> None:
    (key,) = main(["precision.name"])
    assert key.choices == ("auto", "fp32", "bf16", "mxfp8", "mxfp8_g128")
    assert str(key).startswith("precision.name: str = required\n      auto: bf16 where")
    (behind,) = main(["runtime.skip_window"])
    assert (behind.kind, behind.default) == ("int", "20")
    assert behind.comment
    assert [each.name for each in main(["model=hstu", "dropout"])] == ["model=hstu, model=sasrec model.dropout"]
    assert "data=events data.histories.NAME.where" in [each.name for each in main(["data.histories"])]


def test_each_stands_once_and_most_say_what_they_mean() -> None:
    found = keys()
    assert len({each.name for each in found}) == len(found)
    assert all(choice in str(each) for each in found for choice in each.choices)
    assert sum(bool(each.comment or each.choices) for each in found) > 0.7 * len(found)


def test_a_word_that_nothing_has_is_named() -> None:
    with pytest.raises(ValueError, match="no key, choice or comment has dropuot"):
        main(["dropuot"])
