"""Grouped products of an MXFP8 operand with a bfloat16 one for Hopper, in Gluon.

An E4M3 element times its power-of-two scale has four significant bits, so bfloat16 holds it exactly: with the other
operand dequantised, this is the product of two MXFP8 tensors with scales of their own every 32. The pipeline is that of
`gluon_grouped_bf16`, but each consumer first turns its blocks of codes into bfloat16 in shared memory, for the next
step while the tensor cores work on this one.

An element is converted by moving its bits to their places in a bfloat16, which makes it too small by 2^120, and one
multiplication that mends that and applies the scale. The factors are 2^32 smaller than they should be, so that scales
up to 2^39 can be applied; the sums are multiplied by 2^32. This bounds the operand of codes at both ends, unchecked: a
scale of 2^40 or more, which a block has from a largest magnitude above 1.75 * 2^47 on, turns its elements into
infinities and NaNs, and bits of an element below 2^-101 are rounded off. The dequantised operand has no such bounds.
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

from kernels.launch import processors
from kernels.mxfp8.gluon_grouped_tiles import (
    ROWS,
    descriptor,
    load_tiles,
    locate,
    seek,
    store_rows,
)

_TILE_N = gl.constexpr(256)
_BLOCK_K = gl.constexpr(64)
_STAGES = {2: 4, 3: 3}  # by blocks of 64 rows in a tile: what fits into shared memory
BLOCKS = 2
_LAG = gl.constexpr(2)

_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)

_UNIT = gl.constexpr(2.0**32)
_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_CODES_3D = gl.constexpr(gl.BlockedLayout([1, 1, 16], [8, 2, 2], [4, 1, 1], [2, 1, 0]))
# Four elements: s eeee mmm to the bits s 0000eeee mmm0000 of a bfloat16, times the factor.
_DECODE = gl.constexpr(
    """
    {
    .reg .b32 low, high, sign;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.b32 low, low, 4;
    lop3.b32 low, low, 0x07f007f0, sign, 0xEA;
    and.b32 sign, high, 0x80008000;
    shr.b32 high, high, 4;
    lop3.b32 high, high, 0x07f007f0, sign, 0xEA;
    mul.bf16x2 $0, low, $3;
    mul.bf16x2 $1, high, $4;
    }
    """
)


@gluon.jit
def _scale_pointers(scales, row, num_rows, stride, first):
    """Where the four scales of 128 elements from `first` on are for each of a block's rows.

    Rows that don't exist read the last one's.
    """
    rows = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, _CODES_3D))), num_rows - 1)
    return scales + (rows.to(gl.int64) * stride + first // 128)


@gluon.jit
def _word(scales, r, first, final):
    """The scales of the step at `r`, or of the last one of the tile if that is earlier."""
    return gl.load(scales + (gl.minimum(r, final) // 128 - first // 128))


@gluon.jit
def _decode(codes_smem, values_smem, word, r):
    """Codes [64, 64] of the step at `r` times their scales -> bfloat16, from shared memory to shared memory."""
    codes = gl.convert_layout(codes_smem.load(_CODES).reshape((ROWS, 2, 32)), _CODES_3D, assert_trivial=True)
    place = 16 * ((r // _BLOCK_K) % 2) + 8 * gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, _CODES_3D)))
    scale = (gl.expand_dims(word, 1) >> gl.expand_dims(place, 0)) & 0xFF
    bits = gl.where(scale == 255, 0x7FC0, gl.minimum(scale + 88, 255) << 7).to(gl.int16)
    factors = gl.expand_dims(bits.to(gl.bfloat16, bitcast=True), 2)
    values = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r,r", [codes.to(gl.int8, bitcast=True), factors], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    values_smem.store(gl.convert_layout(values.reshape((ROWS, 64)), _CODES))


@gluon.jit
def _products(a_smem, b_smem, values_smem, full, empty, order, done, scales, row, num_rows, stride, first, last,
              ALL: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(64 x 256 sums, 64 x 128 sums if ALL, `done` and the steps of this tile)."""
    wide = gl.zeros((ROWS, 256), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    narrow = gl.zeros((ROWS, 128), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
    some = last > first
    begin = gl.where(some, first, 0)  # an empty group may lie behind the last scale
    final = gl.maximum(last - _BLOCK_K, begin)
    stage = done % STAGES
    slot = (C * 2 + done % 2) * (BLOCKS - 1)
    # Scales are read two steps ahead of their use.
    own_scales = _scale_pointers(scales, row + C * ROWS, num_rows, stride, begin)
    own = _word(own_scales, begin + _BLOCK_K, begin, final)
    next_own = _word(own_scales, begin + 2 * _BLOCK_K, begin, final)
    if ALL:
        shared_scales = _scale_pointers(scales, row + 2 * ROWS, num_rows, stride, begin)
        shared = _word(shared_scales, begin + _BLOCK_K, begin, final)
        next_shared = _word(shared_scales, begin + 2 * _BLOCK_K, begin, final)
    mbarrier.wait(full.index(stage), (done // STAGES) & 1, pred=some)
    _decode(a_smem.index(stage * BLOCKS + C), values_smem.index(slot), gl.load(own_scales), begin)
    if ALL:
        _decode(a_smem.index(stage * BLOCKS + 2), values_smem.index(slot + 1), gl.load(shared_scales), begin)
    for r in range(first, last, _BLOCK_K):
        stage = done % STAGES
        following = (done + 1) % STAGES
        slot = (C * 2 + done % 2) * (BLOCKS - 1)
        free = (C * 2 + 1 - done % 2) * (BLOCKS - 1)
        fence_async_shared()
        b = b_smem.index(stage)
        wide = warpgroup_mma(values_smem.index(slot), b.permute((1, 0)), wide, is_async=True)
        if ALL:
            half = b.slice(C * 128, 128, 0).permute((1, 0))
            narrow = warpgroup_mma(values_smem.index(slot + 1), half, narrow, is_async=True)
            wide, narrow = warpgroup_mma_wait(2, deps=(wide, narrow))
        else:
            wide = warpgroup_mma_wait(1, deps=(wide,))
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=r > first)
        if C == 0:
            mbarrier.arrive(order, count=1, pred=done == _LAG)
        # Behind the last step there is nothing to wait for, and what is decoded is not used.
        mbarrier.wait(full.index(following), ((done + 1) // STAGES) & 1, pred=r < final)
        _decode(a_smem.index(following * BLOCKS + C), values_smem.index(free), own, r + _BLOCK_K)
        own = next_own
        next_own = _word(own_scales, r + 3 * _BLOCK_K, begin, final)
        if ALL:
            _decode(a_smem.index(following * BLOCKS + 2), values_smem.index(free + 1), shared, r + _BLOCK_K)
            shared = next_shared
            next_shared = _word(shared_scales, r + 3 * _BLOCK_K, begin, final)
        done += 1
    wide, narrow = warpgroup_mma_wait(0, deps=(wide, narrow))
    mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=some)
    return wide * _UNIT, narrow * _UNIT, done


@gluon.jit
def _multiply(out_desc, out, scales, num_rows, stride, a_smem, b_smem, values_smem, out_smem, full, empty, order, ends,
              num_groups, tiles_m, tiles_n, M, N, K, WGRAD: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Consumer C."""
    TILE_M: gl.constexpr = BLOCKS * ROWS
    tile = gl.program_id(0)
    zero = gl.to_tensor(0)
    group, base = seek(tile, zero, zero, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    done = 0
    buffer = out_smem.index(C)
    if C == 1:
        mbarrier.wait(order, 0)
    while group < num_groups:
        row, count, column, first, last = locate(tile, group, base, ends, tiles_m, tiles_n, M, K, TILE_M, WGRAD)
        out_row = row
        if WGRAD:
            out_row += group * M
        column *= _TILE_N
        if BLOCKS == 2:
            wide, _, done = _products(
                a_smem, b_smem, values_smem, full, empty, order, done, scales, row, num_rows, stride, first, last,
                False, BLOCKS, STAGES, C,
            )  # fmt: skip
            store_rows(out_desc, out, buffer, wide, out_row + C * ROWS, count - C * ROWS, column, N)
        elif count > 2 * ROWS:
            wide, narrow, done = _products(
                a_smem, b_smem, values_smem, full, empty, order, done, scales, row, num_rows, stride, first, last,
                True, BLOCKS, STAGES, C,
            )  # fmt: skip
            store_rows(out_desc, out, buffer, wide, out_row + C * ROWS, count - C * ROWS, column, N)
            store_rows(out_desc, out, buffer, narrow, out_row + 2 * ROWS, count - 2 * ROWS, column + C * 128, N)
        else:
            wide, _, done = _products(
                a_smem, b_smem, values_smem, full, empty, order, done, scales, row, num_rows, stride, first, last,
                False, BLOCKS, STAGES, C,
            )  # fmt: skip
            store_rows(out_desc, out, buffer, wide, out_row + C * ROWS, count - C * ROWS, column, N)
        tile += gl.num_programs(0)
        group, base = seek(tile, group, base, ends, num_groups, tiles_m, tiles_n, TILE_M, WGRAD)
    if C == 0:
        mbarrier.arrive(order, count=1, pred=done <= _LAG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "tiles_m", "tiles_n", "M", "num_rows", "stride"])
def _kernel(
    a_desc,
    b_desc,
    out_desc,
    out,
    scales,
    num_rows,
    stride,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    WGRAD: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * BLOCKS] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [4 * (BLOCKS - 1), ROWS, _BLOCK_K], b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = orders.index(0)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(order, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out, scales, num_rows, stride, a_smem, b_smem, values, out_smem, full, empty, order,
                         ends, num_groups, tiles_m, tiles_n, M, N, K, WGRAD, BLOCKS, STAGES, 0)),
            (_multiply, (out_desc, out, scales, num_rows, stride, a_smem, b_smem, values, out_smem, full, empty, order,
                         ends, num_groups, tiles_m, tiles_n, M, N, K, WGRAD, BLOCKS, STAGES, 1)),
            (load_tiles, (a_desc, b_desc, b_desc, a_smem, b_smem, b_smem, full, empty, ends, num_groups, tiles_m,
                          tiles_n, M, N, K, _TILE_N, _BLOCK_K, BLOCKS, STAGES, WGRAD, False, False, False)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


def grouped_mm(codes: Tensor, scales: Tensor, b: Tensor, ends: Tensor, blocks: int = BLOCKS) -> Tensor:
    """[M, N] bfloat16: codes [M, K] e4m3 times scales [M, K / 32] uint8, times the group's b [E, N, K] bfloat16."""
    groups, n, k = b.shape
    out = torch.empty(codes.shape[0], n, dtype=torch.bfloat16, device=codes.device)
    _launch(codes, scales, b.flatten(0, 1), out, out, ends, (groups, 0, -(-n // _TILE_N.value), 0, n, k), False, blocks)
    return out


def grouped_wgrad(
    codes: Tensor, scales: Tensor, x_t: Tensor, ends: Tensor, dtype: torch.dtype, blocks: int = BLOCKS
) -> Tensor:
    """[E, N, K]: codes [N, M] with scales [N, M / 32], times x_t [K, M] bfloat16, over each group's columns."""
    n, k, groups = codes.shape[0], x_t.shape[0], ends.shape[0]
    out = torch.empty(groups, n, k, dtype=dtype, device=codes.device)
    sizes = (groups, -(-n // (blocks * ROWS.value)), -(-k // _TILE_N.value), n, k, 0)
    _launch(codes, scales, x_t, out, out.flatten(0, 1), ends, sizes, True, blocks)
    return out


def _launch(
    codes: Tensor,
    scales: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Tensor,
    ends: Tensor,
    sizes: tuple[int, ...],
    wgrad: bool,
    blocks: int,
) -> None:
    words = scales.view(torch.int32)
    _kernel[(processors(codes.device),)](
        descriptor(codes, [ROWS.value, _BLOCK_K.value]),
        descriptor(b, [_TILE_N.value, _BLOCK_K.value]),
        descriptor(rows, [ROWS.value, 64]),
        out,
        words,
        codes.shape[0],
        words.stride(0),
        ends,
        *sizes,
        WGRAD=wgrad,
        BLOCKS=blocks,
        STAGES=_STAGES[blocks],
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )
