"""The permutation of routed rows to expert order, and weighted sums of rows back to their tokens; Triton.

Three launches give the permutation, whatever the load of the experts: programs count their selections, then each adds
up the counts of all, which says where every expert begins and how many of its rows come from earlier programs. Then
tiles of rows are ranked by their first tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv, next_power_of_2
from kernels.moe.reference import NEIGHBOURS, ROWS, Permutation, capacity_of

_HITS = 16384  # elements of the table selections x experts that a program counts at a time
_PROGRAMS = 512  # upper limit: each program reads the counts of all
_BLOCKS = 64  # of tiles that a program ranks


@triton.jit
def _hits(selected_experts, first, num_selections, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether selection first + i went to expert e, int32 [BLOCK, EXPERTS]."""
    at = first + tl.arange(0, BLOCK)
    expert = tl.load(selected_experts + at, mask=at < num_selections, other=-1).to(tl.int32)
    return at, (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_selections", "steps"])
def count_kernel(selected_experts, counts, num_selections, steps, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([EXPERTS], tl.int32)
    for step in range(steps):
        _, hits = _hits(selected_experts, (tl.program_id(0) * steps + step) * BLOCK, num_selections, EXPERTS, BLOCK)
        total += tl.sum(hits, 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["num_selections", "steps"])
def place_kernel(
    selected_experts,
    counts,
    rows,
    selections,
    ends,
    num_selections,
    steps,
    num_experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    earlier = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, tl.num_programs(0), CHUNK):
        other = first + tl.arange(0, CHUNK)
        real = (other < tl.num_programs(0))[:, None]
        count = tl.load(counts + other[:, None] * EXPERTS + expert[None, :], mask=real, other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where((other < program)[:, None], count, 0), 0)
    padded = (total + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS
    end = tl.cumsum(padded, 0)
    start = end - padded

    place = start + earlier
    for step in range(steps):
        at, hits = _hits(selected_experts, (program * steps + step) * BLOCK, num_selections, EXPERTS, BLOCK)
        row = tl.sum(hits * (tl.cumsum(hits, 0) - 1 + place[None, :]), 1)
        tl.store(rows + at, row, mask=at < num_selections)
        tl.store(selections + row, at, mask=at < num_selections)
        place += tl.sum(hits, 0)

    tl.store(ends + expert, end, mask=(expert < num_experts) & (program == 0))
    for own in range(program, num_experts, tl.num_programs(0)):
        first = tl.sum(tl.where(expert == own, start + total, 0), 0)
        last = tl.sum(tl.where(expert == own, end, 0), 0)
        padding = first + tl.arange(0, GROUP_ROWS)
        tl.store(selections + padding, -1, mask=padding < last)


_launch_count = Launcher(count_kernel, num_warps=4)
_launch_place = Launcher(place_kernel, num_warps=4)


@triton.jit
def _first_token(selections, block, end, num_tiles, TOP_K: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Of TILES tiles of rows; more than any where there are none or fewer."""
    row = block * TILES * ROWS
    live = (row < end) & ((block + 1) * TILES <= num_tiles)
    return tl.where(live, tl.load(selections + row, mask=live, other=0) // TOP_K, 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_experts", "num_tiles"])
def order_kernel(
    selections,
    ends,
    order,
    num_experts,
    num_tiles,
    TOP_K: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + num_experts - 1)
    token = _first_token(selections, own, end, num_tiles, TOP_K, TILES, ROWS)
    num_blocks = (num_tiles + TILES - 1) // TILES
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_blocks, BLOCK):
        other = first + tl.arange(0, BLOCK)
        others = _first_token(selections, other, end, num_tiles, TOP_K, TILES, ROWS)[None, :]
        earlier = (others == token[:, None]) & (other[None, :] < own[:, None])
        before = ((others < token[:, None]) | earlier) & (other < num_blocks)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    tile = tl.arange(0, TILES)[None, :]
    tiles = own[:, None] * TILES + tile
    tl.store(order + rank[:, None] * TILES + tile, tiles, mask=(own < num_blocks)[:, None] & (tiles < num_tiles))


_launch_order = Launcher(order_kernel, num_warps=4)


def permutation(selected_experts: Tensor, num_experts: int) -> Permutation:
    """See `reference.permutation`; rows of `selections` after the last end are not written."""
    count = selected_experts.numel()
    rows = selected_experts.new_empty(selected_experts.shape, dtype=torch.int32)
    selections = selected_experts.new_empty(capacity_of(count, num_experts), dtype=torch.int32)
    ends = selected_experts.new_empty(num_experts, dtype=torch.int32)
    num_tiles = selections.shape[0] // ROWS
    order = selected_experts.new_empty(num_tiles, dtype=torch.int32)
    if count == 0:
        return Permutation(rows, selections, ends.zero_(), order)
    selected_experts = selected_experts.contiguous()
    width = next_power_of_2(num_experts)
    block = max(min(_HITS // width, 1024), 16)
    steps = cdiv(count, block * _PROGRAMS)
    programs = cdiv(count, block * steps)
    counts = selected_experts.new_empty(programs, width, dtype=torch.int32)
    key = (selected_experts.device, selected_experts.dtype, width, block, *aligned(selected_experts))
    _launch_count((programs, 1, 1), key, selected_experts, counts, count, steps, width, block)
    _launch_place(
        (programs, 1, 1),
        (*key, num_experts),
        selected_experts,
        counts,
        rows,
        selections,
        ends,
        count,
        steps,
        num_experts,
        width,
        block,
        max(4096 // width, 1),
        ROWS,
    )
    top_k = selected_experts.shape[1]
    arguments = (selections, ends, order, num_experts, num_tiles, top_k, NEIGHBOURS, ROWS, _BLOCKS)
    grid = (cdiv(num_tiles, NEIGHBOURS * _BLOCKS), 1, 1)
    _launch_order(grid, (selected_experts.device, top_k), *arguments)
    return Permutation(rows, selections, ends, order)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    values,
    rows,
    weights,
    out,
    num_tokens,
    width,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    real = token < num_tokens
    mask = real[:, None] & (column < width)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + j, mask=real, other=0).to(tl.int64)
        value = tl.load(values + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP_K + j, mask=real, other=0).to(tl.float32)[:, None]
        total += value
    tl.store(out + token[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=mask)


_launch_combine = Launcher(combine_kernel, num_warps=4)


def combine(values: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """values [M, W] -> [N, W]: each token's rows, times weights [N, k] if given, summed in float32 in order of k."""
    num_tokens, top_k = rows.shape
    width = values.shape[1]
    out = values.new_empty(num_tokens, width, dtype=dtype)
    if out.numel() == 0:
        return out
    block_w = min(next_power_of_2(width), 1024)
    block_t = max(2048 // block_w, 1)
    factors = rows if weights is None else weights.contiguous()
    _launch_combine(
        (cdiv(num_tokens, block_t), cdiv(width, block_w), 1),
        (
            *(values.device, values.dtype, dtype, weights is None, factors.dtype, width, top_k),
            *aligned(values, rows, factors),
        ),
        values,
        rows,
        factors,
        out,
        num_tokens,
        width,
        top_k,
        weights is not None,
        block_t,
        block_w,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def collect_kernel(partial, rows, out, count, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    row = tl.load(rows + at, mask=at < count, other=0).to(tl.int64)
    mask = (at < count)[:, None] & (part < parts)[None, :]
    total = tl.sum(tl.load(partial + row[:, None] * parts + part[None, :], mask=mask, other=0), 1)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


_launch_collect = Launcher(collect_kernel, num_warps=4)


def collect(partial: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """partial [M, parts] float32 -> [N, k]: the sum of the parts at each selection's row."""
    out = partial.new_empty(rows.shape, dtype=dtype)
    if out.numel():
        parts = partial.shape[1]
        key = (out.device, dtype, parts, *aligned(partial, rows))
        width = next_power_of_2(parts)
        _launch_collect((cdiv(out.numel(), 64), 1, 1), key, partial, rows, out, out.numel(), parts, width, 64)
    return out
