"""Which tiles of a grouped product each program of the Hopper kernels works on, and in which order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.mxfp8.hopper.grouped import order as grouped_order
from tests.kernels.mxfp8.grouped_sizes import ALIGNED, RAGGED


class Pointer:
    """Enough of one for functions of the tiles to run as plain Python."""

    def __init__(self, values: list[int], position: Any = 0) -> None:
        self.values, self.position = values, position

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.position + offset)

    def store(self, value: int, mask: bool = True) -> None:
        if mask:
            self.values[self.position] = value

    def atomic_add(self, value: int, sem: str, scope: str) -> int:
        self.values[self.position] += value
        return self.values[self.position] - value

    def load(self, mask: Any = True, other: int = 0) -> Any:
        if isinstance(mask, bool):
            return Loaded(self.values[self.position])
        return torch.tensor([self.values[i] if m else other for i, m in zip(self.position, mask, strict=True)])


class Loaded(int):
    def to(self, dtype: Any) -> int:
        return int(self)


def plain_tiles(programs: int = 1) -> SimpleNamespace:
    """`hopper.grouped.order` with its device functions as Python functions, which run in one of `programs` programs."""
    language = SimpleNamespace(
        int32=torch.int32,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        where=lambda condition, a, b: torch.where(condition, a, b) if torch.is_tensor(a) else (a if condition else b),
        load=Pointer.load,
        store=Pointer.store,
        atomic_add=Pointer.atomic_add,
        arange=lambda first, last, layout: torch.arange(first, last),
        sum=lambda values, axis: int(values.sum(axis)),
        num_programs=lambda axis: programs,
    )
    names: dict[str, Any] = {"gl": language, "_FEW": grouped_order._FEW.value, "_THREADS": None}
    for name in ("bounds", "_count", "seek", "take", "locate", "order_of_groups", "group_at"):
        function = getattr(grouped_order, name).fn
        names[name] = FunctionType(function.__code__, names, name)
    return SimpleNamespace(**names)


def walk(sizes: list[int], tiles_m: int, tiles_n: int, program: int, programs: int, wgrad: bool) -> Iterator[tuple]:
    """(group, row, rows left, column, first, last) of the tiles of a program, in order."""
    tiles, ends = plain_tiles(), Pointer(torch.tensor(sizes).cumsum(0).tolist())
    tile = program
    group, base = tiles.seek(tile, 0, 0, ends, len(sizes), tiles_m, tiles_n, 192, wgrad)
    while group < len(sizes):
        yield group, *tiles.locate(tile, group, base, ends, tiles_m, tiles_n, 1000, 320, 192, 8, wgrad)
        tile += programs
        group, base = tiles.seek(tile, group, base, ends, len(sizes), tiles_m, tiles_n, 192, wgrad)


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


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("sizes", [*ALIGNED.values(), *RAGGED.values()], ids=str)
def test_each_tile_is_taken_once_and_the_ticket_cleared(sizes: list[int], programs: int) -> None:
    tiles, ends = plain_tiles(programs), Pointer(torch.tensor(sizes).cumsum(0).tolist())
    ticket, order, taken = Pointer([0]), random.Random(sum(sizes)), []
    busy = [(program, *tiles.seek(program, 0, 0, ends, len(sizes), 0, 5, 192, False)) for program in range(programs)]
    while busy := [place for place in busy if place[1] < len(sizes)]:
        tile, group, base = busy.pop(order.randrange(len(busy)))
        taken.append(tile)
        busy.append(tiles.take(ticket, group, base, ends, len(sizes), 0, 5, 192, False))
    assert sorted(taken) == list(range(5 * sum(-(-size // 192) for size in sizes)))
    assert ticket.values == [0]


@pytest.mark.parametrize("sizes", [*ALIGNED.values()], ids=str)
def test_every_group_has_the_tiles_of_its_weight_gradient(sizes: list[int]) -> None:
    expected, begin = [], 0
    for group, size in enumerate(sizes):
        for row in range(0, 1000, 192):
            expected += [(group, row, 1000 - row, column, begin, begin + size) for column in range(5)]
        begin += size
    shares = [list(walk(sizes, 6, 5, program, 7, True)) for program in range(7)]
    assert sorted(itertools.chain.from_iterable(shares)) == sorted(expected)


@pytest.mark.parametrize("sizes", [*ALIGNED.values()], ids=str)
def test_the_longest_groups_of_few_tiles_come_first(sizes: list[int]) -> None:
    tiles, ends, groups = plain_tiles(132), Pointer(torch.tensor(sizes).cumsum(0).tolist()), len(sizes)
    by_length = sorted(range(groups), key=lambda group: -sizes[group])
    for number, wgrad, expected in ((10, True, by_length), (1000, True, range(groups)), (10, False, range(groups))):
        order = tiles.order_of_groups(ends, groups, number, wgrad)
        turns = range(groups + 2)
        assert [tiles.group_at(order, turn, groups, wgrad) for turn in turns] == [*expected, groups, groups + 1]


def test_more_groups_than_are_sorted_come_in_their_order() -> None:
    tiles, ends = plain_tiles(132), Pointer(list(range(64, 64 * 131, 64)))
    order = tiles.order_of_groups(ends, 130, 1, True)
    assert [tiles.group_at(order, turn, 130, True) for turn in range(131)] == list(range(131))
