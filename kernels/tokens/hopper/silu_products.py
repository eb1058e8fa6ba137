"""Products with SiLU in their epilogue for Hopper, in Gluon: persistent, warp-specialised, TMA in and out.

Between two linear layers, z [M, N] is what the first one gives, and silu(z) what the second one reads. Made by itself,
the activation reads z and writes as much again; its gradient reads twice that. Here both are made from the sums of the
product before them:

    forward     z = x weight^T + bias,  y = silu(z)               x [M, K], weight [N, K]
    backward    dz = (dy weight) * silu'(z), its sums by column   dy [M, K], weight [K, N]

A tile has 128 rows and 256 columns. One warpgroup loads, two compute, each 64 rows at the full width; one consumer
starts two steps behind the other, so that its products can fill the time of the other's epilogue. A program has tiles
of the same columns, whose sums it keeps in registers: they are the same bits every time.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import UncheckedDescriptor, halves, operand_layout
from kernels.core.launch import Launcher, aligned, processors
from kernels.core.triton import cdiv

_ROWS = gl.constexpr(64)  # of a consumer: a matrix instruction has 64
_COLUMNS = gl.constexpr(256)
_BLOCK_K = gl.constexpr(64)
_PIECE = gl.constexpr(64)  # columns of a result that are stored, or of z that are loaded, together
_PIECES = gl.constexpr(4)  # of a tile
_LAG = gl.constexpr(2)  # steps between the consumers; fewer than stages
_STAGES = gl.constexpr(3)  # what fits into shared memory beside four pieces of each consumer
_LOG2_E = gl.constexpr(1.4426950408889634)

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)


def product_and_silu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(z, silu(z)), each [M, N] bfloat16, of z = x weight^T + bias; x [M, K] and weight [N, K] bfloat16, bias [N].

    Rows of x and of weight are contiguous and begin at multiples of 16 bytes; N is a multiple of 8.
    """
    num_rows, width = x.shape[0], weight.shape[0]
    z, y = x.new_empty(num_rows, width), x.new_empty(num_rows, width)
    if z.numel():
        blocks = _descriptor(x, _ROWS.value, _BLOCK_K.value), _descriptor(weight, _COLUMNS.value, _BLOCK_K.value)
        _launch(blocks, z, y, bias, y, x.shape[1], backward=False)
    return z, y


def gradient_of_silu(dy: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(dz [M, N] bfloat16, its sums over the rows [N] float32) for dz = (dy weight) * silu'(z).

    dy [M, K] and weight [K, N] bfloat16 as in `product_and_silu`, z [M, N] as it returns them.
    """
    width = z.shape[1]
    dz = torch.empty_like(z)
    if not z.numel():
        return dz, z.new_zeros(width, dtype=torch.float32)
    sums = z.new_empty(2 * _programs(z.device, width) // cdiv(width, _COLUMNS.value), width, dtype=torch.float32)
    blocks = _descriptor(dy, _ROWS.value, _BLOCK_K.value), _descriptor(weight, _BLOCK_K.value, _COLUMNS.value)
    _launch(blocks, z, dz, sums, sums, dy.shape[1], backward=True)
    return dz, sums.sum(0)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = operand_layout(rows, columns, x.dtype)
    return UncheckedDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def _programs(device: torch.device, width: int) -> int:
    """How many: as many for each tile of columns as fit on the device together, one at least."""
    columns = cdiv(width, _COLUMNS.value)
    return max(1, processors(device) // columns) * columns


def _launch(
    operands: tuple[TensorDescriptor, TensorDescriptor],
    z: Tensor,
    out: Tensor,
    bias: Tensor,
    sums: Tensor,
    depth: int,
    *,
    backward: bool,
) -> None:
    num_rows, width = z.shape
    piece = _ROWS.value, _PIECE.value
    _launch_silu(
        (_programs(z.device, width), 1, 1),
        (z.device, bias.dtype, aligned(bias), width, depth, backward),
        *operands,
        _descriptor(z, *piece),
        _descriptor(out, *piece),
        bias,
        sums,
        num_rows,
        width,
        depth,
        backward,
    )


@gluon.jit
def _sigmoid(x):
    divisor = 1.0 + gl.exp2(-x * _LOG2_E)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], gl.float32, True, 1)


@gluon.jit
def _fetch(z_desc, z_smem, z_full, row, column, step, steps, C: gl.constexpr):
    """Early in a tile, load z of a consumer's rows to where the results before are still read from at its begin."""
    if step == gl.minimum(_LAG, steps - 1):
        tma.store_wait(0)
        mbarrier.expect(z_full, _PIECES * z_desc.block_type.nbytes)
        for piece in gl.static_range(_PIECES):
            smem = z_smem.index(C * _PIECES + piece)
            tma.async_copy_global_to_shared(z_desc, [row, column + piece * _PIECE], z_full, smem)


@gluon.jit
def _sums(x_smem, w_smem, z_desc, z_smem, full, empty, order, z_full, row, column, first, done, steps,
          BACKWARD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(consumer C's sums of a tile, `done` and its steps); in the backward its z is on the way, too."""
    acc = gl.zeros((_ROWS, _COLUMNS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    for step in range(steps):
        stage = done % _STAGES
        mbarrier.wait(full.index(stage), (done // _STAGES) & 1)
        x = x_smem.index(stage * 2 + C)
        w = w_smem.index(stage)
        if not BACKWARD:
            w = w.permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        if BACKWARD:
            _fetch(z_desc, z_smem, z_full, row, column, step, steps, C)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((done + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
        if C == 0:
            mbarrier.arrive(order, count=1, pred=first & (step == _LAG))
        done += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((done + _STAGES - 1) % _STAGES), count=1)
    return acc, done


@gluon.jit
def _put(desc, smem, value, row, column):
    smem.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], smem)


@gluon.jit
def _bias_of(bias, column, N, like):
    """The bias of the columns of a piece, laid out like it."""
    LAYOUT: gl.constexpr = like.type.layout
    columns = column + gl.arange(0, _PIECE, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(gl.load(bias + columns, columns < N, 0.0).to(gl.float32), 0)


@gluon.jit
def _finish_forward(z_desc, y_desc, smem, value, bias, row, column, N, PLACE: gl.constexpr):
    """Write z and y of a consumer's rows, piece by piece, through four places in shared memory in turn."""
    if value.shape[1] > _PIECE:
        left, right = halves(value)
        NEXT: gl.constexpr = PLACE if value.shape[1] > 2 * _PIECE else PLACE + 2
        _finish_forward(z_desc, y_desc, smem, left, bias, row, column, N, PLACE)
        _finish_forward(z_desc, y_desc, smem, right, bias, row, column + value.shape[1] // 2, N, NEXT)
    else:
        LAYOUT: gl.constexpr = value.type.layout
        columns = column + gl.arange(0, _PIECE, gl.SliceLayout(0, LAYOUT))
        offset = gl.load(bias + columns, columns < N, 0.0).to(gl.float32)
        z = (value + gl.expand_dims(offset, 0)).to(gl.bfloat16)
        tma.store_wait(_PIECES - 1)
        _put(z_desc, smem.index(PLACE), z, row, column)
        u = z.to(gl.float32)
        y = (u * _sigmoid(u)).to(gl.bfloat16)
        tma.store_wait(_PIECES - 1)
        _put(y_desc, smem.index(PLACE + 1), y, row, column)


@gluon.jit
def _finish_backward(dz_desc, smem, ones, value, total, row, column):
    """Write a piece of dz over z in shared memory, and from there; returns `total` [columns, 8] and its sums by column.

    They are a product with ones. Threads that added up what is theirs would need four times the registers.
    """
    LAYOUT: gl.constexpr = value.type.layout
    u = smem.load(LAYOUT).to(gl.float32)
    s = _sigmoid(u)
    _put(dz_desc, smem, (value * s * (1.0 + u * (1.0 - s))).to(gl.bfloat16), row, column)
    return warpgroup_mma(smem.permute((1, 0)), ones.permute((1, 0)), total, is_async=True)


@gluon.jit
def _store_sums(sums, total, line, column, N):
    """The 8 columns of `total` are the same."""
    of_columns = gl.sum(total, 1) * 0.125
    LAYOUT: gl.constexpr = of_columns.type.layout
    columns = column + gl.arange(0, _PIECE, LAYOUT)
    gl.store(sums + line.to(gl.int64) * N + columns, of_columns, columns < N)


@gluon.jit
def _multiply(z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
              BACKWARD: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    columns = gl.cdiv(N, _COLUMNS)
    column = gl.program_id(0) % columns * _COLUMNS
    line = gl.program_id(0) // columns
    steps = gl.cdiv(K, _BLOCK_K)
    done = 0
    tiles = 0
    total0 = gl.zeros((_PIECE, 8), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
    total1 = total0
    total2 = total0
    total3 = total0
    if C == 1:
        mbarrier.wait(order, 0)
    for row in range(line * 2 * _ROWS, M, gl.num_programs(0) // columns * 2 * _ROWS):
        own = row + C * _ROWS
        acc, done = _sums(x_smem, w_smem, z_desc, smem, full, empty, order, z_full.index(C), own, column, tiles == 0,
                          done, steps, BACKWARD, C)  # fmt: skip
        if C == 0:
            mbarrier.arrive(order, count=1, pred=(tiles == 0) & (steps <= _LAG))
        if BACKWARD:
            mbarrier.wait(z_full.index(C), tiles & 1)
            left, right = halves(acc)
            piece0, piece1 = halves(left)
            piece2, piece3 = halves(right)
            z = C * _PIECES
            total0 = _finish_backward(out_desc, smem.index(z), ones, piece0, total0, own, column)
            total1 = _finish_backward(out_desc, smem.index(z + 1), ones, piece1, total1, own, column + _PIECE)
            total2 = _finish_backward(out_desc, smem.index(z + 2), ones, piece2, total2, own, column + 2 * _PIECE)
            total3 = _finish_backward(out_desc, smem.index(z + 3), ones, piece3, total3, own, column + 3 * _PIECE)
            total0, total1, total2, total3 = warpgroup_mma_wait(0, deps=(total0, total1, total2, total3))
        else:
            _finish_forward(z_desc, out_desc, smem, acc, bias, own, column, N, C * _PIECES)
        tiles += 1
    if C == 0:
        mbarrier.arrive(order, count=1, pred=tiles == 0)
    if BACKWARD:
        line = line * 2 + C
        _store_sums(sums, total0, line, column, N)
        _store_sums(sums, total1, line, column + _PIECE, N)
        _store_sums(sums, total2, line, column + 2 * _PIECE, N)
        _store_sums(sums, total3, line, column + 3 * _PIECE, N)
    tma.store_wait(0)


@gluon.jit
def _load(x_desc, w_desc, x_smem, w_smem, full, empty, M, N, K, BACKWARD: gl.constexpr):
    """The loading warpgroup: the ring of stages never stops between tiles."""
    columns = gl.cdiv(N, _COLUMNS)
    column = gl.program_id(0) % columns * _COLUMNS
    first = gl.program_id(0) // columns * 2 * _ROWS
    loaded = 0
    for row in range(first, M, gl.num_programs(0) // columns * 2 * _ROWS):
        for k in range(0, K, _BLOCK_K):
            stage = loaded % _STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((loaded // _STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(x_desc, [row + c * _ROWS, k], bar, x_smem.index(stage * 2 + c))
            if BACKWARD:
                tma.async_copy_global_to_shared(w_desc, [k, column], bar, w_smem.index(stage))
            else:
                tma.async_copy_global_to_shared(w_desc, [column, k], bar, w_smem.index(stage))
            loaded += 1


@gluon.jit(do_not_specialize=["M"])
def _silu_product_kernel(
    x_desc,
    w_desc,
    z_desc,
    out_desc,
    bias,
    sums,
    M,
    N,
    K,
    BACKWARD: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [_STAGES * 2] + x_desc.block_type.shape, x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [_STAGES] + w_desc.block_type.shape, w_desc.layout)
    smem = gl.allocate_shared_memory(dtype, [2 * _PIECES] + z_desc.block_type.shape, z_desc.layout)
    ones = gl.allocate_shared_memory(dtype, [8, _ROWS], gl.NVMMASharedLayout.get_default_for([8, _ROWS], dtype))
    ones.store(gl.full((8, _ROWS), 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    orders = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    order = orders.index(0)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for c in gl.static_range(2):
        mbarrier.init(z_full.index(c), count=1)
    mbarrier.init(order, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
                         BACKWARD, 0)),
            (_multiply, (z_desc, out_desc, x_smem, w_smem, smem, ones, full, empty, order, z_full, bias, sums, M, N, K,
                         BACKWARD, 1)),
            (_load, (x_desc, w_desc, x_smem, w_smem, full, empty, M, N, K, BACKWARD)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch_silu = Launcher(_silu_product_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
