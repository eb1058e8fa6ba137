"""Quantising a tile of 128 x 128 bfloat16 from shared memory, two elements to a word; device functions in Gluon.

A word holds two neighbours of a row. For blocks along rows a thread reads 32 neighbours, sixteen bytes at a time; for
blocks along columns it reads one word in each of 32 rows, so that the halves of its words are two columns. Either way
the largest magnitude of a block is found within one thread, and maxima and scaling take one instruction for two
elements. Scaling is exact in bfloat16: it moves the exponent, and values that fall below the smallest bfloat16 are far
below the smallest code.

Codes are stored to shared memory, sixteen at a time, and from there by TMA.

Shared with `moe`.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mxfp8.grouped import TILES, VALUES, WORDS
from kernels.mxfp8.hopper.quantize.blocks import scale_bytes_of, square_maxima, store_scales, widen

WARPS = 8  # for which the layouts are made
REGISTERS = 80  # three programs share a multiprocessor
# Forms of scales. A tile's part of a table is contiguous, that of a matrix is 4 bytes in each of 128 lines.
_TILES, _WORDS, _VALUES = gl.constexpr(TILES), gl.constexpr(WORDS), gl.constexpr(VALUES)


@gluon.constexpr_function
def words_layout():
    """Of a tile as int32 [128, 64] in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def codes_layout():
    """Of a tile of codes as int16 [128, 64] in shared memory, two codes to an element."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def words_descriptor(x: Tensor) -> TensorDescriptor:
    """Of bfloat16 [R, C], contiguous on a boundary of 16 bytes: tiles of 128 x 128 as int32 [128, 64]."""
    words = x.view(torch.int32)
    return TensorDescriptor(words, list(words.shape), list(words.stride()), [128, 64], words_layout())


def table_of(scales: Tensor) -> Tensor:
    """`scales` as the integers that kernels write."""
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.element_size()])


def codes_descriptor(codes: Tensor) -> TensorDescriptor:
    """Of codes [R, C], likewise: tiles as int16 [128, 64]."""
    pairs = codes.view(torch.int16)
    return TensorDescriptor(pairs, list(pairs.shape), list(pairs.stride()), [128, 64], codes_layout())


@gluon.constexpr_function
def row_layout():
    """Words of a tile: two blocks of 32 elements of a row in each thread, the four blocks of a row in four lanes."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [64, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]],
        [[8, 0], [16, 0], [32, 0]],
        [],
        [128, 64],
    )


@gluon.constexpr_function
def column_layout():
    """Words of a tile: a block of 32 elements of two columns in each thread."""
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [32, 0], [64, 0]],
        [],
        [128, 64],
    )


@gluon.jit
def _larger(a, b):
    """The value of larger magnitude in each half, sign arbitrary; NaN if either is."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scaled_words(words, factors):
    """Products of the halves as bfloat16."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, factors], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def factor_bits(scale_bytes):
    """The bits of 2^(127 - byte) as bfloat16, NaN for 255. No byte of a bfloat16 tensor lies between 247 and 255."""
    return gl.where(scale_bytes == 255, 0x7FC0, (254 - scale_bytes) << 7)


@gluon.jit
def power_bits(scale_bytes):
    """The bits of 2^(byte - 127) as bfloat16, NaN for 255."""
    return gl.where(scale_bytes == 255, 0x7FC0, gl.where(scale_bytes == 0, 0x40, scale_bytes << 7))


@gluon.jit
def _row_codes(words):
    """Two codes from each word, in its order."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        .reg .b16 p, q;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 p, b, a;
        cvt.rn.satfinite.e4m3x2.f32 q, d, c;
        mov.b32 $0, {p, q};
        }""",
        "=r,r,r",
        [words],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _column_codes(words):
    """From the words of four rows: the four codes of the left column, then those of the right one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        .reg .b16 p, q, r, s;
        shl.b32 a, $2, 16;
        shl.b32 b, $3, 16;
        shl.b32 c, $4, 16;
        shl.b32 d, $5, 16;
        cvt.rn.satfinite.e4m3x2.f32 p, b, a;
        cvt.rn.satfinite.e4m3x2.f32 q, d, c;
        and.b32 a, $2, 0xffff0000;
        and.b32 b, $3, 0xffff0000;
        and.b32 c, $4, 0xffff0000;
        and.b32 d, $5, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 r, b, a;
        cvt.rn.satfinite.e4m3x2.f32 s, d, c;
        mov.b32 $0, {p, q};
        mov.b32 $1, {r, s};
        }""",
        "=r,=r,r,r,r,r",
        [words],
        dtype=gl.int16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _store_scales(scales, scale_bytes, AXIS: gl.constexpr, line, block, num_lines, num_blocks, FORM: gl.constexpr):
    if FORM <= _TILES:
        store_scales(scales, scale_bytes, AXIS, line, block, 0, num_blocks, FORM == _TILES, True)
    else:
        LAYOUT: gl.constexpr = scale_bytes.type.layout
        at = (block // 4).to(gl.int64) * num_lines + line + gl.arange(0, 128, gl.SliceLayout(AXIS, LAYOUT))
        place = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1 - AXIS, LAYOUT)), 1 - AXIS) * 8
        gl.store(scales + at, gl.sum(scale_bytes << place, AXIS))


@gluon.jit
def _store_shared_scales(bits, scales, differ, line, block, num_lines, FORM: gl.constexpr):
    """Of magnitude bits of a tile's lines, each a group: store their scales in a table and return their bytes."""
    if FORM == _VALUES:
        bits = square_maxima(bits)
    scale_bytes = scale_bytes_of(bits)
    at = (block // 4).to(gl.int64) * num_lines + line + gl.arange(0, bits.shape[0], scale_bytes.type.layout)
    if FORM == _VALUES:
        differs = gl.max(scale_bytes, 0) != gl.min(scale_bytes, 0)
        # The exponent of a bfloat16: byte 0 becomes 0, and 255, which comes with NaNs, infinity.
        gl.store(scales + at, (scale_bytes << 7 | gl.where(differs, 0, 0x8000)).to(gl.int16))
        if differ is not None:
            gl.store(differ, 1, mask=differs)
    else:
        gl.store(scales + at, scale_bytes.to(gl.uint8))
    return scale_bytes


@gluon.jit
def row_maxima(words):
    """The bits [rows, 4] as float32 of the largest magnitude in each block of a tile's rows."""
    largest = gl.reduce(gl.reshape(words, [words.shape[0], 4, 16]), 2, _larger)
    return gl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF) << 16


@gluon.jit
def row_scales(words, GROUP: gl.constexpr, SQUARE: gl.constexpr):
    """Scale bytes [128, 4] of a tile in `row_layout`."""
    bits = row_maxima(words)
    if GROUP == 128:
        bits = widen(bits, 1, SQUARE)
    return scale_bytes_of(bits)


@gluon.jit
def column_scales(words, GROUP: gl.constexpr, SQUARE: gl.constexpr):
    """Scale bytes [4, 128] of a tile in `column_layout`."""
    largest = gl.reduce(gl.reshape(words, [4, 32, 64]), 1, _larger)
    bits = gl.reshape(gl.join((largest & 0x7FFF) << 16, largest & 0x7FFF0000), [4, 128])
    if GROUP == 128:
        bits = widen(bits, 0, SQUARE)
    return scale_bytes_of(bits)


@gluon.jit
def scaled_rows(words, factors):
    """A tile in `row_layout` times factors [128, 4], the bits of bfloat16 in int32."""
    LAYOUT: gl.constexpr = words.type.layout
    blocks = gl.reshape(words, [128, 4, 16])
    scaled = scaled_words(blocks, gl.expand_dims(factors * 0x10001, 2))
    return gl.convert_layout(gl.reshape(scaled, [128, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def scaled_columns(words, factors):
    """As `scaled_rows` for `column_layout` and factors [4, 128]."""
    LAYOUT: gl.constexpr = words.type.layout
    blocks = gl.reshape(words, [4, 32, 64])
    left, right = gl.split(gl.reshape(factors, [4, 64, 2]))
    pairs = gl.convert_layout(left | (right << 16), gl.SliceLayout(1, blocks.type.layout), assert_trivial=True)
    scaled = scaled_words(blocks, gl.expand_dims(pairs, 1))
    return gl.convert_layout(gl.reshape(scaled, [128, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def store_rows(words, buffer, desc, row, column, scales, differ, line, block, num_lines, num_blocks,
               GROUP: gl.constexpr, SQUARE: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """A tile in `row_layout`: its codes at (row, column) of `desc`, its scales in FORM from (line, block) of
    [num_lines, num_blocks] on. VALUES are those of a square, and `differ`, unless it is None, is set to 1 if its lines
    have several; in a table others are each line's own, and otherwise SQUARE says it.

    With a scale for each group of 128, other layouts and numbers of rows will do. `desc` and `buffer` have two codes to
    an element. The store of `buffer` is still in flight when this returns.
    """
    # Scales before codes: exchanges between threads may use shared memory that a copy of codes still reads.
    if FORM > _WORDS:
        largest = gl.reduce(words, 1, _larger)
        bits = gl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF) << 16
        scale_bytes = _store_shared_scales(bits, scales, differ, line, block, num_lines, FORM)
        scaled = scaled_words(words, gl.expand_dims(factor_bits(scale_bytes) * 0x10001, 1))
    else:
        scale_bytes = row_scales(words, GROUP, SQUARE)
        _store_scales(scales, scale_bytes, 1, line, block, num_lines, num_blocks, FORM)
        scaled = scaled_rows(words, factor_bits(scale_bytes))
    codes = _row_codes(scaled)
    buffer.store(codes)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def store_columns(words, buffer, desc, row, column, scales, differ, line, block, num_lines, num_blocks,
                  GROUP: gl.constexpr, SQUARE: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Like `store_rows` for a tile in `column_layout`, whose transpose is quantised and stored."""
    if FORM > _WORDS:
        largest = gl.reduce(words, 0, _larger)
        bits = gl.reshape(gl.join((largest & 0x7FFF) << 16, largest & 0x7FFF0000), [128])
        scale_bytes = _store_shared_scales(bits, scales, differ, line, block, num_lines, FORM)
        left, right = gl.split(gl.reshape(factor_bits(scale_bytes), [64, 2]))
        pairs = gl.convert_layout(left | (right << 16), gl.SliceLayout(0, words.type.layout), assert_trivial=True)
        scaled = scaled_words(words, gl.expand_dims(pairs, 0))
    else:
        scale_bytes = column_scales(words, GROUP, SQUARE)
        _store_scales(scales, scale_bytes, 0, line, block, num_lines, num_blocks, FORM)
        scaled = scaled_columns(words, factor_bits(scale_bytes))
    codes = _column_codes(scaled)
    # Of each four rows: two of the left column, two of the right.
    codes = gl.reshape(gl.permute(gl.reshape(codes, [32, 2, 2, 64]), [3, 1, 0, 2]), [128, 64])
    buffer.store(codes)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)
