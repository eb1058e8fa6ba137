"""Rows in parts, for kernels that go down a row and reduce it.

Program b of the first B has the first PART places of row b, which is all of most rows and found without a search. The
programs behind them, one for each whole PART of the values, have the further parts of longer rows, so that one long row
among empty ones is spread over the chip. Parts of a divided row are reduced to float32 in slots of their own, which
`join` then puts together in the order of the parts: no atomics, the same bits every time.

Part j > 0 of a row that begins at `begin` is that of number k = begin // PART + j: the row holds k * PART, which no
other part of it is nearest to, and where the row is found by.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv, next_power_of_2, row_of, steps_of

PART = 1024  # places
UNDIVIDED = 1 << 48
ENOUGH_PROGRAMS = 1024  # eight for each multiprocessor of a large GPU
LOAD_BYTES = 16  # of a thread


@triton.jit
def larger_of(x, y):
    """The larger one, or NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def part_of(offsets, num_rows, program, PART: tl.constexpr, STEPS: tl.constexpr, programs=None):
    """(row, its begin and end, the part's first and last + 1 place, index of its slot), all int64.

    The part of a program behind the first `num_rows` may have no places; then there is nothing to do. `programs` is the
    number of all of them, without a value that of the first axis.
    """
    number = (program - num_rows + 1).to(tl.int64)
    row = program.to(tl.int64)
    if number > 0:
        row = tl.sum(row_of(offsets, num_rows, number * PART + tl.arange(0, 1), STEPS), 0)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if programs is None:
        programs = tl.num_programs(0)
    part = tl.where(number > 0, number - begin // PART, 0)
    first = tl.where((number > 0) & (part == 0), end, begin + part * PART)
    last = tl.minimum(first + PART, end)
    # The first part of a long row has the slot of its number, those of the others follow the slots of all first parts.
    slot = begin // PART + part + tl.where(part > 0, programs - num_rows, 0)
    return row, begin, end, first, last, slot


@triton.jit(do_not_specialize=["num_rows"])
def _join_parts_kernel(
    parts,
    counts,
    offsets,
    out,
    ties,
    num_rows,
    width,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program k - 1 puts a row together that has a part 1 of number k, if there is one."""
    number = (tl.program_id(0) + 1).to(tl.int64)
    row = tl.sum(row_of(offsets, num_rows, number * PART + tl.arange(0, 1), STEPS), 0)
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if (number - begin // PART != 1) | (begin + PART >= end):
        return
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < width
    slot = number - 1
    result = tl.load(parts + slot * width + column, mask=inside, other=0)
    count = tl.zeros([BLOCK_W], tl.int32)
    if KIND == "max":
        count = tl.load(counts + slot * width + column, mask=inside, other=0)
    for _ in range(begin + PART, end, PART):
        slot += 1
        at = (slot + tl.num_programs(0)) * width + column
        value = tl.load(parts + at, mask=inside, other=0)
        if KIND == "max":
            larger = larger_of(result, value)
            of_value = tl.load(counts + at, mask=inside, other=0)
            count = tl.where(result == larger, count, 0) + tl.where(value == larger, of_value, 0)
            result = larger
        else:
            result += value
    if KIND == "mean":
        result /= (end - begin).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)
    if KIND == "max":
        tl.store(ties + row * width + column, count, mask=inside)


def part_size(longest: int) -> int:
    """PART, or where rows are not expected to be longer than that a size that none reaches, which saves the joining."""
    return PART if longest > PART else UNDIVIDED


def num_parts(total: int, num_rows: int, part: int) -> int:
    """Programs that `part_of` needs."""
    return num_rows + total // part


def slots(like: Tensor, total: int, part: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised [slots, width]; no slots where no row is longer than a part."""
    further = total // part
    return like.new_empty(2 * further + 1 if further else 0, width, dtype=dtype)


def join(
    parts: Tensor,
    offsets: Tensor,
    out: Tensor,
    total: int,
    part: int,
    kind: str = "sum",
    counts: Tensor | None = None,
    ties: Tensor | None = None,
) -> None:
    """Reduce the slots of every divided row into its row of `out` [B, ...]; kind is 'sum', 'mean' or 'max'.

    For 'max', `counts` are the slots of how often each part has its maximum, and `ties` [B, ...] int32 gets the sums.
    """
    if total // part == 0:
        return
    num_rows, width = offsets.shape[0] - 1, parts.shape[1]
    block_w = min(next_power_of_2(width), 256)
    counts, ties = parts if counts is None else counts, out if ties is None else ties
    constants = (kind, part, steps_of(num_rows), block_w)
    _launch_join(
        (total // part, cdiv(width, block_w), 1),
        (out.device, offsets.dtype, out.dtype, *aligned(offsets, out), width, *constants),
        parts, counts, offsets, out, ties, num_rows, width, *constants, num_warps=1 if block_w <= 64 else 2,
    )  # fmt: skip


_launch_join = Launcher(_join_parts_kernel)


def reduction_blocks(
    width: int, programs: int, itemsize: int, loads: int, warps: int = 4, widest: int = 256
) -> dict[str, int]:
    """Blocks of programs that each go down a part: BLOCK_L places of BLOCK_W columns, `widest` at most, at a time.

    A thread has `loads` loads of 16 bytes in flight, because hiding the latency of memory takes some 40 KB a
    multiprocessor. SUMS places are summed apart until the end of the part: as many as the threads span, so that no
    thread waits for another one in the loop. Columns are fewer where parts alone would not fill a GPU.
    """
    block_w = min(next_power_of_2(max(width, 1)), widest)
    while block_w > 32 and programs * cdiv(width, block_w) < ENOUGH_PROGRAMS:
        block_w //= 2
    at_once = 32 * warps * LOAD_BYTES // itemsize
    sums = max(at_once // block_w, 1)
    return {"BLOCK_L": sums * loads, "BLOCK_W": block_w, "SUMS": sums, "num_warps": warps}
