"""`jagged_dense_bmm` with matrices of a few columns on Hopper: one even stream of all places; Gluon.

    out[i] = x[i] @ y[b] for i in row b         x [N, W], y [B, W, T] -> [N, T]

Reading x takes all the time. A program has an equal share of its tiles, whichever rows these are of, so that nobody
waits for a program with a long row, and copies them through a ring in shared memory without knowing any row. Only the
matrix that a tile meets depends on its row; a tile that rows meet in is multiplied by the matrix of each.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.custom_op import custom_op
from kernels.jagged.triton_bmm import dense_backward, save_dense
from kernels.jagged.triton_common import cdiv, flat, next_power_of_2, steps_of
from kernels.launch import processors

COLUMNS = 8  # of the narrowest product of tensor cores
VECTOR = 8  # elements of a copy of 16 bytes
PROGRAMS = 4  # of a multiprocessor, as many as have room for their rings


@gluon.jit
def _copy(x, tile, tall, W, x_stride, LAYOUT: gl.constexpr, BLOCK_L: gl.constexpr, BLOCK_W: gl.constexpr):
    """The first `tall` places from x on into a tile, zeros behind them."""
    tall = gl.minimum(tall, BLOCK_L).to(gl.int32)
    i = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, LAYOUT))
    w = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(0, LAYOUT))
    at = x + i[:, None] * x_stride + w[None, :]
    async_copy.async_copy_global_to_shared(tile, at, mask=(i < tall)[:, None] & (w < W)[None, :])
    async_copy.commit_group()


@gluon.jit
def _row_of(offsets, num_rows, place, STEPS: gl.constexpr, WARPS: gl.constexpr):
    """(row that holds a place, its end); 32 offsets at a time, because steps wait for each other."""
    LEVELS: gl.constexpr = (STEPS + 4) // 5
    way = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = num_rows * 0
    for level in gl.static_range(LEVELS):
        step = 1 << (5 * (LEVELS - 1 - level))
        candidate = row + way * step
        real = candidate < num_rows
        begin = gl.load(offsets + candidate, mask=real, other=0).to(gl.int64)
        row += (gl.sum((real & (begin <= place)).to(gl.int32), 0) - 1) * step
    return row.to(gl.int64), gl.load(offsets + row + 1).to(gl.int64)


@gluon.jit(do_not_specialize=["total", "tiles", "num_rows"])
def _stream_kernel(
    x,
    offsets,
    y,
    out,
    num_rows,
    total,
    tiles,
    W,
    x_stride,
    y_stride_b,
    y_stride_w,
    y_stride_t,
    T: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_L: gl.constexpr,
    BLOCK_W: gl.constexpr,
    COLUMNS: gl.constexpr,
    VECTOR: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [WARPS, 1], [1, 0])
    FEW: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, order=[1, 0])
    ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BLOCK_L, BLOCK_W], SHARED)
    number = gl.program_id(0).to(gl.int64)
    first = number * tiles // gl.num_programs(0) * BLOCK_L
    last = gl.minimum((number + 1) * tiles // gl.num_programs(0) * BLOCK_L, total)
    for stage in gl.static_range(STAGES - 1):
        place = first + stage * BLOCK_L
        _copy(x + place * x_stride, ring.index(stage), last - place, W, x_stride, COPY, BLOCK_L, BLOCK_W)
    w = gl.arange(0, BLOCK_W, layout=gl.SliceLayout(1, FEW))
    few = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, FEW))
    y_at = y + w[:, None].to(gl.int64) * y_stride_w + few[None, :] * y_stride_t
    inside = (w < W)[:, None] & (few < T)[None, :]
    i = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, PRODUCT))
    t = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCT))
    zeros = gl.zeros([BLOCK_L, COLUMNS], gl.float32, PRODUCT)
    row, end = _row_of(offsets, num_rows, first, STEPS, WARPS)
    right = gl.convert_layout(gl.load(y_at + row * y_stride_b, mask=inside, other=0), RIGHT)
    full = 0
    free = STAGES - 1
    for start in range(first, last, BLOCK_L):
        async_copy.wait_group(STAGES - 2)
        left = ring.index(full).load(LEFT)
        # Into the tile that was read a round ago; the compiler's barrier for the load above is between.
        ahead = start + (STAGES - 1) * BLOCK_L
        _copy(x + ahead * x_stride, ring.index(free), last - ahead, W, x_stride, COPY, BLOCK_L, BLOCK_W)
        stop = gl.minimum(start + BLOCK_L, last)
        result = gl.where((start + i < end)[:, None], mma_v2(left, right, zeros), zeros)
        while end < stop:
            begin = end
            row, end = _row_of(offsets, num_rows, begin, STEPS, WARPS)
            # Always onwards, so that offsets that do not end at `total` cannot keep a GPU for ever.
            end = gl.maximum(end, begin + 1)
            right = gl.convert_layout(gl.load(y_at + row * y_stride_b, mask=inside, other=0), RIGHT)
            result = gl.where((start + i < begin)[:, None], result, mma_v2(left, right, zeros))
        at = out + start * T + i[:, None] * T + t[None, :]
        mask = (i < (stop - start).to(gl.int32))[:, None] & (t < T)[None, :]
        gl.store(at, result.to(out.dtype.element_ty), mask=mask)
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
        "WARPS": 2,
        "num_warps": 2,
    }


@custom_op("gemsmith::jagged_dense_bmm_stream")
def dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, longest: int) -> Tensor:
    """x [N, W], y [B, W, T] of any strides -> [N, T], W from 64 to 256 in steps of 16, T up to 8."""
    total, width = x.shape
    num_rows, _, few = y.shape
    out = x.new_empty(total, few)
    if total == 0:
        return out
    x = flat(x)
    # Copies are of whole vectors, which Triton knows of strides that divide by 16.
    if x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    constants = config(width)
    tiles = cdiv(total, constants["BLOCK_L"])
    _stream_kernel[(min(tiles, PROGRAMS * processors(x.device)),)](
        x,
        offsets.contiguous(),
        y,
        out,
        num_rows,
        total,
        tiles,
        width,
        x.stride(0),
        *y.stride(),
        T=few,
        STEPS=steps_of(num_rows),
        **constants,
    )
    return out


@dense_bmm.register_fake
def _(x, offsets, y, longest):
    return x.new_empty(x.shape[0], y.shape[2])


dense_bmm.register_autograd(dense_backward, setup_context=save_dense)
