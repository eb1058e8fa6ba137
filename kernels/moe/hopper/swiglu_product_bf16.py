"""The experts' first product with SwiGLU in its epilogue, in bfloat16 for Hopper, in Gluon.

As `mxfp8.hopper.grouped.bf16`, of whose 256 columns half are gate and half are the same columns of up. Sums are rounded
to bfloat16 and written for the backward, and the result is computed from them where they are, not read again.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from kernels.core.counters import counter
from kernels.core.hopper import halves, let_other_start, start, words_of
from kernels.core.launch import Launcher, aligned, processors
from kernels.moe.hopper.words import swiglu_halves
from kernels.mxfp8.grouped import addressable
from kernels.mxfp8.hopper.grouped.bf16 import sums_of_tile
from kernels.mxfp8.hopper.grouped.tiles import (
    COLUMNS,
    CONSUMER_REGISTERS,
    LAG,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PIECES,
    ROWS,
    STAGES,
    accept_tile,
    await_tile,
    barriers,
    descriptor,
    load_tiles,
)

_TILE_N = gl.constexpr(128)  # of each half
_BLOCK_K = gl.constexpr(64)
_BAND = gl.constexpr(16)  # rows of tiles that are in flight together


def hidden(rows: Tensor, gate_up: Tensor, ends: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """(the result [M, F] of SwiGLU over h, h [M, 2F] if it is kept): h is rows [M, D] times their gate_up [E, 2F, D].

    D is a multiple of 64 and F of 128, as are the groups' numbers of rows.
    """
    num_rows, depth = rows.shape
    groups, double, _ = gate_up.shape
    result = rows.new_empty(num_rows, double // 2)
    h = rows.new_empty(num_rows if keep else 0, double)
    if num_rows:
        ends = ends.contiguous()
        blocks = ROWS.value, COLUMNS.value
        _launch(
            (processors(ends.device), 1, 1),
            (ends.device, ends.dtype, aligned(ends), (double, depth), keep),
            descriptor(addressable(rows), ROWS.value, _BLOCK_K.value),
            descriptor(addressable(gate_up).flatten(0, 1), _TILE_N.value, _BLOCK_K.value),
            descriptor(result, *blocks),
            descriptor(h if keep else result, *blocks),
            counter(ends.device),
            ends,
            groups,
            double // 2 // _TILE_N.value,
            num_rows,
            double,
            depth,
            keep,
        )
    return result, h


@gluon.jit
def _swiglu(gate, up):
    """Of sums that are rounded to bfloat16."""
    LAYOUT: gl.constexpr = gate.type.layout
    left, right = swiglu_halves(words_of(gate), words_of(up))
    return gl.convert_layout(gl.reshape(gl.join(left, right), [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _put(desc, piece, value, row, column):
    tma.store_wait(PIECES - 1)
    piece.store(value.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], piece)


@gluon.jit
def _store(result_desc, hidden_desc, first, second, gate, up, row, column, width, KEEP: gl.constexpr):
    """A piece of the results of a consumer's 64 rows, through two places in shared memory in turn."""
    result = _swiglu(gate, up)
    if KEEP:
        _put(hidden_desc, first, gate, row, column)
        _put(hidden_desc, second, up, row, width + column)
    _put(result_desc, first, result, row, column)


@gluon.jit
def _multiply(result_desc, hidden_desc, a_smem, b_smem, out_smem, full, empty, order, places, written, read, N,
              KEEP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C: 64 rows of each tile."""
    first = out_smem.index(C * PIECES)
    second = out_smem.index(C * PIECES + 1)
    done = 0
    received = 0
    start(order, C)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        acc, done = sums_of_tile(a_smem, b_smem, full, empty, order, received == 0, done, steps, False, False, C)
        # The loader goes on only when both have accepted the tile.
        let_other_start(order, (received == 0) & (steps <= LAG), C)
        gate, up = halves(acc)
        gate, more_gate = halves(gate)
        up, more_up = halves(up)
        row += C * ROWS
        _store(result_desc, hidden_desc, first, second, gate, up, row, column, N // 2, KEEP)
        # What the piece before has stored last may still be read.
        _store(result_desc, hidden_desc, second, first, more_gate, more_up, row, column + COLUMNS, N // 2, KEEP)
        received += 1
        count = await_tile(places, written, received)
    let_other_start(order, received == 0, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "tiles_n", "num_rows"])
def swiglu_product_bf16_kernel(
    a_desc,
    b_desc,
    result_desc,
    hidden_desc,
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
    halves_smem = gl.allocate_shared_memory(dtype, [STAGES * 2] + b_desc.block_type.shape, b_desc.layout)
    b_smem = halves_smem._reinterpret(dtype, [STAGES, 2 * _TILE_N, _BLOCK_K], b_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2 * PIECES] + result_desc.block_type.shape, result_desc.layout)
    full, empty, order, places, written, read = barriers()
    tiles_m = gl.to_tensor(0)
    gl.warp_specialize(
        [
            (_multiply, (result_desc, hidden_desc, a_smem, b_smem, out_smem, full, empty, order, places, written, read,
                         N, KEEP, 0)),
            (_multiply, (result_desc, hidden_desc, a_smem, b_smem, out_smem, full, empty, order, places, written, read,
                         N, KEEP, 1)),
            (load_tiles, (a_desc, b_desc, b_desc, b_desc, a_smem, halves_smem, halves_smem, halves_smem, full, empty,
                          ticket, places, written, read, ends, num_groups, tiles_m, tiles_n, num_rows, N, K, _TILE_N,
                          _BLOCK_K, _BAND, 2, STAGES, False, 0, False, False, False, False, False, False, 2)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(swiglu_product_bf16_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
