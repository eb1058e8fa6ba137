"""`jagged_jagged_bmm` of a wide tensor with one of a few columns on Hopper: even shares of all rows; Gluon.

    out[b] = x[row b]^T @ y[row b]              x [N, W], y [N, T] -> [B, W, T]

Reading x takes all the time. A program has neighbouring rows of about its share of the places and copies them, a tile
of one row at a time, through a ring in shared memory that does not stop between rows. A row is one program's work.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.core.launch import processors
from kernels.core.operator import custom_op
from kernels.core.triton import cdiv, flat, next_power_of_2, steps_of
from kernels.jagged.triton.bmm import jagged_backward, save_jagged

COLUMNS = 8  # of the narrowest product of tensor cores
VECTOR = 8  # elements of a copy of 16 bytes
PROGRAMS = 3  # of a multiprocessor; a fourth would have room for its ring, but all have fewer rows then
ROW_PLACES = 16  # what writing a row's matrix counts for among places


@gluon.jit
def _share(offsets, num_rows, start, STEPS: gl.constexpr, WARPS: gl.constexpr, ROW_PLACES: gl.constexpr):
    """The first row that begins at or behind `start`, where a row counts for ROW_PLACES places more than it has.

    `num_rows` if none does, as where the values go on behind the last row.
    """
    BITS: gl.constexpr = 10  # of rows that are looked at together, because steps wait for each other
    LEVELS: gl.constexpr = (STEPS + BITS - 1) // BITS
    way = gl.arange(0, 1 << BITS, layout=gl.BlockedLayout([(1 << BITS) // 32 // WARPS], [32], [WARPS], [0]))
    row = num_rows * 0
    for level in gl.static_range(LEVELS):
        step = 1 << (BITS * (LEVELS - 1 - level))
        candidate = row + way * step
        begin = gl.load(offsets + gl.minimum(candidate, num_rows)).to(gl.int64)
        before = (candidate <= num_rows) & (begin + candidate.to(gl.int64) * ROW_PLACES < start)
        passed = gl.sum(before.to(gl.int32), 0)
        if level == LEVELS - 1:
            row += passed
        else:
            row += gl.maximum(passed - 1, 0) * step
    return gl.minimum(row, num_rows)


@gluon.jit
def _copy(x, y, x_tile, y_tile, tall, W, x_stride,
          X_LAYOUT: gl.constexpr, Y_LAYOUT: gl.constexpr):  # fmt: skip
    """The first `tall` places from x and y on into a tile of each, zeros behind them."""
    BLOCK_L: gl.constexpr = x_tile.shape[0]
    tall = gl.minimum(tall, BLOCK_L).to(gl.int32)
    i = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, X_LAYOUT))
    w = gl.arange(0, x_tile.shape[1], layout=gl.SliceLayout(0, X_LAYOUT))
    at = x + i[:, None] * x_stride + w[None, :]
    async_copy.async_copy_global_to_shared(x_tile, at, mask=(i < tall)[:, None] & (w < W)[None, :])
    i = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, Y_LAYOUT))
    t = gl.arange(0, y_tile.shape[1], layout=gl.SliceLayout(0, Y_LAYOUT))
    at = y + i[:, None] * y_tile.shape[1] + t[None, :]
    async_copy.async_copy_global_to_shared(y_tile, at, mask=(i < tall)[:, None] & (t < y_tile.shape[1])[None, :])
    async_copy.commit_group()


@gluon.jit
def _onwards(offsets, num_rows, row, place, end, following, BLOCK_L: gl.constexpr):
    """The tile after that at `place` of `row`, in the same row or the next; `following` is the end of that one."""
    place += BLOCK_L
    if place >= end:
        row += 1
        place = end
        end = following
        following = gl.load(offsets + gl.minimum(row + 2, num_rows)).to(gl.int64)
    return row, place, end, following


@gluon.jit(do_not_specialize=["total", "num_rows"])
def _bmm_stream_kernel(
    x,
    y,
    offsets,
    out,
    num_rows,
    total,
    W,
    x_stride,
    T: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_L: gl.constexpr,
    BLOCK_W: gl.constexpr,
    COLUMNS: gl.constexpr,
    VECTOR: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_PLACES: gl.constexpr,
):
    X_COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [WARPS, 1], [1, 0])
    Y_COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    X_SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, order=[1, 0])
    Y_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    dtype: gl.constexpr = x.dtype.element_ty
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_L, BLOCK_W], X_SHARED)
    y_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_L, COLUMNS], Y_SHARED)
    number = gl.program_id(0).to(gl.int64)
    weight = total + num_rows.to(gl.int64) * ROW_PLACES
    row = _share(offsets, num_rows, number * weight // gl.num_programs(0), STEPS, WARPS, ROW_PLACES)
    last_row = _share(offsets, num_rows, (number + 1) * weight // gl.num_programs(0), STEPS, WARPS, ROW_PLACES)
    place = gl.load(offsets + row).to(gl.int64)
    end = gl.load(offsets + gl.minimum(row + 1, num_rows)).to(gl.int64)
    following = gl.load(offsets + gl.minimum(row + 2, num_rows)).to(gl.int64)
    # What is copied is STAGES - 1 tiles ahead of what is multiplied.
    ahead_row, ahead, ahead_end, ahead_following = row, place, end, following
    for stage in gl.static_range(STAGES - 1):
        tall = gl.where(ahead_row < last_row, ahead_end - ahead, 0)
        _copy(x + ahead * x_stride, y + ahead * COLUMNS, x_ring.index(stage), y_ring.index(stage), tall, W, x_stride,
              X_COPY, Y_COPY)  # fmt: skip
        ahead_row, ahead, ahead_end, ahead_following = _onwards(
            offsets, num_rows, ahead_row, ahead, ahead_end, ahead_following, BLOCK_L
        )
    w = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(1, PRODUCT))
    t = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
    out_at = w[:, None] * T + t[None, :]
    inside = (w < W)[:, None] & (t < T)[None, :]
    result = gl.zeros([BLOCK_W, COLUMNS], gl.float32, PRODUCT)
    full = 0
    free = STAGES - 1
    while row < last_row:
        async_copy.wait_group(STAGES - 2)
        left = x_ring.index(full).permute((1, 0)).load(LEFT)
        right = y_ring.index(full).load(RIGHT)
        # Into the tile that was read a round ago; the compiler's barrier for the loads above is between.
        tall = gl.where(ahead_row < last_row, ahead_end - ahead, 0)
        _copy(x + ahead * x_stride, y + ahead * COLUMNS, x_ring.index(free), y_ring.index(free), tall, W, x_stride,
              X_COPY, Y_COPY)  # fmt: skip
        ahead_row, ahead, ahead_end, ahead_following = _onwards(
            offsets, num_rows, ahead_row, ahead, ahead_end, ahead_following, BLOCK_L
        )
        result = mma_v2(left, right, result)
        if place + BLOCK_L >= end:
            gl.store(out + row.to(gl.int64) * W * T + out_at, result.to(dtype), mask=inside)
            result = gl.zeros([BLOCK_W, COLUMNS], gl.float32, PRODUCT)
        row, place, end, following = _onwards(offsets, num_rows, row, place, end, following, BLOCK_L)
        full = gl.where(full == STAGES - 1, 0, full + 1)
        free = gl.where(free == STAGES - 1, 0, free + 1)
    async_copy.wait_group(0)


@functools.cache
def config(width: int) -> dict[str, int]:
    """Constants of the kernel."""
    return {
        "BLOCK_L": 32,
        "BLOCK_W": next_power_of_2(width),
        "COLUMNS": COLUMNS,
        "VECTOR": VECTOR,
        "STAGES": 3,
        "WARPS": 4,
        "ROW_PLACES": ROW_PLACES,
        "num_warps": 4,
    }


@custom_op("gemsmith::jagged_jagged_bmm_stream")
def jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """x [N, W], y [N, T] -> [B, W, T], W from 64 to 256 in steps of 16, T up to 8."""
    total, width = x.shape
    few = y.shape[1]
    num_rows = offsets.shape[0] - 1
    out = x.new_empty(num_rows, width, few)
    if num_rows == 0:
        return out
    x = flat(x)
    # Copies are of whole vectors, which Triton knows of strides that divide by 16.
    if x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if few < COLUMNS:
        y = torch.nn.functional.pad(y, (0, COLUMNS - few))
    y = y.contiguous()
    if y.data_ptr() % 16:
        y = y.clone()
    constants = config(width)
    tiles = cdiv(total + num_rows * ROW_PLACES, constants["BLOCK_L"])
    _bmm_stream_kernel[(min(tiles, PROGRAMS * processors(x.device)),)](
        x,
        y,
        offsets.contiguous(),
        out,
        num_rows,
        total,
        width,
        x.stride(0),
        T=few,
        STEPS=steps_of(num_rows),
        **constants,
    )
    return out


@jagged_bmm.register_fake
def _(x, y, offsets, longest):
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


jagged_bmm.register_autograd(jagged_backward, setup_context=save_jagged)
