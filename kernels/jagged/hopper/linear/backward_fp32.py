"""All gradients of `jagged_linear` on Hopper in tf32 from one reading of what they need, as `hopper.linear.backward`.

Tensor cores take float32 operands from shared memory only with what is summed over along their lines. The columns of
the gradient lie so for that of x, whose product is with the weight turned round, W^T dz^T. The sum of the weight's is
over places: dz comes by registers, which any order does, and x is turned round in place by the warpgroup that makes dz.
"""

from __future__ import annotations

import torch
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
from kernels.jagged.hopper.linear.backward import WIDTH, finish
from kernels.jagged.hopper.linear.tiles import descriptor, rows_of
from kernels.jagged.triton import elementwise
from kernels.jagged.triton.segment import reduce

PLACES = gl.constexpr(32)  # of a tile: a line of 128 bytes when x is turned round
BLOCK = gl.constexpr(64)  # columns of dz that are multiplied at a time
BLOCKS = gl.constexpr(WIDTH // 64)
HALF = gl.constexpr(128)  # columns of x
TURNED = gl.constexpr(2)  # tiles of x
HELD = gl.constexpr(4)  # tiles whose rows are known
NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SPAN_OUT = range(200, WIDTH + 1, 8)  # of E; that of D is SPAN
SHORT = 8  # places of a row; with fewer on average their sums are what takes longest

# Four warpgroups fill the register file; those that load leave theirs to the others.
_MAX_REGISTERS = 128
_CONSUMER_REGISTERS = gl.constexpr(200)
_MAKER_REGISTERS = gl.constexpr(56)
_LOADER_REGISTERS = gl.constexpr(56)


@gluon.jit
def _next(slot, phase, COUNT: gl.constexpr):
    """The slot behind `slot` in a ring, and the phase of its barriers."""
    slot += 1
    last = slot == COUNT
    return gl.where(last, 0, slot), phase ^ last.to(gl.int32)


@gluon.jit
def _load(grad_desc, point_desc, x_desc, weight_desc, grads, points, xs, weights, grad_bars, point_bars, x_bars, ready,
          total, KIND: gl.constexpr):  # fmt: skip
    """A warp that loads a half of the weight, then x, grad and point of tiles."""
    grad_full, grad_empty, _ = grad_bars
    point_full, point_empty = point_bars
    x_full, x_empty, _ = x_bars
    column = gl.program_id(0) % 2 * HALF
    mbarrier.expect(ready, 2 * BLOCKS * weight_desc.block_type.nbytes)
    for q in gl.static_range(BLOCKS):
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(
                weight_desc, [column + c * BLOCK, q * BLOCK], ready, weights.index(2 * q + c)
            )
    tile = 0
    slot = 0
    phase = 0
    other = 0
    other_phase = 0
    for first in range(gl.program_id(0) // 2 * PLACES, total, gl.num_programs(0) // 2 * PLACES):
        index = tile % TURNED
        mbarrier.wait(x_empty.index(index), ((tile // TURNED) & 1) ^ 1)
        mbarrier.expect(x_full.index(index), x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [first, column], x_full.index(index), xs.index(index))
        for q in gl.static_range(BLOCKS):
            mbarrier.wait(grad_empty.index(slot), phase ^ 1)
            mbarrier.expect(grad_full.index(slot), grad_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(grad_desc, [first, q * BLOCK], grad_full.index(slot), grads.index(slot))
            slot, phase = _next(slot, phase, grads.shape[0])
            if KIND != "none":
                mbarrier.wait(point_empty.index(other), other_phase ^ 1)
                mbarrier.expect(point_full.index(other), point_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    point_desc, [first, q * BLOCK], point_full.index(other), points.index(other)
                )
                other, other_phase = _next(other, other_phase, points.shape[0])
        tile += 1  # noqa: SIM113


@gluon.jit
def _place(ends, lines, placed, taken, offsets, num_rows, total, LEVELS: gl.constexpr):
    """A warp that finds for each place of a tile where its row ends there, and where the sum of that goes.

    The sum of a row goes to its line of `sums` if the tile has all of it. Else it goes to one of two lines of the tile
    behind all rows: the second one is for a row that begins here and goes on in the next tile.
    """
    tile = 0
    for first in range(gl.program_id(0) // 2 * PLACES, total, gl.num_programs(0) // 2 * PLACES):
        index = tile % HELD
        row = rows_of(offsets, num_rows, first, total, PLACES, LEVELS)
        begin = gl.load(offsets + row).to(gl.int32)
        end = gl.load(offsets + row + 1).to(gl.int32)
        whole = (begin >= first) & (end <= first + PLACES)
        line = gl.where(whole, row, num_rows + first // PLACES * 2 + (begin >= first).to(gl.int32))
        behind = 1 + gl.arange(0, PLACES, row.type.layout)
        mbarrier.wait(taken.index(index), ((tile // HELD) & 1) ^ 1)
        ends.index(index).store(gl.maximum(gl.minimum(end - first, PLACES), behind))
        lines.index(index).store(gl.where(first + behind <= end, line, -1))  # -1 for values behind all rows
        barrier()
        mbarrier.arrive(placed.index(index), count=1)
        tile += 1  # noqa: SIM113


@gluon.jit
def _number(numbers, place):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(numbers.index(place).load(ONE), 0)


@gluon.jit
def _sum_rows(grads, ends, lines, grad_bars, placed, taken, sums, total, E):
    """Warps that sum dz over the rows of tiles, of which both programs have half of the columns: a thread has one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([PLACES, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    _, grad_empty, made = grad_bars
    half = gl.program_id(0) % 2
    place = gl.expand_dims(gl.arange(0, PLACES, gl.SliceLayout(1, LAYOUT)), 1)
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    each_end = ends._reinterpret(gl.int32, [HELD * PLACES, 1], NUMBERS)
    each_line = lines._reinterpret(gl.int32, [HELD * PLACES, 1], NUMBERS)
    tile = 0
    slot = 0
    phase = 0
    for first in range(gl.program_id(0) // 2 * PLACES, total, gl.num_programs(0) // 2 * PLACES):
        index = tile % HELD
        mbarrier.wait(placed.index(index), (tile // HELD) & 1)
        for q in gl.static_range(BLOCKS):
            mbarrier.wait(made.index(slot), phase)
            if q % 2 == half:
                dz = grads.index(slot).load(LAYOUT)
                column = q * BLOCK + columns
                begin = 0
                while begin < gl.minimum(total - first, PLACES):
                    end = _number(each_end, index * PLACES + begin)
                    line = _number(each_line, index * PLACES + begin)
                    result = gl.sum(gl.where((place >= begin) & (place < end), dz, 0.0), 0)
                    gl.store(sums + line.to(gl.int64) * E + column, result, (line >= 0) & (column < E))
                    begin = end
            barrier()
            mbarrier.arrive(grad_empty.index(slot), count=1)
            slot, phase = _next(slot, phase, grads.shape[0])
        barrier()
        mbarrier.arrive(taken.index(index), count=1)
        tile += 1  # noqa: SIM113


@gluon.jit
def _make(grads, points, xs, turned, grad_bars, point_bars, x_bars, total, KIND: gl.constexpr):
    """Warps that turn x round, [PLACES, HALF] -> [HALF, PLACES], and make dz in the place of grad."""
    # A thread writes 16 bytes, and eight neighbouring ones write to lines that differ.
    TURN: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [2, 2], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    grad_full, _, made = grad_bars
    point_full, point_empty = point_bars
    x_full, _, x_turned = x_bars
    tile = 0
    slot = 0
    phase = 0
    other = 0
    other_phase = 0
    for _first in range(gl.program_id(0) // 2 * PLACES, total, gl.num_programs(0) // 2 * PLACES):
        index = tile % TURNED
        mbarrier.wait(x_full.index(index), (tile // TURNED) & 1)
        x = xs.index(index).load(TURN)
        barrier()
        turned.index(index).permute((1, 0)).store(x)
        fence_async_shared()
        barrier()
        mbarrier.arrive(x_turned.index(index), count=1)
        for _q in gl.static_range(BLOCKS):
            mbarrier.wait(grad_full.index(slot), phase)
            if KIND != "none":
                mbarrier.wait(point_full.index(other), other_phase)
                grad = grads.index(slot).load(LINES)
                point = points.index(other).load(LINES)
                dz = gl.where(point > 0, grad, 0.0) if KIND == "relu" else grad * point
                grads.index(slot).store(dz)
                fence_async_shared()
                barrier()
                mbarrier.arrive(point_empty.index(other), count=1)
                other, other_phase = _next(other, other_phase, points.shape[0])
            mbarrier.arrive(made.index(slot), count=1)
            slot, phase = _next(slot, phase, grads.shape[0])
        tile += 1  # noqa: SIM113


@gluon.jit
def _multiply(grads, turned, weights, grad_bars, x_bars, ready, dx_out, partials, total, D: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Consumer C: columns [64 C, 64 C + 64) of this half of dx, and every other block of lines of dweight."""
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLACES, 8])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, WIDE, 1)
    _, grad_empty, made = grad_bars
    _, x_empty, x_turned = x_bars
    half = gl.program_id(0) % 2
    upper = gl.zeros((BLOCK, HALF), gl.float32, WIDE)
    lower = gl.zeros((BLOCK, HALF), gl.float32, WIDE)
    part = gl.zeros((BLOCK, PLACES), gl.float32, OPERAND)
    d = gl.expand_dims(half * HALF + C * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW)), 1)
    mbarrier.wait(ready, 0)
    tile = 0
    slot = 0
    phase = 0
    for first in range(gl.program_id(0) // 2 * PLACES, total, gl.num_programs(0) // 2 * PLACES):
        index = tile % TURNED
        x = turned.index(index).permute((1, 0))
        dx = gl.zeros((BLOCK, PLACES), gl.float32, NARROW)
        before = slot
        for q in gl.static_range(BLOCKS):
            mbarrier.wait(made.index(slot), phase)
            dz = grads.index(slot).permute((1, 0))
            dx = warpgroup_mma(weights.index(2 * q + C), dz, dx, use_acc=q > 0, is_async=True)
            if q > 0:
                dx, upper, lower, part = warpgroup_mma_wait(1, deps=(dx, upper, lower, part))
                barrier()
                mbarrier.arrive(grad_empty.index(before), count=1)
            if q == C:
                mbarrier.wait(x_turned.index(index), (tile // TURNED) & 1)
                part = dz.load(OPERAND)
                upper = warpgroup_mma(part, x, upper, is_async=True)
            elif q == 2 + C:
                part = dz.load(OPERAND)
                lower = warpgroup_mma(part, x, lower, is_async=True)
            before = slot
            slot, phase = _next(slot, phase, grads.shape[0])
        dx, lower, part = warpgroup_mma_wait(0, deps=(dx, lower, part))
        barrier()
        mbarrier.arrive(grad_empty.index(before), count=1)
        mbarrier.arrive(x_empty.index(index), count=1)
        place = gl.expand_dims(first + gl.arange(0, PLACES, gl.SliceLayout(0, NARROW)), 0)
        gl.store(dx_out + place.to(gl.int64) * D + d, dx, (place < total) & (d < D))
        tile += 1  # noqa: SIM113
    WHOLE: gl.constexpr = BLOCK * BLOCKS
    e = gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
    at = partials + gl.program_id(0) // 2 * (WHOLE * WHOLE) + C * BLOCK * WHOLE
    at = at + gl.expand_dims(e * WHOLE, 1) + gl.expand_dims(column, 0)
    gl.store(at, upper)
    gl.store(at + 2 * BLOCK * WHOLE, lower)


@gluon.jit(do_not_specialize=["total", "num_rows"])
def _linear_gradients_single_kernel(
    grad_desc,
    point_desc,
    x_desc,
    weight_desc,
    dx,
    offsets,
    partials,
    sums,
    total,
    num_rows,
    E,
    D: gl.constexpr,
    KIND: gl.constexpr,
    SUMS: gl.constexpr,
    LEVELS: gl.constexpr,
):
    GRADS: gl.constexpr = 8 if KIND == "none" else 5
    POINTS: gl.constexpr = 8 - GRADS if KIND != "none" else 1
    grads = gl.allocate_shared_memory(gl.float32, [GRADS] + grad_desc.block_type.shape, grad_desc.layout)
    if KIND != "none":
        points = gl.allocate_shared_memory(gl.float32, [POINTS] + grad_desc.block_type.shape, grad_desc.layout)
    else:
        points = grads
    xs = gl.allocate_shared_memory(gl.float32, [TURNED] + x_desc.block_type.shape, x_desc.layout)
    turned = xs._reinterpret(gl.float32, [TURNED, HALF, PLACES], gl.NVMMASharedLayout(128, 32, 2))
    weights = gl.allocate_shared_memory(gl.float32, [2 * BLOCKS] + weight_desc.block_type.shape, weight_desc.layout)
    ends = gl.allocate_shared_memory(gl.int32, [HELD, PLACES], NUMBERS)
    lines = gl.allocate_shared_memory(gl.int32, [HELD, PLACES], NUMBERS)
    grad_full = gl.allocate_shared_memory(gl.int64, [GRADS, 1], mbarrier.MBarrierLayout())
    grad_empty = gl.allocate_shared_memory(gl.int64, [GRADS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [GRADS, 1], mbarrier.MBarrierLayout())
    point_full = gl.allocate_shared_memory(gl.int64, [POINTS, 1], mbarrier.MBarrierLayout())
    point_empty = gl.allocate_shared_memory(gl.int64, [POINTS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [TURNED, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [TURNED, 1], mbarrier.MBarrierLayout())
    x_turned = gl.allocate_shared_memory(gl.int64, [TURNED, 1], mbarrier.MBarrierLayout())
    placed = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    once = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GRADS):
        mbarrier.init(grad_full.index(i), count=1)
        mbarrier.init(grad_empty.index(i), count=3 if SUMS else 2)
        mbarrier.init(made.index(i), count=1)
    for i in gl.static_range(POINTS):
        mbarrier.init(point_full.index(i), count=1)
        mbarrier.init(point_empty.index(i), count=1)
    for i in gl.static_range(TURNED):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
        mbarrier.init(x_turned.index(i), count=1)
    for i in gl.static_range(HELD):
        mbarrier.init(placed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    mbarrier.init(once.index(0), count=1)
    fence_async_shared()
    grad_bars = (grad_full, grad_empty, made)
    point_bars = (point_full, point_empty)
    x_bars = (x_full, x_empty, x_turned)
    gl.warp_specialize(
        [
            (_multiply, (grads, turned, weights, grad_bars, x_bars, once.index(0), dx, partials, total, D, 0)),
            (_multiply, (grads, turned, weights, grad_bars, x_bars, once.index(0), dx, partials, total, D, 1)),
            (_make, (grads, points, xs, turned, grad_bars, point_bars, x_bars, total, KIND)),
            (_sum_rows, (grads, ends, lines, grad_bars, placed, taken, sums, total if SUMS else 0, E)),
            (_load, (grad_desc, point_desc, x_desc, weight_desc, grads, points, xs, weights, grad_bars, point_bars,
                     x_bars, once.index(0), total, KIND)),
            (_place, (ends, lines, placed, taken, offsets, num_rows, total if SUMS else 0, LEVELS)),
        ],
        [4, 4, 2, 1, 1],
        [_CONSUMER_REGISTERS, _MAKER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_linear_gradients_single_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)


def _apart(grad, point, x, offsets, weight, kind):
    """A kernel for each."""
    if kind == "none":
        return grad @ weight, grad.mT @ x, reduce(grad, offsets, "sum", torch.float32)
    sums = grad.new_empty(offsets.shape[0] - 1, grad.shape[1])
    dz, sums = elementwise.gradient(grad, point, sums, offsets, "none", kind)
    return dz @ weight, dz.mT @ x, sums


@custom_op("gemsmith::jagged_linear_stream_gradients_single")
def gradients_single(
    grad: Tensor, point: Tensor, x: Tensor, offsets: Tensor, weight: Tensor, kind: str, needs_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [N, D], dweight [E, D], sums of rows [B, E] or of no size), all float32.

    `kind` says what dz is: grad ("none"), grad * `point` ("given"), or grad where `point` is positive ("relu").
    """
    total, inner = x.shape
    width = grad.shape[1]
    num_rows = offsets.shape[0] - 1
    dx, dw = x.new_empty(total, inner), x.new_empty(width, inner)
    tiles = cdiv(total, PLACES.value)
    sums = x.new_empty(num_rows + 2 * tiles if needs_sums else 0, width)
    if total == 0:
        return dx, dw.zero_(), sums.zero_()
    if needs_sums and total < SHORT * num_rows:
        return _apart(grad, point, x, offsets, weight, kind)
    grad, point, x, turned = addressable(grad), addressable(point), addressable(x), addressable(weight.mT)
    offsets = offsets.contiguous()
    pairs = min(processors(x.device) // 2, tiles)
    partials = x.new_empty(pairs, WIDTH, WIDTH)
    constants = (inner, kind, needs_sums, cdiv(steps_of(num_rows), 5))
    _launch(
        (2 * pairs, 1, 1),
        (x.device, offsets.dtype, aligned(offsets), width, constants),
        descriptor(grad, PLACES.value, BLOCK.value),
        descriptor(point, PLACES.value, BLOCK.value),
        descriptor(x, PLACES.value, HALF.value),
        descriptor(turned, BLOCK.value, BLOCK.value),
        dx,
        offsets,
        partials,
        sums,
        total,
        num_rows,
        width,
        *constants,
    )
    finish(partials, dw, sums if needs_sums else None, offsets, PLACES.value)
    return dx, dw, sums[:num_rows]


@gradients_single.register_fake
def _(grad, point, x, offsets, weight, kind, needs_sums):
    rows = offsets.shape[0] - 1 if needs_sums else 0
    return x.new_empty(x.shape), x.new_empty(grad.shape[1], x.shape[1]), x.new_empty(rows, grad.shape[1])
