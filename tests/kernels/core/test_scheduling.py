"""The tile schedule of persistent kernels, from Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.core import scheduling
from tests.kernels.jagged.jagged_problems import offsets_of

UNLIMITED = (-1, -1)


def lengths_of(rows: int, high: int, seed: int) -> list[int]:
    return torch.randint(0, high + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


WINDOWS = [UNLIMITED, (-1, 0), (0, -1), (9, 35)]
SMALL = {
    "no main": ([0], [5]),
    "no other": ([3], [0]),
    "mixed": ([40, 0, 7, 16, 33], [12, 9, 0, 70, 33]),
    "one long among empties": ([0] * 130 + [100] + [1] * 3, [40] * 134),
}
SKEWED = [min(1200, int(30 / u)) for u in torch.rand(64, generator=torch.Generator().manual_seed(0)).tolist()]
LONG = [8 * n for n in (1, 200, 64, 129, 70, 2)]
# More rows than the kernel looks at in one step and than programs place one by one, some without others.
MANY = lengths_of(300, 600, 3), lengths_of(300, 300, 4)
# Main lengths, other lengths, positions of a tile, positions of a block, window, positions counted.
SCHEDULES: list[tuple[list[int], list[int], int, int, tuple[int, int], int]] = [
    *((main, other, 16, 8, window, 16) for main, other in SMALL.values() for window in WINDOWS),
    (*SMALL["mixed"], 8, 8, UNLIMITED, 16),
    (*MANY, 128, 128, UNLIMITED, 128),
    *((SKEWED, SKEWED, 128, 128, window, 128) for window in (UNLIMITED, (-1, 0), (100, 0))),
    (LONG, LONG, 1024, 8, UNLIMITED, 1024),
]
NUM_LISTED = len(SMALL) * len(WINDOWS) + 2
INTERPRETED = """
import json, sys
import torch
from kernels.core import scheduling
from kernels.core.scheduling import tile_schedule
import tests.kernels.core.patched_language

scheduling._FEW_ROWS = 200
SHORT = 16
tables = []
short_tables = []
schedules, num_listed = json.load(sys.stdin)
for index, (main, other, block_main, block_other, window, span) in enumerate(schedules):
    main_offsets, other_offsets = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (main, other))
    for short, found in ((0, tables), (SHORT, short_tables))[: 2 if index < num_listed else 1]:
        numbers = (sum(main), max(other), block_main, block_other, tuple(window), None, span, short)
        table = tile_schedule(main_offsets, other_offsets.int(), *numbers)
        found.append(table[: 1 + int(table[0, 0])].tolist())
json.dump([tables, short_tables], sys.stdout)
"""


@pytest.fixture(scope="module")
def both_tables() -> list[list[list[list[int]]]]:
    """The schedules of SCHEDULES, and of the first NUM_LISTED those without rows of at most 16 on both sides, from
    Triton's interpreter, which is chosen when Triton is imported."""
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=Path(__file__).parents[3],
        input=json.dumps([SCHEDULES, NUM_LISTED]),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def tables(both_tables: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    return both_tables[0]


def blocks_seen(position: int, count: int, length: int, block: int, window: tuple[int, int]) -> set[int]:
    """Blocks of `block` others with any pair that main positions position .. position + count - 1 see, one by one."""
    left, right = window
    return {
        j // block
        for i in range(position, position + count)
        for j in range(length)
        if (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
    }


@pytest.mark.parametrize("index", range(NUM_LISTED))
def test_schedule_lists_every_tile_once(tables: list[list[list[int]]], index: int) -> None:
    main, other, block_main, block_other, window, span = SCHEDULES[index]
    main_begin, other_begin = offsets_of(main).tolist(), offsets_of(other).tolist()
    expected = {(row, position) for row, length in enumerate(main) for position in range(0, length, block_main)}
    header, *tiles = tables[index]
    assert header[0] == len(tiles) == len(expected)
    for begin, count, position, begin_of_other, length, first, blocks, row in tiles:
        expected.remove((row, position))
        assert begin == main_begin[row] + position
        assert count == min(span, main[row] - position)
        assert (begin_of_other, length) == (other_begin[row], other[row])
        listed = set(range(first, first + blocks))
        assert blocks_seen(position, min(count, block_main), length, block_other, window) <= listed
        # Nothing more than positions behind the row's end would see.
        assert listed <= blocks_seen(position, block_main, length, block_other, window)
    work = [tile[scheduling.NUM_BLOCKS.value] for tile in tiles]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("index", range(NUM_LISTED))
def test_short_rows_are_left_out_and_nothing_else_changes(both_tables: list[list[list[list[int]]]], index: int) -> None:
    main, other, *_ = SCHEDULES[index]
    _, *tiles = both_tables[0][index]
    kept = [tile for tile in tiles if max(main[tile[-1]], other[tile[-1]]) > 16]
    assert both_tables[1][index][1:] == kept
    assert both_tables[1][index][0][0] == len(kept)


def dealt(work: list[int], programs: int) -> list[int]:
    """Work of each program when items are dealt there and back."""
    totals = [0] * programs
    for place, amount in enumerate(work):
        turn, program = divmod(place, programs)
        totals[program if turn % 2 == 0 else programs - 1 - program] += amount
    return totals


@pytest.mark.parametrize("index", range(NUM_LISTED, len(SCHEDULES) - 1))
def test_skewed_rows_are_dealt_evenly(tables: list[list[list[int]]], index: int) -> None:
    work = [tile[scheduling.NUM_BLOCKS.value] for tile in tables[index][1:]]
    totals = dealt([amount for amount in work for _ in range(4)], 16)
    # Each there-and-back of the deal evens out the one before; the largest item is a bound on what is left over.
    assert max(totals) - min(totals) <= max(work)


def test_more_counts_of_blocks_than_bins_are_sorted_roughly(tables: list[list[list[int]]]) -> None:
    tiles = tables[-1][1:]
    assert len(tiles) == sum(-(-length // 1024) for length in LONG)
    bins = [tile[scheduling.NUM_BLOCKS.value] // -(-201 // 64) for tile in tiles]
    assert bins == sorted(bins, reverse=True)
