"""All gradients of `jagged_linear` on Hopper from one reading of what they need, for layers of 136 to 256 in and out.

    dz = grad * slope        dx = dz @ weight        dweight = dz^T @ x        sums[b] = sum of dz over row b

Each of these alone takes as long as its memory traffic, of which dz would be the half. Here dz is made in shared memory
and never leaves it. Two neighbouring programs share a tile of 64 places: each has one half of the columns of x, with
the weight's in shared memory and the gradient of the weight's in the registers of two warpgroups from the first tile to
the last. The sums of rows are a product as well, with a matrix of ones that says which place is in which row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.core.hopper import addressable, barrier
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, steps_of
from kernels.jagged.hopper.linear.tiles import ROWS, descriptor, rows_of

PIECE = gl.constexpr(64)  # columns, 128 bytes
PIECES = gl.constexpr(4)  # of dz
HALF = gl.constexpr(128)  # columns of x
WIDTH = PIECE.value * PIECES.value
SPAN = range(136, WIDTH + 1, 8)  # of widths

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(232)
_LOADER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _lines(offsets, num_rows, first, base, high, LAYOUT: gl.constexpr):
    """Where the sums of rows [base, base + 64) over a tile go, -1 for rows behind `high` and for empty ones.

    That is a row's line of `sums` if the tile has all of it. Else it is one of two lines of the tile behind all rows:
    the second one is for a row that begins here and goes on in the next tile.
    """
    row = base + gl.arange(0, ROWS, LAYOUT)
    begin = gl.load(offsets + gl.minimum(row, num_rows)).to(gl.int32)
    end = gl.load(offsets + gl.minimum(row + 1, num_rows)).to(gl.int32)
    whole = (begin >= first) & (end <= first + ROWS)
    line = gl.where(whole, row, num_rows + first // ROWS * 2 + (begin >= first).to(gl.int32))
    return gl.where((row <= high) & (begin < end), line, -1)


@gluon.jit
def _load(grad_desc, point_desc, x_desc, weight_desc, grads, points, xs, weights, barriers, total,
          KIND: gl.constexpr):  # fmt: skip
    """A warp that loads a half of the weight, then tiles of grad, point and x."""
    full, empty, _, _, ready = barriers
    STAGES: gl.constexpr = full.shape[0]
    column = gl.program_id(0) % 2 * HALF
    mbarrier.expect(ready, 2 * PIECES * weight_desc.block_type.nbytes)
    for p in gl.static_range(PIECES):
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(
                weight_desc, [p * PIECE, column + c * PIECE], ready, weights.index(2 * p + c)
            )
    tile = 0
    for first in range(gl.program_id(0) // 2 * ROWS, total, gl.num_programs(0) // 2 * ROWS):
        stage = tile % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        BYTES: gl.constexpr = PIECES * grad_desc.block_type.nbytes
        mbarrier.expect(bar, (BYTES if KIND == "none" else 2 * BYTES) + x_desc.block_type.nbytes)
        for p in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(grad_desc, [first, p * PIECE], bar, grads.index(stage * PIECES + p))
            if KIND != "none":
                tma.async_copy_global_to_shared(point_desc, [first, p * PIECE], bar, points.index(stage * PIECES + p))
        tma.async_copy_global_to_shared(x_desc, [first, column], bar, xs.index(stage))
        tile += 1  # noqa: SIM113


@gluon.jit
def _place(rows, lines, barriers, offsets, num_rows, total, LEVELS: gl.constexpr):
    """A warp that looks up the rows of the places of tiles, apart from the one whose loads would wait for that."""
    _, empty, _, placed, _ = barriers
    STAGES: gl.constexpr = empty.shape[0]
    tile = 0
    for first in range(gl.program_id(0) // 2 * ROWS, total, gl.num_programs(0) // 2 * ROWS):
        stage = tile % STAGES
        row = rows_of(offsets, num_rows, first, total, ROWS, LEVELS)
        LANES: gl.constexpr = row.type.layout
        line = _lines(offsets, num_rows, first, gl.min(row, 0), gl.max(row, 0), LANES)
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        rows.index(stage).store(row)
        lines.index(stage).store(line)
        barrier()
        mbarrier.arrive(placed.index(stage), count=1)
        tile += 1  # noqa: SIM113


@gluon.jit
def _ones(row, base, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Of rows [base, base + 64): ones at the places that each has of a tile."""
    slot = base + gl.arange(0, ROWS, gl.SliceLayout(1, gl.DotOperandLayout(0, LAYOUT, 2)))
    return (gl.expand_dims(slot, 1) == gl.expand_dims(row, 0)).to(dtype)


@gluon.jit
def _sum_rows(dz, ones, line, sums, E, column, LAYOUT: gl.constexpr):
    """The columns from `column` on, which `dz` has, of the sums of 64 rows."""
    columns = column + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
    result = gl.zeros((ROWS, PIECE), gl.float32, LAYOUT)
    result = warpgroup_mma(ones, dz, result, use_acc=False, is_async=True)
    result, ones = warpgroup_mma_wait(0, deps=(result, ones))
    at = gl.expand_dims(sums + line.to(gl.int64) * E, 1) + gl.expand_dims(columns, 0)
    gl.store(at, result, gl.expand_dims(line >= 0, 1) & gl.expand_dims(columns < E, 0))


@gluon.jit
def _multiply(dx_desc, grads, points, xs, weights, rows, lines, barriers, offsets, partials, sums, num_rows, total,
              E, KIND: gl.constexpr, SUMS: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: dz of columns [128 C, 128 C + 128), these rows of dweight, and a quarter of the columns of dx."""
    dtype: gl.constexpr = grads.dtype
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    full, empty, made, placed, ready = barriers
    STAGES: gl.constexpr = full.shape[0]
    half = gl.program_id(0) % 2
    upper = gl.zeros((PIECE, HALF), gl.float32, WIDE)
    lower = gl.zeros((PIECE, HALF), gl.float32, WIDE)
    mbarrier.wait(ready, 0)
    tile = 0
    for first in range(gl.program_id(0) // 2 * ROWS, total, gl.num_programs(0) // 2 * ROWS):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        piece = stage * PIECES + 2 * C
        mbarrier.wait(full.index(stage), phase)
        if KIND != "none":
            for p in gl.static_range(2):
                grad = grads.index(piece + p).load(LINES)
                point = points.index(piece + p).load(LINES)
                if KIND == "relu":
                    dz = gl.where(point.to(gl.float32) > 0, grad, gl.zeros_like(grad))
                else:
                    dz = (grad.to(gl.float32) * point.to(gl.float32)).to(dtype)
                grads.index(piece + p).store(dz)
            fence_async_shared()
            barrier()
            mbarrier.arrive(made.index(stage), count=1)
        upper = warpgroup_mma(grads.index(piece).permute((1, 0)), xs.index(stage), upper, is_async=True)
        lower = warpgroup_mma(grads.index(piece + 1).permute((1, 0)), xs.index(stage), lower, is_async=True)
        if KIND != "none":
            mbarrier.wait(made.index(stage), phase)
        dx = gl.zeros((ROWS, PIECE), gl.float32, NARROW)
        for p in gl.static_range(PIECES):
            dx = warpgroup_mma(
                grads.index(stage * PIECES + p), weights.index(2 * p + C), dx, use_acc=p > 0, is_async=True
            )
        if SUMS:
            mbarrier.wait(placed.index(stage), phase)
            row = rows.index(stage).load(gl.SliceLayout(0, gl.DotOperandLayout(0, NARROW, 2)))
            low = gl.min(row, 0)
            high = gl.max(row, 0)
            line = lines.index(stage).load(gl.SliceLayout(1, NARROW))
            ones = _ones(row, low, dtype, NARROW)
        dx, upper, lower = warpgroup_mma_wait(0, deps=(dx, upper, lower))
        # In the place of the points, which are read.
        slot = points.index(piece if KIND != "none" else C)
        slot.store(dx.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dx_desc, [first, half * HALF + C * PIECE], slot)
        if SUMS:
            dz = grads.index(piece + half)
            column = (2 * C + half) * PIECE
            _sum_rows(dz, ones, line, sums, E, column, NARROW)
            for base in range(low + ROWS, high + 1, ROWS):  # with empty rows among them there are more than places
                line = _lines(offsets, num_rows, first, base, high, gl.SliceLayout(1, NARROW))
                _sum_rows(dz, _ones(row, base, dtype, NARROW), line, sums, E, column, NARROW)
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        tile += 1  # noqa: SIM113
    WHOLE: gl.constexpr = PIECE * PIECES
    e = gl.arange(0, PIECE, gl.SliceLayout(1, WIDE))
    d = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
    at = partials + gl.program_id(0) // 2 * (WHOLE * WHOLE) + 2 * C * PIECE * WHOLE
    at = at + gl.expand_dims(e * WHOLE, 1) + gl.expand_dims(d, 0)
    gl.store(at, upper)
    gl.store(at + PIECE * WHOLE, lower)


@gluon.jit(do_not_specialize=["total", "num_rows"])
def _linear_gradients_kernel(
    grad_desc,
    point_desc,
    x_desc,
    weight_desc,
    dx_desc,
    offsets,
    partials,
    sums,
    total,
    num_rows,
    E,
    KIND: gl.constexpr,
    SUMS: gl.constexpr,
    LEVELS: gl.constexpr,
):
    dtype: gl.constexpr = grad_desc.dtype
    STAGES: gl.constexpr = 3 if KIND == "none" else 2
    POINTS: gl.constexpr = 2 if KIND == "none" else STAGES * PIECES
    grads = gl.allocate_shared_memory(dtype, [STAGES * PIECES] + grad_desc.block_type.shape, grad_desc.layout)
    points = gl.allocate_shared_memory(dtype, [POINTS] + grad_desc.block_type.shape, grad_desc.layout)
    xs = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [2 * PIECES] + weight_desc.block_type.shape, weight_desc.layout)
    rows = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lines = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    placed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Only the first of the pair is waited for.
    once = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(made.index(i), count=2)
        mbarrier.init(placed.index(i), count=1)
    mbarrier.init(once.index(0), count=1)
    mbarrier.init(once.index(1), count=1)
    fence_async_shared()
    barriers = (full, empty, made, placed, once.index(0))
    gl.warp_specialize(
        [
            (_multiply, (dx_desc, grads, points, xs, weights, rows, lines, barriers, offsets, partials, sums,
                         num_rows, total, E, KIND, SUMS, 0)),
            (_multiply, (dx_desc, grads, points, xs, weights, rows, lines, barriers, offsets, partials, sums,
                         num_rows, total, E, KIND, SUMS, 1)),
            (_load, (grad_desc, point_desc, x_desc, weight_desc, grads, points, xs, weights, barriers, total, KIND)),
            (_place, (rows, lines, barriers, offsets, num_rows, total if SUMS else 0, LEVELS)),
        ],
        [4, 1, 1],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_linear_gradients_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)


@triton.jit
def _add(partials, out, count, E, D, at, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Elements `at` of the sum of `count` matrices of WIDTH x WIDTH, cut to E x D."""
    total = tl.zeros([AT_ONCE, at.shape[0]], tl.float32)
    for start in range(0, count, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)[:, None]
        total += tl.load(partials + number * (WIDTH * WIDTH) + at[None, :], mask=number < count, other=0)
    row, column = at // WIDTH, at % WIDTH
    inside = (row < E) & (column < D)
    tl.store(out + row * D + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join(sums, offsets, row, num_rows, E, ROWS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Puts the sum of a row together that several tiles have; nothing is the sum of an empty one."""
    begin = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    first, last = begin // ROWS, (end - 1) // ROWS
    if (begin == end) | (first < last):
        column = tl.arange(0, WIDTH)[None, :]
        total = tl.zeros([AT_ONCE, WIDTH], tl.float32)
        for start in range(first, tl.where(begin < end, last + 1, first), AT_ONCE):
            tile = start + tl.arange(0, AT_ONCE)[:, None]
            line = num_rows + tile * 2 + (tile == first).to(tl.int64)
            total += tl.load(sums + line * E + column, mask=(tile <= last) & (column < E), other=0)
        column = tl.arange(0, WIDTH)
        tl.store(sums + row * E + column, tl.sum(total, 0), mask=column < E)


@triton.jit(do_not_specialize=["count", "num_rows"])
def _linear_finish_kernel(
    partials,
    dw,
    sums,
    offsets,
    count,
    num_rows,
    E,
    D,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs add up the gradient of the weight, and each of the others the sum of a row."""
    ADDS: tl.constexpr = WIDTH * WIDTH // BLOCK
    if tl.program_id(0) < ADDS:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        _add(partials, dw, count, E, D, at, WIDTH, AT_ONCE)
    else:
        _join(sums, offsets, (tl.program_id(0) - ADDS).to(tl.int64), num_rows, E, ROWS, WIDTH, AT_ONCE)


_launch_finish = Launcher(_linear_finish_kernel)


def finish(partials: Tensor, dw: Tensor, sums: Tensor | None, offsets: Tensor | None, places: int) -> None:
    """Adds up `partials` [count, WIDTH, WIDTH] into dw [E, D], and the sums of rows that several tiles have."""
    width, inner = dw.shape
    numbers = (width, inner, places, WIDTH, 16, 256)
    num_rows = 0 if sums is None else offsets.shape[0] - 1
    if num_rows == 0:  # any tensor stands in for them
        sums = offsets = partials
    key = (dw.device, dw.dtype, offsets.dtype, aligned(offsets), *numbers)
    grid = (WIDTH * WIDTH // 256 + num_rows, 1, 1)
    _launch_finish(grid, key, partials, dw, sums, offsets, partials.shape[0], num_rows, *numbers)


@custom_op("gemsmith::jagged_linear_stream_gradients")
def gradients(
    grad: Tensor, point: Tensor, x: Tensor, offsets: Tensor, weight: Tensor, kind: str, needs_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [N, D], dweight [E, D], float32 sums of rows [B, E] or of no size).

    `kind` says what dz is: grad ("none"), grad * `point` ("given"), or grad where `point` is positive ("relu").
    """
    total, inner = x.shape
    width = grad.shape[1]
    num_rows = offsets.shape[0] - 1
    dx, dw = x.new_empty(total, inner), x.new_empty(width, inner)
    tiles = cdiv(total, ROWS.value)
    sums = x.new_empty(num_rows + 2 * tiles if needs_sums else 0, width, dtype=torch.float32)
    if total == 0:
        return dx, dw.zero_(), sums.zero_()
    grad, point, x, weight = addressable(grad), addressable(point), addressable(x), addressable(weight)
    offsets = offsets.contiguous()
    pairs = min(processors(x.device) // 2, tiles)
    partials = x.new_empty(pairs, WIDTH, WIDTH, dtype=torch.float32)
    constants = (kind, needs_sums, cdiv(steps_of(num_rows), 5))
    tile = (ROWS.value, PIECE.value)
    _launch(
        (2 * pairs, 1, 1),
        (x.device, x.dtype, offsets.dtype, aligned(offsets), width, constants),
        descriptor(grad, *tile),
        descriptor(point, *tile),
        descriptor(x, ROWS.value, HALF.value),
        descriptor(weight, PIECE.value, PIECE.value),
        descriptor(dx, *tile),
        offsets,
        partials,
        sums,
        total,
        num_rows,
        width,
        *constants,
    )
    finish(partials, dw, sums if needs_sums else None, offsets, ROWS.value)
    return dx, dw, sums[:num_rows]


@gradients.register_fake
def _(grad, point, x, offsets, weight, kind, needs_sums):
    rows = offsets.shape[0] - 1 if needs_sums else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(grad.shape[1], x.shape[1]),
        x.new_empty(rows, grad.shape[1], dtype=torch.float32),
    )
