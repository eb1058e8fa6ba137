"""The breakdown of a traced step."""

from __future__ import annotations

import pytest

from train.tracing import covered


def test_time_that_spans_cover_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == pytest.approx(4.0)
