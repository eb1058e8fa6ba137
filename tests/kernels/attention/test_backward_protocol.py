"""A model of the barriers and flags of the Hopper backwards of GDPA and attention: they deadlock on no order of events.

A kernel that waits for what never comes hangs the device, so its protocol is walked through here first: the loader and
the two consumers of some programs as generators that yield what they wait for, resumed in random order. The shapes of
the loops are those of `kernels.gdpa.hopper.backward_loader` and `hopper.backward_consumer`, and for attention those of
`kernels.attention.hopper.backward_loader` and `hopper.backward_consumer`; arithmetic is left out, and what a buffer
holds is a label, which is checked wherever the kernel would read it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tests.kernels.attention.backward_protocol import (
    Barrier,
    Event,
    Window,
    count,
    key_tiles_of,
    runs_of,
    steps_of,
    walk,
)


class Program:
    """What the two kernels have in common, and GDPA's."""

    counts: ClassVar = dict.fromkeys(("g_full", "k_full", "dq_turn"), 1) | dict.fromkeys(
        ("q_full", "stage_empty", "step_done", "k_empty", "ds_full"), 2
    )
    unadded: ClassVar = 0  # first steps that the loader never waits for
    uneven: ClassVar = False

    def __init__(
        self, items: list[Any], group: int, window: Window, flags: dict[Any, int], sums: dict[Any, list[int]]
    ) -> None:
        self.items, self.group, self.window, self.flags, self.sums = items, group, window, flags, sums
        self.bars = {name: (Barrier(number), Barrier(number)) for name, number in self.counts.items()}
        self.q: list[Any] = [None, None]
        self.g: list[Any] = [None, None]
        self.k: list[Any] = [None, None]
        self.v: list[Any] = [None, None]  # of a key tile, or sums of dq of a step
        self.ds: list[list[Any]] = [[None, None], [None, None]]
        self.controls: list[Any] = [None] * 4

    def flows(self) -> list[Iterator[Event]]:
        return [self.loader(), self.keeper(), self.consumer(0), self.consumer(1)]

    def wait(self, name: str, use: int, free: bool = False) -> Event:
        """For the `use`-th filling of a double buffer, or for its place to be free."""
        return self.bars[name][use % 2].ready((use // 2 & 1) ^ free)

    def all_added(self, step: int) -> Event:
        """Both consumers have added dq of the step two before `step`."""
        return self.wait("step_done", step - 1)

    def take_turn(self, step: int, index: Any, height: int, recent: list[Any]) -> Iterator[Event]:
        """What the loader does for the order of sums in dq; `recent` are the flags of the last two steps."""
        if height > 0 and self.flags[index] < height:
            if step > self.unadded:
                yield self.all_added(step)
            self.lift(recent.pop())
            recent.append(None)
            yield lambda: self.flags[index] >= height

    def lift(self, index: Any) -> None:
        if index is not None:
            self.flags[index] += 1

    def bring_sums(self, step: int, slot: int, index: Any, j: int, first: int, last: int) -> Iterator[Event]:
        """Let dq of the step before be made, from what earlier key tiles left of it if this is the last."""
        if step == 0:
            return
        if j == last and j != first:
            yield self.wait("ds_full", step - 1)
            for c in range(2):
                assert self.sums[(c, *index)] == list(range(first, j)), "sums are read too early"
            self.v[slot] = ("sums", step - 1)
            yield None
        self.bars["dq_turn"][(step - 1) % 2].arrive()

    def keeper(self) -> Iterator[Event]:
        tile = step = j = first = last = 0
        index: Any = None
        recent: list[Any] = [None, None, None]

        def turn(slot: int) -> Iterator[Event]:
            if step > 1:
                yield self.wait("step_done", step - 2)
            self.lift(recent.pop())
            yield from self.take_turn(step, index, j - first, recent)
            yield from self.bring_sums(step, slot, index, j, first, last)

        for item in self.items:
            row, (_, keys), _, head = item
            steps = steps_of(item, self.group, self.window)
            tile += bool(steps)
            for run, member, i in steps:
                yield from turn(tile % 2)
                j = item[2]
                index = (row, head, run, member, i)
                first, last = key_tiles_of(i, max(count(keys, 128), 1), *self.window)
                recent.insert(0, index if j < last else None)
                step += 1
        yield from turn((tile - 1) % 2)
        yield self.wait("step_done", step)
        for flag in reversed(recent):
            self.lift(flag)

    def loader(self) -> Iterator[Event]:
        tile = step = 0
        for item in self.items:
            row, (_, keys), j, head = item
            steps = steps_of(item, self.group, self.window)
            if steps:
                yield self.wait("k_empty", tile, free=True)
                self.k[tile % 2] = (row, j, head)
                yield None
                self.bars["k_full"][tile % 2].arrive()
            for n, (run, member, i) in enumerate(steps):
                yield self.wait("stage_empty", step, free=True)
                own = (row, head, run, member, i)
                self.q[step % 2] = own
                yield None
                self.bars["q_full"][step % 2].arrive()
                self.controls[step % 4] = own, j, *key_tiles_of(i, max(count(keys, 128), 1), *self.window)
                yield None
                self.bars["q_full"][step % 2].arrive()
                self.g[step % 2] = own
                if n == 0:
                    if step > 0:
                        yield self.wait("ds_full", step - 1)
                    self.v[tile % 2] = (row, j, head)
                yield None
                self.bars["g_full"][step % 2].arrive()
                step += 1
            tile += bool(steps)
        yield self.wait("stage_empty", step, free=True)
        self.controls[step % 4] = "stop"
        for _ in range(2):
            self.bars["q_full"][step % 2].arrive()
        yield self.wait("k_empty", tile, free=True)
        self.bars["k_full"][tile % 2].arrive()

    def consumer(self, c: int) -> Iterator[Event]:
        tile = step = old_slot = 0
        previous: Any = None
        left_tile = False
        yield self.wait("q_full", 0)
        yield self.wait("k_full", 0)
        for item in self.items:
            row, (_, keys), j, head = item
            steps = steps_of(item, self.group, self.window)
            slot = tile % 2
            tile += bool(steps)
            for n, (run, member, i) in enumerate(steps):
                own = (row, head, run, member, i)
                assert self.controls[step % 4][0] == own
                yield self.wait("g_full", step)
                assert self.g[step % 2] == self.q[step % 2] == own
                yield None
                assert self.k[slot] == self.v[slot] == (row, j, head)
                if step > 0:
                    yield from self.begin(step, slot ^ 1, previous)
                    yield self.wait("step_done", step - 1)
                self.ds[step % 2][c] = step
                yield None
                self.bars["ds_full"][step % 2].arrive()
                assert self.g[step % 2] == self.q[step % 2] == own
                yield None
                if step > 0:
                    self.multiply(step, old_slot, previous)
                self.bars["stage_empty"][step % 2].arrive()
                started, left_tile = left_tile, n == len(steps) - 1
                if started and left_tile:
                    self.bars["k_empty"][old_slot].arrive()
                yield self.wait("q_full", step + 1)
                yield self.wait("k_full", tile - 1 + left_tile)
                if started and not left_tile:
                    self.bars["k_empty"][old_slot].arrive()
                if step > 0:
                    yield from self.add(c, step, previous)
                yield None
                assert self.controls[step % 4][0] == own
                self.bars["step_done"][step % 2].arrive()
                previous = (own, j, *key_tiles_of(i, max(count(keys, 128), 1), *self.window))
                old_slot = slot
                yield None
                step += 1
            yield None
        if step > 0:
            yield from self.begin(step, old_slot, previous)
            yield self.wait("step_done", step - 1)
            self.multiply(step, old_slot, previous)
            yield from self.add(c, step, previous)
        assert self.controls[step % 4] == "stop"
        self.bars["step_done"][step % 2].arrive()

    def begin(self, step: int, slot: int, previous: Any) -> Iterator[Event]:
        _, j, first, last = previous
        takes = j == last and j != first
        if takes or not self.uneven:
            yield self.wait("dq_turn", step - 1)
        if takes:
            assert self.v[slot] == ("sums", step - 1)

    def multiply(self, step: int, old_slot: int, previous: Any) -> None:
        (row, head, *_), j, *_ = previous
        assert self.ds[(step - 1) % 2] == [step - 1, step - 1]
        assert self.k[old_slot] == (row, j, head)

    def add(self, c: int, step: int, previous: Any) -> Iterator[Event]:
        _, j, first, last = previous
        if self.uneven and (j != last or j == first):
            yield self.wait("dq_turn", step - 1)
        assert previous[0] in (control[0] for control in self.controls if control is not None)
        self.sum_up(c, previous)

    def sum_up(self, c: int, previous: Any) -> None:
        index, j, first, *_ = previous
        added = self.sums[(c, *index)]
        assert j == (added[-1] + 1 if added else first), "sums are out of order"
        added.append(j)


class UnevenProgram(Program):
    uneven: ClassVar = True


class AttentionProgram(Program):
    """One stage of q and g together, keys of the next item during this one, and no records of control."""

    counts: ClassVar = dict.fromkeys(("q_full", "g_full", "kv_full", "dq_turn"), 1) | dict.fromkeys(
        ("g_empty", "kv_empty", "exchanged", "done"), 2
    )
    unadded: ClassVar = 1

    def all_added(self, step: int) -> Event:
        return self.wait("g_empty", step - 1)

    def exchange(self, step: int) -> Event:
        """Until both have written ds of a step and read that of the step before; a barrier by itself."""
        return self.bars["exchanged"][0].ready(step & 1)

    def flows(self) -> list[Iterator[Event]]:
        return [self.loader(), self.consumer(0), self.consumer(1)]

    def take_turn(self, step: int, index: Any, height: int, recent: list[Any]) -> Iterator[Event]:
        self.lift(recent.pop())
        yield from super().take_turn(step, index, height, recent)
        if step > 0:
            self.bars["dq_turn"][(step - 1) % 2].arrive()

    def load_keys(self, item: Any, tile: int) -> Iterator[Event]:
        row, _, j, head = item
        yield self.wait("kv_empty", tile, free=True)
        self.k[tile % 2] = (row, j, head)
        yield None
        self.bars["kv_full"][tile % 2].arrive()

    def loader(self) -> Iterator[Event]:
        tile = step = height = 0
        loaded = False
        index = None
        recent: list[Any] = [None, None, None]
        for turn, item in enumerate(self.items):
            row, (_, keys), j, head = item
            *earlier, final = runs_of(item, self.group, self.window)
            steps = [step for run in earlier for step in run] + final
            # Keys of the next item are asked for in the last run of queries, if that has any.
            asking = len(steps) - len(final) + min(len(final) - 1, 2)
            if steps and not loaded:
                yield from self.load_keys(item, tile)
                tile += 1
            loaded = False
            for n, (run, member, i) in enumerate(steps):
                yield self.wait("g_empty", step, free=True)
                for name, buffer in (("q", self.q), ("g", self.g)):
                    buffer[step % 2] = (row, head, run, member, i)
                    yield None
                    self.bars[f"{name}_full"][step % 2].arrive()
                yield from self.take_turn(step, index, height, recent)
                first, last = key_tiles_of(i, max(count(keys, 128), 1), *self.window)
                index, height = (row, head, run, member, i), j - first
                recent.insert(0, index if j < last else None)
                step += 1
                following = self.items[turn + 1 : turn + 2]
                if final and n == asking and following and steps_of(following[0], self.group, self.window):
                    yield from self.load_keys(following[0], tile)
                    tile += 1
                    loaded = True
        yield self.wait("g_empty", step, free=True)
        self.bars["q_full"][step % 2].arrive()
        yield self.wait("kv_empty", tile, free=True)
        self.bars["kv_full"][tile % 2].arrive()
        yield from self.take_turn(step, index, height, recent)
        yield self.wait("done", 0)
        for flag in reversed(recent):
            self.lift(flag)

    def consumer(self, c: int) -> Iterator[Event]:
        tile = step = old_slot = 0
        previous: Any = None
        left_tile = False
        yield self.wait("q_full", 0)
        yield self.wait("kv_full", 0)
        for item in self.items:
            row, (_, keys), j, head = item
            steps = steps_of(item, self.group, self.window)
            slot = tile % 2
            tile += bool(steps)
            for n, (run, member, i) in enumerate(steps):
                own = (row, head, run, member, i)
                yield self.wait("g_full", step)
                assert self.g[step % 2] == self.q[step % 2] == own
                assert self.k[slot] == (row, j, head)
                is_last = step > 0 and previous[1] == previous[3]
                if is_last:
                    yield self.wait("dq_turn", step - 1)
                if step > 0:
                    yield self.exchange(step - 1)
                self.ds[step % 2][c] = step
                yield None
                if step > 0:
                    self.multiply(step, old_slot, previous)
                    yield None
                self.bars["exchanged"][0].arrive()
                if left_tile:
                    self.bars["kv_empty"][old_slot].arrive()
                left_tile = n == len(steps) - 1
                yield self.wait("q_full", step + 1)
                yield self.wait("kv_full", tile - 1 + left_tile)
                if step > 0:
                    if not is_last:
                        yield self.wait("dq_turn", step - 1)
                    self.sum_up(c, previous)
                previous = (own, j, *key_tiles_of(i, max(count(keys, 128), 1), *self.window))
                old_slot = slot
                yield None
                assert self.g[step % 2] == self.q[step % 2] == own
                self.bars["g_empty"][step % 2].arrive()
                step += 1
            yield None
            if steps:  # its values have had their last use, and dk and dv go through their place
                assert self.k[slot] == (row, j, head)
        if step > 0:
            yield self.wait("dq_turn", step - 1)
            yield self.exchange(step - 1)
            self.multiply(step, old_slot, previous)
            self.sum_up(c, previous)
        self.bars["done"][0].arrive()


@pytest.mark.parametrize("kind", [Program, UnevenProgram, AttentionProgram])
@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_events_deadlocks_or_changes_the_order_of_sums(seed: int, kind: type[Program]) -> None:
    chance = random.Random(seed)
    most = chance.choice([1, 64, 100, 300, 600]), chance.choice([1, 128, 200, 500])

    def length(side: int) -> int:
        return chance.choice([0, chance.randint(0, side), side])

    window = chance.choice([(-1, -1), (-1, -1), (50, -1), (-1, 0), (100, 30), (0, 0)])
    # Only attention has several runs of queries a row, and only without a window.
    runs = chance.choice([1, 2, 3]) if issubclass(kind, AttentionProgram) and window == (-1, -1) else 1
    rows = [(tuple(length(most[0]) for _ in range(runs)), length(most[1])) for _ in range(12)]
    members, group, programs = chance.choice([1, 2, 4, 8]), chance.choice([1, 3]), chance.choice([1, 2, 3, 5, 40])
    walk(kind, rows, members, 2, group, programs, window, chance)
