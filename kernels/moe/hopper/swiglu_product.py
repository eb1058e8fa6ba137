"""The experts' first product with SwiGLU in its epilogue, for MXFP8 with groups of 128 and Hopper, in Gluon.

A tile has 128 rows and 128 columns of gate and the same ones of up, so that a tile of the result is one group of each
of its rows. Sums are rounded to bfloat16, as if they had been written and read again; then the result is quantised, and
the hidden rows are kept in MXINT8, from registers. The rows of B reach shared memory in such an order that a thread
holds 32 neighbours of a row: a whole block, whose codes it stores at once. Nothing goes to memory in 16 bits. The rest
is that of `mxfp8.hopper.grouped.fp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.counters import counter
from kernels.core.hopper import let_other_start, start, words_of
from kernels.core.launch import Launcher, aligned, processors
from kernels.moe.hopper.swiglu_quantized import Results, empty_results
from kernels.moe.hopper.words import swiglu_words
from kernels.mxfp8.grouped import BYTES, Quantized, addressable_operands, in_table
from kernels.mxfp8.hopper.grouped import fp8
from kernels.mxfp8.hopper.grouped.fp8 import row_factors, shared_factor
from kernels.mxfp8.hopper.grouped.tiles import (
    CONSUMER_REGISTERS,
    LAG,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PIECES,
    ROWS,
    SHUFFLED,
    STAGES,
    accept_tile,
    await_tile,
    barriers,
    descriptor,
    in_order,
    load_tiles,
    shuffled_descriptor,
    table_descriptor,
)
from kernels.mxfp8.hopper.quantize.int8 import store_int8
from kernels.mxfp8.hopper.quantize.pairs import codes_layout, store_rows, table_of

_TILE_N = gl.constexpr(128)  # of each half
_BLOCK_K = gl.constexpr(128)
_BAND = gl.constexpr(16)  # rows of tiles that are in flight together
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_FORM = gl.constexpr(BYTES)


def hidden(rows: Quantized, gate_up: Quantized, ends: Tensor, keep: bool) -> Results:
    """The result [M, F] of SwiGLU over rows [M, D] times their experts' gate_up [E, 2F, D], and h if it is kept.

    D and F are multiples of 128, and so are the groups' numbers of rows.
    """
    num_rows, depth = rows.codes.shape
    groups, double, _ = gate_up.codes.shape
    width = double // 2
    results = empty_results(num_rows, width, rows.group, keep, ends.device)
    if num_rows == 0:
        return results
    a, a_scales, b, b_scales = addressable_operands(rows, gate_up)
    scales = fp8.tables(a_scales, b_scales if in_table(b_scales) else b_scales.flatten(0, 1), gate_up.differ)
    row_scales, column_scales, differ = scales
    ends = ends.contiguous()
    _launch(
        (processors(ends.device), 1, 1),
        (ends.device, ends.dtype, aligned(ends), (width, depth), keep),
        descriptor(a, ROWS.value, _BLOCK_K.value),
        shuffled_descriptor(b.flatten(0, 1)),
        table_descriptor(row_scales, 2 * ROWS.value),
        table_descriptor(column_scales, _TILE_N.value),
        _codes_descriptor(results.codes),
        _codes_descriptor(results.kept if keep else results.codes),
        table_of(results.scales),
        results.kept_scales,
        differ,
        counter(ends.device),
        ends,
        groups,
        width // _TILE_N.value,
        num_rows,
        double,
        depth,
        keep,
    )
    return results


def _codes_descriptor(codes: Tensor) -> TensorDescriptor:
    """As `quantize.pairs.codes_descriptor`, for the rows of one consumer."""
    pairs = codes.view(torch.int16)
    return TensorDescriptor(pairs, list(pairs.shape), list(pairs.stride()), [ROWS.value, 64], codes_layout())


@gluon.constexpr_function
def _columns_layout():
    """Of 128 columns in their order as the sums have them: 32 in each of four neighbouring threads."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, 128])


@gluon.jit
def _column_factors(columns):
    """[1, 128] float32 in the order of the sums. `columns` [1, 128] bfloat16 are in that of B's rows in memory."""
    values = gl.reshape(gl.abs(columns.load(_columns_layout())), [1, 4, 16, 2])
    values = gl.reshape(gl.permute(values, (0, 2, 1, 3)), [1, _TILE_N])
    return gl.convert_layout(values, _SUMS, assert_trivial=True).to(gl.float32)


@gluon.jit
def _add(sums, a, b, partial, rows, columns, SHARED: gl.constexpr):
    """sums + a b^T, scaled by the factors of rows and columns."""
    partial = warpgroup_mma(a, b.permute((1, 0)), partial, use_acc=False, is_async=True)
    if SHARED:
        factors = rows * shared_factor(columns, _SUMS)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        sums += partial * factors
    else:
        partial = warpgroup_mma_wait(0, deps=(partial,))
        sums += partial * rows * _column_factors(columns)
    # Nothing is in flight. But otherwise the next product would start before this, in registers that are not there.
    return warpgroup_mma_wait(0, deps=(sums,)), partial


@gluon.jit
def _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, first, done, steps, SHARED: gl.constexpr,
          C: gl.constexpr):  # fmt: skip
    """(consumer C's sums of gate, those of up, `done` and the steps of this tile)."""
    gate = gl.zeros((ROWS, _TILE_N), gl.float32, _SUMS)
    up = gate
    partial = gate
    for step in range(steps):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        rows = row_factors(rows_smem.index(stage), C, _SUMS)
        a = a_smem.index(stage * 2 + C)
        gate, partial = _add(gate, a, b_smem.index(stage * 2), partial, rows, columns_smem.index(stage * 2), SHARED)
        up, partial = _add(up, a, b_smem.index(stage * 2 + 1), partial, rows, columns_smem.index(stage * 2 + 1), SHARED)
        mbarrier.arrive(empty.index(stage), count=1)
        let_other_start(order, first & (step == LAG), C)
        done += 1
    return gate, up, done


@gluon.jit
def _store(descs, scales, smem, gate, up, row, column, num_rows, width, KEEP: gl.constexpr, C: gl.constexpr):
    """The results of consumer C's 64 rows from the words of its sums."""
    codes_desc, kept_desc = descs
    row_scales, kept_scales = scales
    first = smem.index(C * PIECES)
    second = smem.index(C * PIECES + 1)
    tma.store_wait(0)
    store_rows(swiglu_words(gate, up), first, codes_desc, row, column // 2, row_scales, None, row, column // 32,
               num_rows, width // 32, 128, False, _FORM)  # fmt: skip
    if KEEP:
        store_int8(gate, second, kept_desc, row, column // 2, kept_scales, row, column // 32, num_rows)
        tma.store_wait(1)
        store_int8(up, first, kept_desc, row, (width + column) // 2, kept_scales, row, (width + column) // 32, num_rows)


@gluon.jit
def _multiply(descs, scales, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order, places,
              written, read, num_rows, N, KEEP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    done = 0
    received = 0
    shared = gl.load(differ) == 0
    start(order, C)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        if shared:
            gate, up, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, received == 0, done,
                                   steps, True, C)  # fmt: skip
        else:
            gate, up, done = _sums(a_smem, b_smem, rows_smem, columns_smem, full, empty, order, received == 0, done,
                                   steps, False, C)  # fmt: skip
        # The loader goes on only when both have accepted the tile.
        let_other_start(order, (received == 0) & (steps <= LAG), C)
        gate = words_of(in_order(gate))
        up = words_of(in_order(up))
        _store(descs, scales, out_smem, gate, up, row + C * ROWS, column, num_rows, N // 2, KEEP, C)
        received += 1
        count = await_tile(places, written, received)
    let_other_start(order, received == 0, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["differ", "ticket", "num_groups", "tiles_n", "num_rows"])
def swiglu_product_kernel(
    a_desc,
    b_desc,
    rows_desc,
    columns_desc,
    codes_desc,
    kept_desc,
    scales,
    kept_scales,
    differ,
    ticket,
    ends,
    num_groups,
    tiles_n,
    num_rows,
    N,
    K,
    KEEP: gl.constexpr,
):
    """N = 2F rows of B for each group."""
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * 2] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, _TILE_N, _BLOCK_K], a_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.uint8, [STAGES] + rows_desc.block_type.shape, rows_desc.layout)
    columns_smem = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * 2] + columns_desc.block_type.shape, columns_desc.layout
    )
    out_smem = gl.allocate_shared_memory(gl.int16, [2 * PIECES] + codes_desc.block_type.shape, codes_desc.layout)
    full, empty, order, places, written, read = barriers()
    descs = (codes_desc, kept_desc)
    tables = (scales, kept_scales)
    tiles_m = gl.to_tensor(0)
    gl.warp_specialize(
        [
            (_multiply, (descs, tables, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, num_rows, N, KEEP, 0)),
            (_multiply, (descs, tables, differ, a_smem, b_smem, rows_smem, columns_smem, out_smem, full, empty, order,
                         places, written, read, num_rows, N, KEEP, 1)),
            (load_tiles, (a_desc, b_desc, rows_desc, columns_desc, a_smem, b_smem, rows_smem, columns_smem, full, empty,
                          ticket, places, written, read, ends, num_groups, tiles_m, tiles_n, num_rows, N, K, _TILE_N,
                          _BLOCK_K, _BAND, 2, STAGES, False, 0, SHUFFLED, True, True, False, False, False, 2)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(swiglu_product_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
