"""The command that prints what a model costs and what serves it."""

from __future__ import annotations

import pytest

from train.commands import summary

TINY = ["data=synthetic", "data.num_requests=50", "data.num_users=20", "data.num_items=200", "data.max_history=20"]


def test_it_answers_for_a_chip_that_is_absent() -> None:
    found = summary.main(["chip=90", *TINY])
    assert {each.backend for each in found.served if each.op == "jagged_dense_bmm"} == {"triton"}
    assert found.costs[0].precision == "bfloat16, float32"
    assert "jagged_dense_bmm" in str(found)
    here = summary.main(TINY)
    assert {each.backend for each in here.served if each.op == "jagged_dense_bmm"} == {"reference"}
    assert here.costs[0].precision == "float32"
    assert not list(here.slow())


def test_a_chip_is_a_capability() -> None:
    with pytest.raises(ValueError, match=r"chip=h200 must be a compute capability without its dot, e\.g\. chip=90"):
        summary.main(["chip=h200", *TINY])
