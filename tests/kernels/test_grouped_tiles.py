"""Which tiles of a grouped product each program of the Hopper kernels works on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.mxfp8 import gluon_grouped_tiles
from tests.kernels.grouped_sizes import ALIGNED, RAGGED


class Pointer:
    """Enough of one for functions of the tiles to run as plain Python."""

    def __init__(self, values: list[int], position: int = 0) -> None:
        self.values, self.position = values, position

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.values, self.position + offset)


class Loaded(int):
    def to(self, dtype: Any) -> int:
        return int(self)


def plain_tiles() -> SimpleNamespace:
    """`gluon_grouped_tiles` with its device functions of scalars as Python functions."""
    language = SimpleNamespace(
        int32=None,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: a if condition else b,
        load=lambda pointer: Loaded(pointer.values[pointer.position]),
    )
    names: dict[str, Any] = {"gl": language}
    for name in ("_bounds", "_count", "_seek", "_locate"):
        function = getattr(gluon_grouped_tiles, name).fn
        names[name] = FunctionType(function.__code__, names, name)
    return SimpleNamespace(**names)


def walk(sizes: list[int], tiles_m: int, tiles_n: int, program: int, programs: int, wgrad: bool) -> Iterator[tuple]:
    """(group, row, rows left, column, first, last) of the tiles of a program, in order."""
    tiles, ends = plain_tiles(), Pointer(torch.tensor(sizes).cumsum(0).tolist())
    tile = program
    group, base = tiles._seek(tile, 0, 0, ends, len(sizes), tiles_m, tiles_n, 192, wgrad)
    while group < len(sizes):
        yield group, *tiles._locate(tile, group, base, ends, tiles_m, tiles_n, 1000, 320, 192, 8, wgrad)
        tile += programs
        group, base = tiles._seek(tile, group, base, ends, len(sizes), tiles_m, tiles_n, 192, wgrad)


@pytest.mark.parametrize("sizes", [*ALIGNED.values(), *RAGGED.values()], ids=str)
def test_programs_share_the_tiles_of_all_groups(sizes: list[int]) -> None:
    expected, begin = [], 0
    for group, size in enumerate(sizes):
        for row in range(0, size, 192):
            expected += [(group, begin + row, size - row, column, 0, 320) for column in range(5)]
        begin += size
    for programs in (1, 7, 132):
        shares = [list(walk(sizes, 0, 5, program, programs, False)) for program in range(programs)]
        assert sorted(itertools.chain.from_iterable(shares)) == sorted(expected)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("sizes", [*ALIGNED.values()], ids=str)
def test_every_group_has_the_tiles_of_its_weight_gradient(sizes: list[int]) -> None:
    expected, begin = [], 0
    for group, size in enumerate(sizes):
        for row in range(0, 1000, 192):
            expected += [(group, row, 1000 - row, column, begin, begin + size) for column in range(5)]
        begin += size
    shares = [list(walk(sizes, 6, 5, program, 7, True)) for program in range(7)]
    assert sorted(itertools.chain.from_iterable(shares)) == sorted(expected)
