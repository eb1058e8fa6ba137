"""Barriers, flags and tiles of the backwards that `test_backward_protocol` walks through, and the walk."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Row = tuple[tuple[int, ...], int]  # queries of each run, keys
Window = tuple[int, int]
Event = Callable[[], bool] | None


class Barrier:
    """An mbarrier: `ready(parity)` once the phase of that parity is complete."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phases = 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if self.pending == 0:
            self.phases += 1
            self.pending = self.count

    def ready(self, parity: int) -> Event:
        return lambda: self.phases & 1 != parity


def query_tiles(j: int, key_tiles: int, tiles: int, left: int, right: int) -> tuple[int, int]:
    low = min(max(j * 128 - right, 0) // 64, tiles) if right >= 0 else 0
    if left < 0 or j == key_tiles - 1:
        return low, tiles
    return low, max(min((j * 128 + 127 + left) // 64 + 1, tiles), low)


def key_tiles_of(i: int, key_tiles: int, left: int, right: int) -> tuple[int, int]:
    first = min(max(i * 64 - left, 0) // 128, key_tiles - 1) if left >= 0 else 0
    last = min((i * 64 + 63 + right) // 128, key_tiles - 1) if right >= 0 else key_tiles - 1
    return first, last


def count(length: int, tile: int) -> int:
    return -(-length // tile)


def runs_of(item: tuple[int, Row, int, int], group: int, window: Window) -> list[list[tuple[int, int, int]]]:
    """(run, member, tile of queries) of each step, run by run."""
    _, (runs, keys), j, _ = item
    steps = []
    for run, queries in enumerate(runs):
        low, high = query_tiles(j, max(count(keys, 128), 1), count(queries, 64), *window)
        steps.append([(run, member, i) for member in range(group) for i in range(low, high)])
    return steps


def steps_of(item: tuple[int, Row, int, int], group: int, window: Window) -> list[tuple[int, int, int]]:
    return [step for steps in runs_of(item, group, window) for step in steps]


def walk(
    kind: type[Any],
    rows: list[Row],
    members: int,
    heads: int,
    group: int,
    programs: int,
    window: Window,
    chance: random.Random,
) -> None:
    """Items as `tile_table` orders them, dealt over programs, whose warps run in random order, some of them slowly."""
    ordered = sorted(rows, key=lambda row: -(sum(row[0]) + 64) * (row[1] + 64))
    items = []
    for start in range(0, len(rows), members):
        taken = list(enumerate(ordered))[start : start + members]
        for j in range(max(max(count(keys, 128), 1) for _, (_, keys) in taken)):
            items += [(r, row, j, h) for r, row in taken if j < max(count(row[1], 128), 1) for h in range(heads)]
    flags: dict[Any, int] = defaultdict(int)
    sums: dict[Any, list[int]] = defaultdict(list)
    running: list[list[Any]] = []
    for place in range(min(programs, len(items))):
        program = kind(items[place::programs], group, window, flags, sums)
        running += [[flow, None, chance.choice([1, 1, 0.02])] for flow in program.flows()]
    while running:
        ready = [flow for flow in running if flow[1] is None or flow[1]()]
        assert ready, f"deadlock of {len(running)} warpgroups"
        chosen = chance.sample(ready, chance.randint(1, len(ready)))
        for flow in [flow for flow in chosen if chance.random() < flow[2]] or chosen[:1]:
            try:
                flow[1] = next(flow[0])
            except StopIteration:
                running.remove(flow)
    for r, (runs, keys) in enumerate(ordered):
        for run, i in ((run, i) for run, queries in enumerate(runs) for i in range(count(queries, 64))):
            first, last = key_tiles_of(i, max(count(keys, 128), 1), *window)
            for h, member, c in ((h, m, c) for h in range(heads) for m in range(group) for c in range(2)):
                assert sums[c, r, h, run, member, i] == list(range(first, last + 1))
