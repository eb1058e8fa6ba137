"""Grouped products of an MXFP8 operand with a bfloat16 one for Hopper, in Gluon.

An E4M3 element times its power-of-two scale has four significant bits, so bfloat16 holds it exactly: with the other
operand dequantised, this is the product of two MXFP8 tensors with scales of their own every 32. The pipeline is that of
`hopper.grouped.bf16`, but each consumer reads its 64 rows of codes from shared memory and converts them to bfloat16 in
registers, from which matrix instructions take their first operand, during the products of the step before. Of each two
steps the second may be issued before the first is done; more at a time would need more registers than there are.

A thread reads 16 neighbouring codes of a row, which have one scale, and uses them as its elements of four instructions.
The sum therefore runs over the elements in another order, in which `dequantize_interleaved` writes the other operand.

An element is converted by moving its bits to their positions in a bfloat16, which makes it too small by 2^120, and one
multiplication that corrects this and applies the scale. The factors are 2^32 smaller than they should be, so that
scales up to 2^39 can be applied; the sums are multiplied by 2^32. This limits the operand of codes at both ends,
unchecked: a scale of 2^40 or more, which a block has if its largest magnitude is above 1.75 * 2^47, turns its elements
into infinities and NaNs, and bits of an element below 2^-101 are rounded off. The dequantised operand has no such
limits.

If b is given as codes, two more warps of each program dequantise it ahead (`hopper.grouped.dequantize_ahead`).
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

from kernels.core.counters import counter
from kernels.core.hopper import let_other_start, start
from kernels.core.launch import Launcher, aligned, processors
from kernels.mxfp8.grouped import in_table
from kernels.mxfp8.hopper.grouped.dequantize_ahead import COUNTS, dequantize_ahead
from kernels.mxfp8.hopper.grouped.pieces import in_pieces
from kernels.mxfp8.hopper.grouped.tiles import (
    COLUMNS,
    CONSUMER_REGISTERS,
    LAG,
    LOADER_REGISTERS,
    MAX_REGISTERS,
    PAIRED,
    PIECES,
    ROWS,
    STAGES,
    accept_tile,
    await_tile,
    barriers,
    descriptor,
    load_tiles,
    store_rows,
    store_transposed,
    table_descriptor,
)
from kernels.mxfp8.triton.scales import transposed_words

_TILE_N = gl.constexpr(256)
_BLOCK_K = gl.constexpr(64)
_BAND = gl.constexpr(16)  # rows of tiles that are in flight together
_TILE_M = gl.constexpr(2 * ROWS)

# If a warpgroup also dequantises ahead.
_AHEAD_CONSUMER_REGISTERS = gl.constexpr(224)
_AHEAD_REGISTERS = gl.constexpr(56)

_UNIT = gl.constexpr(2.0**32)
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _SUMS, 2))
# A thread has two rows of a matrix instruction's operand, and 16 neighbouring codes of each of them: of 64 rows and two
# blocks of 32.
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        [[0, 0, 16], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 2, 32],
    )
)
_FLAT_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
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
def _decode(codes_smem, words_smem, HALF: gl.constexpr, BLOCK: gl.constexpr):
    """Codes [64, 64] of a step times their scales -> bfloat16, an operand in the order of `dequantize_interleaved`.

    `words_smem` [1, TILE_M] has the scales of 128 elements of each row of the tile: of this step, which is an even one
    (HALF 0) or an odd one, and of its neighbour.
    """
    words = words_smem.slice(BLOCK * ROWS, ROWS, 1).permute((1, 0)).load(gl.SliceLayout(2, _CODES))
    codes = gl.convert_layout(codes_smem.load(_FLAT_CODES).reshape((ROWS, 2, 32)), _CODES, assert_trivial=True)
    place = 16 * HALF + 8 * gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, _CODES)))
    scale = (words >> gl.expand_dims(place, 0)) & 0xFF
    bits = gl.where(scale == 255, 0x7FC0, gl.minimum(scale + 88, 255) << 7).to(gl.int16)
    factors = gl.expand_dims(bits.to(gl.bfloat16, bitcast=True), 2)
    values = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r,r", [codes.to(gl.int8, bitcast=True), factors], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    values = values.reshape((ROWS, 4, 4, 2, 2)).permute((0, 2, 3, 1, 4)).reshape((ROWS, 64))
    return gl.convert_layout(values, _OPERAND)


@gluon.jit
def _operand(a_smem, words_smem, full, done, there, HALF: gl.constexpr, BLOCK: gl.constexpr):
    """The operand of the step in stage `done`, decoded if it is `there`; after the last step it is not, nor used."""
    stage = done % STAGES
    mbarrier.wait(full.index(stage), (done // STAGES) & 1, pred=there)
    return _decode(a_smem.index(stage * 2 + BLOCK), words_smem.index(stage), HALF, BLOCK)


@gluon.jit
def _begin(a, b_smem, acc, done):
    return warpgroup_mma(a, b_smem.index(done % STAGES).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _products(a_smem, b_smem, words_smem, full, empty, order, first, done, steps, TWO: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """(64 x 256 sums, `done` and the steps of this tile, an even number).

    TWO: the second of each two steps is begun before the first is done.
    """
    acc = gl.zeros((ROWS, 256), gl.float32, _SUMS)
    even = _operand(a_smem, words_smem, full, done, steps > 0, 0, C)
    for step in range(0, steps, 2):
        acc = _begin(even, b_smem, acc, done)
        odd = _operand(a_smem, words_smem, full, done + 1, True, 1, C)
        if TWO:
            acc = _begin(odd, b_smem, acc, done + 1)
            acc, even = warpgroup_mma_wait(1, deps=(acc, even))
        else:
            acc, even = warpgroup_mma_wait(0, deps=(acc, even))
            acc = _begin(odd, b_smem, acc, done + 1)
        mbarrier.arrive(empty.index(done % STAGES), count=1)
        if C == 0:  # before waiting for a stage that the other consumer has not released yet
            mbarrier.arrive(order, count=1, pred=first & (step == LAG))
        following = _operand(a_smem, words_smem, full, done + 2, step + 2 < steps, 0, C)
        acc, odd = warpgroup_mma_wait(0, deps=(acc, odd))
        mbarrier.arrive(empty.index((done + 1) % STAGES), count=1)
        even = following
        done += 2
    return acc * _UNIT, done


@gluon.jit
def _multiply(out_desc, out, a_smem, b_smem, words_smem, out_smem, full, empty, order, places, written, read, M, N,
              OUT_T: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Consumer C."""
    done = 0
    received = 0
    start(order, C)
    count = await_tile(places, written, received)
    while count > 0:
        row, column, steps = accept_tile(places, read, received)
        # Measured: in products with transposed results two steps at a time are slower.
        acc, done = _products(a_smem, b_smem, words_smem, full, empty, order, received == 0, done, steps, not OUT_T, C)
        # The loader goes on only when both have accepted the tile.
        let_other_start(order, (received == 0) & (steps <= LAG), C)
        row += C * ROWS
        if OUT_T:
            store_transposed(out_desc, out, out_smem, acc, row, column, count, M, C * PIECES, 0)
        else:
            store_rows(out_desc, out, out_smem, acc, row, count - C * ROWS, column, N, C * PIECES, 0)
        received += 1
        count = await_tile(places, written, received)
    let_other_start(order, received == 0, C)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_groups", "tiles_m", "tiles_n", "M"])
def _grouped_strict_kernel(
    a_desc,
    b_desc,
    words_desc,
    out_desc,
    out,
    ticket,
    ends,
    num_groups,
    tiles_m,
    tiles_n,
    M,
    N,
    K,
    b_codes,
    b_scales,
    b_values,
    WGRAD: gl.constexpr,
    OUT_T: gl.constexpr,
    A_FORM: gl.constexpr,
    AHEAD: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES] + words_desc.block_type.shape, words_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES] + out_desc.block_type.shape, out_desc.layout)
    full, empty, order, places, written, read = barriers()
    if AHEAD:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out, a_smem, b_smem, words, out_smem, full, empty, order, places, written, read,
                             M, N, OUT_T, 0)),
                (_multiply, (out_desc, out, a_smem, b_smem, words, out_smem, full, empty, order, places, written, read,
                             M, N, OUT_T, 1)),
                (load_tiles, (a_desc, b_desc, words_desc, b_desc, a_smem, b_smem, words, b_smem, full, empty, ticket,
                              places, written, read, ends, num_groups, tiles_m, tiles_n, M, N, K, _TILE_N, _BLOCK_K,
                              _BAND, 2, STAGES, WGRAD, A_FORM, False, True, False, OUT_T, WGRAD, True)),
                (dequantize_ahead, (b_codes, b_scales, b_values, ticket, ends, num_groups, N, K)),
            ],
            [4, 2, 2],
            [_AHEAD_CONSUMER_REGISTERS, _AHEAD_REGISTERS, _AHEAD_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out, a_smem, b_smem, words, out_smem, full, empty, order, places, written, read,
                             M, N, OUT_T, 0)),
                (_multiply, (out_desc, out, a_smem, b_smem, words, out_smem, full, empty, order, places, written, read,
                             M, N, OUT_T, 1)),
                (load_tiles, (a_desc, b_desc, words_desc, b_desc, a_smem, b_smem, words, b_smem, full, empty, ticket,
                              places, written, read, ends, num_groups, tiles_m, tiles_n, M, N, K, _TILE_N, _BLOCK_K,
                              _BAND, 2, STAGES, WGRAD, A_FORM, False, True, False, OUT_T, WGRAD, False)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip


def grouped_mm(codes: Tensor, scales: Tensor, b: Tensor, ends: Tensor, b_scales: Tensor | None = None) -> Tensor:
    """[M, N] bfloat16: codes [M, K] e4m3 times scales [M, K / 32] uint8, times the group's b [E, N, K] bfloat16.

    With `b_scales` uint8 [E, N, K / 32], b is e4m3 and dequantised in the kernel. N and K are multiples of 128. Scales
    of the rows may be in a table of WORDS.
    """
    groups, n, k = b.shape
    out = torch.empty(codes.shape[0], n, dtype=torch.bfloat16, device=codes.device)
    sizes = (groups, 0, -(-n // _TILE_N.value), 0, n, k)
    values, ahead = b, None
    if b_scales is not None:
        values = torch.empty(b.shape, dtype=torch.bfloat16, device=b.device)
        ahead = b.view(torch.int32), b_scales.view(torch.int16), values.view(torch.int32)
    _multiplied(codes, scales, values.flatten(0, 1), out, out, ends, sizes, form=0, ahead=ahead)
    return out


def grouped_wgrad(
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    paired: bool = False,
) -> Tensor:
    """[E, R, C]: codes [R, M] with scales [R, M / 32], times values [C, M] bfloat16, over each group's columns.

    [E, C, R] if `transposed`. R and C are multiples of 128. If `paired`, the codes are in `grouped` pairs. Scales may
    be in a table of WORDS.
    """
    rows, columns = scales.shape[1 if in_table(scales) else 0], values.shape[0]
    words = scales if in_table(scales) else transposed_words(scales)
    tiles = -(-rows // _TILE_M.value), -(-columns // _TILE_N.value)
    form = PAIRED.value if paired else 0
    shape = (columns, rows) if transposed else (rows, columns)

    def product(ends: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(ends.shape[0], *shape, dtype=dtype, device=codes.device)
        sizes = (ends.shape[0], *tiles, rows, columns, 0)
        _multiplied(
            codes, words, values, out, out.flatten(0, 1), ends, sizes, form=form, wgrad=True, transposed=transposed
        )
        return out

    tile = (_TILE_N.value, _TILE_M.value) if transposed else (_TILE_M.value, _TILE_N.value)
    return in_pieces(product, ends, values.shape[1], shape, tile, dtype, True)


def _multiplied(
    codes: Tensor,
    scales: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Tensor,
    ends: Tensor,
    sizes: tuple[int, ...],
    *,
    form: int,
    wgrad: bool = False,
    transposed: bool = False,
    ahead: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    _launch(
        (processors(codes.device), 1, 1),
        (codes.device, out.dtype, ends.dtype, aligned(ends), sizes[4:], wgrad, transposed, form, ahead is not None),
        descriptor(codes, ROWS.value, _BLOCK_K.value),
        descriptor(b, _TILE_N.value, _BLOCK_K.value),
        table_descriptor(scales if in_table(scales) else transposed_words(scales), _TILE_M.value),
        descriptor(rows, ROWS.value, COLUMNS.value),
        out,
        counter(codes.device, COUNTS + sizes[0] if ahead else 1),
        ends,
        *sizes,
        *(ahead or (ends, ends, ends)),
        wgrad,
        transposed,
        form,
        ahead is not None,
    )


_launch = Launcher(_grouped_strict_kernel, num_warps=4, maxnreg=MAX_REGISTERS)
