"""Tiles of the Triton kernels of `attention_pool`, and what shared memory they need: known without Triton."""

from __future__ import annotations

from typing import NamedTuple

MAX_WIDTH = 1024


class Tile(NamedTuple):
    """`rows` queries and heads by `values`, of `features` each."""

    features: int
    rows: int
    values: int
    warps: int
    stages: int


# (warps, values, stages) by padded width: of those that were timed on an H100 and an H200, the fastest or nearly so.
_FORWARD = {128: (2, 32, 3), 256: (2, 32, 3), 512: (4, 32, 3), 1024: (4, 16, 4)}
_BACKWARD = {128: (4, 64, 3), 256: (4, 16, 3), 512: (4, 16, 3), 1024: (8, 16, 3)}


def tile_of(width: int, rows: int, itemsize: int, backward: bool, shared_limit: int) -> Tile | None:
    """The tile for values of `width` features and `rows` queries and heads on a chip whose programs may use
    `shared_limit` bytes of shared memory; None if there is none."""
    features, rows = _power(width, 32), _rows(rows, backward)
    warps, values, stages = (_BACKWARD if backward else _FORWARD)[max(features, 128)]
    if rows > 16 and features > 128:  # their sums would fill the registers of fewer
        warps *= 2
    if itemsize > 2:  # products of halves of operands need more registers
        values = max(values // 2, 16)
    while _shared_bytes(features, rows, values, max(stages - 1, 1), itemsize, backward) > shared_limit:
        if stages > 2:  # two have one buffer, as one has
            stages -= 1
        elif values > 16:
            values //= 2
        else:
            return None
    return Tile(features, rows, values, warps, stages)


def shared_bytes(width: int, rows: int, itemsize: int) -> int:
    """Shared memory that is needed at least, which is the backward's."""
    return _shared_bytes(_power(width, 32), _rows(rows, True), 16, 1, itemsize, True)


def _shared_bytes(features: int, rows: int, values: int, buffers: int, itemsize: int, backward: bool) -> int:
    """Queries and, backward, their gradients as both products want them; buffers of values; results on their way to
    another layout."""
    held = 4 * rows + values if backward else 2 * rows
    return features * itemsize * (held + buffers * values) * (2 if itemsize > 2 else 1)  # float32 is cut in halves


def _rows(rows: int, backward: bool) -> int:
    """What tensor cores take at least: 16, which queries and gradients beside each other are together."""
    return _power(rows, 8 if backward else 16)


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
