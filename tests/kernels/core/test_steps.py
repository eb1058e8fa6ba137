"""How many bits of a row index the searches over offsets go through."""

from __future__ import annotations

import pytest

from kernels.core.triton import steps_of


@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 1024, 1025, 1344, 2180, 32768, 32769, 10**6])
def test_they_cover_all_rows_in_whole_looks_at_32(num_rows: int) -> None:
    steps = steps_of(num_rows)
    assert steps % 5 == 0
    assert 2**steps >= num_rows > 2 ** (steps - 5) * (steps > 5)


def test_the_rest_of_an_epoch_has_the_kernels_of_its_batches() -> None:
    assert steps_of(2180) == steps_of(1344)
