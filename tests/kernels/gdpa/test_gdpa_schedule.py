"""How evenly the Hopper forward of GDPA deals its tiles: blocks of keys of the program that has most and least."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.bench.cases import gdpa as bench
from kernels.core import scheduling
from kernels.gdpa.hopper import forward
from kernels.gdpa.hopper.tiles import dealt_tile, num_turns
from tests.kernels.core.devices import on_hopper
from tests.kernels.jagged.jagged_problems import offsets_of

HEADS, PROGRAMS, MAXIMUM = 4, 132, 1024
BLOCK_Q, BLOCK_K = forward.BLOCK_Q, 128


def lengths_of(kind: str) -> tuple[list[int], list[int]]:
    queries, keys = (generate(1152, MAXIMUM).tolist() for generate in bench.LENGTHS_OF[kind])
    return queries, keys


def tiles_of(kind: str) -> list[int]:
    """Blocks of each tile in the order of rows."""
    return [
        -(-keys // BLOCK_K) for queries, keys in zip(*lengths_of(kind), strict=True) for _ in range(0, queries, BLOCK_Q)
    ]


def in_order_of_rows(blocks: list[int]) -> list[int]:
    """Blocks of each program if it takes every PROGRAMS-th pair of tile and head."""
    items = [amount for amount in blocks for _ in range(HEADS)]
    return [sum(items[program::PROGRAMS]) for program in range(PROGRAMS)]


def as_dealt(blocks: list[int], run: int) -> list[int]:
    """Blocks of each program by `scheduling` and `hopper.tiles`: the most first, dealt there and back."""
    blocks = sorted(blocks, reverse=True)
    blocks += [blocks[-1]] * (-len(blocks) % run)
    items = [sum(blocks[first : first + run]) for first in range(0, len(blocks), run) for _ in range(HEADS)]
    totals = [0] * PROGRAMS
    for place, amount in enumerate(items):
        turn, program = divmod(place, PROGRAMS)
        totals[program if turn % 2 == 0 else PROGRAMS - 1 - program] += amount
    return totals


@pytest.mark.parametrize("kind", ["self_jagged", "self_heavy_tailed", "self_ragged_queries"])
@pytest.mark.parametrize("run", [1, forward.RUN])
def test_blocks_are_dealt_evenly(kind: str, run: int) -> None:
    blocks = tiles_of(kind)
    dealt, before = as_dealt(blocks, run), in_order_of_rows(blocks)
    # Nobody has more than one item above anybody else, whatever the lengths.
    assert max(dealt) - min(dealt) <= run * max(blocks)
    assert max(dealt) <= sum(dealt) / PROGRAMS + run * max(blocks) / 2
    if len(set(blocks)) > 1:
        assert max(dealt) - min(dealt) < max(before) - min(before)


@gluon.jit
def _count_kernel(schedule, counts, num_heads, RUN: gl.constexpr):
    num_tiles = gl.load(schedule)
    total = 0
    for turn in range(num_turns(num_tiles, num_heads, RUN)):
        entry, _head = dealt_tile(schedule, num_tiles, turn, num_heads, RUN)
        total += gl.load(entry + scheduling.NUM_BLOCKS)
    gl.store(counts + gl.program_id(0), total)


@on_hopper
@pytest.mark.parametrize("kind", ["self_jagged", "self_heavy_tailed"])
@pytest.mark.parametrize("run", [1, forward.RUN])
def test_programs_on_the_device_get_what_was_dealt(kind: str, run: int) -> None:
    queries, keys = lengths_of(kind)
    offsets = [offsets_of(lengths).cuda() for lengths in (queries, keys)]
    schedule = scheduling.tile_schedule(*offsets, sum(queries), MAXIMUM, BLOCK_Q, BLOCK_K)
    counts = torch.zeros(PROGRAMS, dtype=torch.int32, device="cuda")
    _count_kernel[(PROGRAMS,)](schedule, counts, HEADS, RUN=run, num_warps=1)
    assert counts.tolist() == as_dealt(tiles_of(kind), run)


@on_hopper
def test_layers_share_a_schedule() -> None:
    offsets = offsets_of([100, 300, 5]).cuda()
    numbers = (405, 300, BLOCK_Q, BLOCK_K)
    schedule = scheduling.tile_schedule(offsets, offsets, *numbers)
    assert scheduling.tile_schedule(offsets, offsets, *numbers) is schedule
    offsets += 0
    assert scheduling.tile_schedule(offsets, offsets, *numbers) is not schedule
