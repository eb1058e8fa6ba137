"""Device code for rows of several kinds of tokens (`kernels.attention.structure`), shared by attention and GDPA.

What a tile of queries has to visit are up to three ranges of keys: the prefix, a window or the history, and the keys of
its own targets. What a tile of keys has to visit are up to three ranges of queries, too: contextual ones, those of the
history, and targets. Ranges are whole blocks of a step from the start of a row, so that no block is visited twice.

Shared with `gdpa`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.structure import Structure
from kernels.attention.triton.tile import UNLIMITED, part_of_span, sees, span
from kernels.core.mask import Mask

NO_LIMIT = tl.constexpr(UNLIMITED)
# Of `arguments`: no kernel is compiled for their values.
SCALARS = ["contextual", "prefix", "near", "at_end"]


def arguments(structure: Structure | None, mask: Mask, q: Tensor) -> tuple[Any, ...]:
    """(numbers of targets, contextual tokens, prefix, window of targets, whether aligned to the end) for a kernel.

    `q` stands in for numbers of targets that are not read.
    """
    if structure is None:
        return q, 0, 0, 0, 0
    _left, _right, prefix, near = structure.sizes(mask)
    targets = q if structure.num_targets is None else structure.num_targets
    return targets, structure.contextual, prefix, near, int(structure.at_end)


def constants(structure: Structure | None) -> dict[str, bool]:
    return {
        "STRUCTURED": structure is not None,
        "HAS_TARGETS": structure is not None and structure.num_targets is not None,
    }


@triton.jit
def structure_of(
    num_targets, tile_rows, program, num_queries, num_keys, contextual, prefix, near, at_end, HAS_TARGETS: tl.constexpr
):
    """(place of query 0, keys of the history, place of the first target, contextual tokens, prefix, window of targets)
    of a program's row."""
    history = num_keys
    first_target = NO_LIMIT
    if HAS_TARGETS:
        history = tl.maximum(num_keys - tl.load(num_targets + tl.load(tile_rows + program)), 0)
        first_target = history
    return at_end * (num_keys - num_queries), history, first_target, tl.minimum(contextual, history), prefix, near


@triton.jit
def places(i, j, structure, STRUCTURED: tl.constexpr):
    """Where queries and keys stand for a bias: targets all right behind the history."""
    if STRUCTURED:
        i = tl.minimum(i + structure[0], structure[2])
        j = tl.minimum(j, structure[2])
    return i, j


@triton.jit
def visible(i, j, masks, structure, STRUCTURED: tl.constexpr):
    """`tile.sees`, also where a row is structured."""
    if STRUCTURED:
        num_queries, num_keys, left, right, _block_size = masks
        shift, history, first_target, contextual, prefix, near = structure
        place = i + shift
        early = j < prefix
        seen = ((j >= place - left) | early) & (j <= place + right) | ((place >= 0) & (place < contextual))
        target = place >= first_target
        seen = tl.where(target, (j >= history - near) | early, seen) & (j < history)
        seen = (seen | (target & (j == place))) & (i < num_queries) & (j < num_keys)
    else:
        seen = sees(i, j, masks)
    return seen


@triton.jit
def _ranges(early, begin, end, full_begin, full_end, own_begin, own_end, lowest, count, STEP: tl.constexpr):
    """Loop bounds for the partners [0, early), [begin, end) and [own_begin, own_end), out of `count`.

    Every position sees those in [full_begin, full_end); where that begins within the early ones, it also sees those
    from `lowest` on. Results are numbers of partners at whole steps: the bounds of the loop without masks, then of the
    one with masks as three pairs of where in the loop a gap begins and how long it is, and its end.
    """
    early = tl.minimum(early, count)
    joined = begin <= early
    full_begin = tl.maximum(tl.where(full_begin <= early, lowest, full_begin), 0)
    begin = tl.where(joined, 0, tl.maximum(begin, 0))
    end = tl.maximum(tl.minimum(end, count), 0)
    full_end = tl.maximum(tl.minimum(full_end, count), 0)
    first = tl.where(joined, 0, tl.cdiv(tl.maximum(early, 0), STEP))
    second = tl.maximum(begin // STEP, first)
    second_end = tl.maximum(tl.cdiv(end, STEP), second)
    middle = tl.minimum(tl.maximum(tl.cdiv(full_begin, STEP), second), second_end)
    middle_end = tl.minimum(tl.maximum(full_end // STEP, middle), second_end)
    third = tl.maximum(tl.maximum(own_begin, 0) // STEP, second_end)
    third_end = tl.maximum(tl.cdiv(tl.maximum(tl.minimum(own_end, count), 0), STEP), third)
    to_middle = first + middle - second
    to_third = to_middle + second_end - middle_end
    return (
        middle * STEP,
        middle_end * STEP,
        first * STEP,
        (second - first) * STEP,
        to_middle * STEP,
        (middle_end - middle) * STEP,
        to_third * STEP,
        (third - second_end) * STEP,
        (to_third + third_end - third) * STEP,
    )


@triton.jit
def key_span(first, last, masks, structure, STRUCTURED: tl.constexpr, STEP: tl.constexpr, MIDDLE: tl.constexpr = True):
    """What the queries first..last have to visit of their row's keys, for `walk`; without MIDDLE the loop without masks
    is empty."""
    _num_queries, num_keys, left, right, block_size = masks
    if STRUCTURED:
        shift, history, first_target, contextual, prefix, near = structure
        first += shift
        last += shift
        # Places of the history's queries in the tile; those of contextual ones are from 0 on.
        oldest = tl.where(first < 0, first, tl.maximum(first, contextual))
        newest = tl.minimum(last, first_target - 1)
        any_history = oldest <= newest
        any_contextual = (first < contextual) & (last >= 0)
        any_target = last >= first_target
        begin = tl.where(any_history, oldest - left, history)
        end = tl.where(any_history, tl.minimum(newest + right + 1, history), 0)
        full_begin = tl.where(any_history, newest - left, 0)
        full_end = tl.where(any_history, tl.minimum(oldest + right + 1, history), history)
        begin = tl.where(any_contextual, 0, begin)
        begin = tl.where(any_target, tl.minimum(begin, history - near), begin)
        end = tl.where(any_contextual | any_target, history, end)
        full_begin = tl.where(any_target, tl.maximum(full_begin, history - near), full_begin)
        if not MIDDLE:
            full_end = 0
        own_begin = tl.where(any_target, tl.maximum(first, first_target), 0)
        own_end = tl.where(any_target, last + 1, 0)
        early = tl.minimum(prefix, end)
        limits = _ranges(early, begin, end, full_begin, full_end, own_begin, own_end, 0, num_keys, STEP)
    else:
        limits = span(first, last, left, right, block_size, num_keys, STEP)
    return limits


@triton.jit
def query_span(first, last, masks, structure, STRUCTURED: tl.constexpr, STEP: tl.constexpr):
    """What the keys first..last have to visit of their row's queries, for `walk`."""
    num_queries, _num_keys, left, right, block_size = masks
    if STRUCTURED:
        shift, history, first_target, contextual, prefix, near = structure
        begin = first - right
        end = tl.where(first < prefix, NO_LIMIT, last + left + 1)
        full_end = tl.where(last < prefix, NO_LIMIT, first + left + 1)
        # Targets that see the history's keys of this tile are one range with its own queries if those reach so far.
        near_first = (last >= history - near) | (first < prefix)
        near_all = (first >= history - near) | (last < prefix)
        joined = end >= first_target
        full_end = tl.where(full_end < first_target, full_end, tl.where(near_all, NO_LIMIT, first_target))
        end = tl.where(joined, tl.where(near_first, NO_LIMIT, first_target), end)
        own_begin = tl.where(near_first, first_target, tl.maximum(first, first_target))
        own_end = tl.where(near_first, NO_LIMIT, last + 1)
        any_history = first < history
        early = tl.where(any_history, contextual, 0)
        begin = tl.where(any_history, begin, shift)
        end = tl.where(any_history, end, shift)
        full_end = tl.where(last < history, full_end, shift)
        own_begin = tl.where(any_history, own_begin, first)
        own_end = tl.where(any_history, own_end, last + 1)
        limits = _ranges(
            early - shift, begin - shift, end - shift, last - right - shift, full_end - shift, own_begin - shift,
            own_end - shift, tl.maximum(-shift, 0), num_queries, STEP,
        )  # fmt: skip
    else:
        limits = span(first, last, right, left, block_size, num_queries, STEP)
    return limits


@triton.jit
def walk(limits, MASKED: tl.constexpr, STRUCTURED: tl.constexpr):
    """(begin, end, gaps) of the loop without masks, or of the one with masks; `partner` has the places of its steps."""
    if STRUCTURED:
        if MASKED:
            part = (0, limits[8], (limits[2], limits[3], limits[4], limits[5], limits[6], limits[7]))
        else:
            part = (limits[0], limits[1], (limits[1], 0, limits[1], 0, limits[1], 0))
    else:
        begin, end, cut, gap = part_of_span(limits[0], limits[1], limits[2], limits[3], MASKED)
        part = (begin, end, (cut, gap))
    return part


@triton.jit
def partner(step, gaps, STRUCTURED: tl.constexpr):
    """The first partner of a step of the loop."""
    if STRUCTURED:
        place = step + tl.where(step < gaps[0], 0, gaps[1]) + tl.where(step < gaps[2], 0, gaps[3])
        place += tl.where(step < gaps[4], 0, gaps[5])
    else:
        place = tl.where(step < gaps[0], step, step + gaps[1])
    return place
