"""MXINT8: int8 codes, of which 32 of a row share a power of two; for what is only kept and read again, in Gluon.

code * 2^(byte - 127 - 6) is the element. On Gaussian data that leaves 41 dB, where e4m3, which matrix instructions
multiply, leaves 31.5 dB in as many bytes: its exponents serve magnitudes that differ more than 32 neighbours do.

The scale is the smallest that keeps the largest magnitude within 127 codes. A block with a NaN, an infinity or a
magnitude of 2^111 or more has the byte 255 and is NaN. A block below 2^-120 loses bits, and below 2^-127 it is zeros.

Conversions use no conversion instruction, which a multiprocessor has few of: adding 1.5 * 2^23 rounds to an integer in
the low bits of a float32, and an integer becomes one by setting the exponent's bits.

Shared with `moe`.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mxfp8.hopper.quantize.pairs import row_maxima

_LEAST = gl.constexpr(7)  # the smallest byte: 2^(7 - 133) is the smallest normal float32
_MOST = gl.constexpr(237)  # the largest: 2^(237 - 133) times the offset is still a float32
_OFFSET = gl.constexpr(2.0**23 + 128)


def empty_int8(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes int8 [rows, columns], scales int32 [columns / 128, rows], the four of 128 elements in a word)."""
    codes = torch.empty(rows, columns, dtype=torch.int8, device=device)
    return codes, torch.empty(columns // 128, rows, dtype=torch.int32, device=device)


def scales_descriptor(scales: Tensor) -> TensorDescriptor:
    """Of scales, the words of 128 rows."""
    return TensorDescriptor(scales, list(scales.shape), list(scales.stride()), [1, 128], scale_words_layout())


@gluon.constexpr_function
def scale_words_layout():
    """Of [1, 128] words in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _codes(words, factors):
    """Two codes from each word, in its order."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        shl.b32 c, $2, 16;
        and.b32 d, $2, 0xffff0000;
        fma.rn.f32 a, a, $3, 0f4B400000;
        fma.rn.f32 b, b, $3, 0f4B400000;
        fma.rn.f32 c, c, $4, 0f4B400000;
        fma.rn.f32 d, d, $4, 0f4B400000;
        prmt.b32 a, a, b, 0x0040;
        prmt.b32 c, c, d, 0x0040;
        prmt.b32 $0, a, c, 0x5410;
        }""",
        "=r,r,r,r,r",
        [words, factors],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def store_int8(words, buffer, desc, row, column, scales, line, block, num_lines):
    """The words of a tile [rows, 64]: codes at (row, column) of `desc`, scales from (line, block) on of `num_lines`.

    `desc` and `buffer` have two codes to an element. The store of `buffer` is still in flight when this returns.
    """
    LAYOUT: gl.constexpr = words.type.layout
    bits = row_maxima(words)
    exponent = bits >> 23
    rounded_up = gl.maximum(exponent + ((bits & 0x7FFFFF) > 0x7E0000).to(gl.int32), _LEAST)
    scale_bytes = gl.where(rounded_up > _MOST, 255, rounded_up)
    BLOCKS: gl.constexpr = scale_bytes.type.layout
    place = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, BLOCKS)), 0) * 8
    lines = gl.arange(0, words.shape[0], gl.SliceLayout(1, BLOCKS))
    at = (block // 4).to(gl.int64) * num_lines + line + lines
    gl.store(scales + at, gl.sum(scale_bytes << place, 1))
    factors = gl.expand_dims(((260 - scale_bytes) << 23).to(gl.float32, bitcast=True), 2)
    blocks = gl.reshape(words, [words.shape[0], 4, 16])
    codes = gl.reshape(_codes(blocks, factors), words.shape)
    buffer.store(gl.convert_layout(codes, LAYOUT, assert_trivial=True))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def load_int8(codes_smem, scales_smem, LAYOUT: gl.constexpr):
    """(left, right): float32 of the two codes of each element of `codes_smem` int16 [rows, 64].

    `scales_smem` [1, rows] has the words of their scales.
    """
    codes = gl.reshape(codes_smem.load(LAYOUT).to(gl.int32), [codes_smem.shape[0], 4, 16])
    BLOCKS: gl.constexpr = codes.type.layout
    words = scales_smem.permute((1, 0)).load(gl.SliceLayout(2, BLOCKS))
    place = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS))), 0) * 8
    scale_bytes = (words >> place) & 0xFF
    bits = gl.where(scale_bytes == 255, 0x7FC00000, (scale_bytes - 6) << 23)
    factors = gl.expand_dims(bits.to(gl.float32, bitcast=True), 2)
    offset = factors * -_OFFSET  # one instruction then subtracts and scales, exactly
    left = ((codes & 0xFF) ^ 0x4B000080).to(gl.float32, bitcast=True) * factors + offset
    right = (((codes >> 8) & 0xFF) ^ 0x4B000080).to(gl.float32, bitcast=True) * factors + offset
    left = gl.convert_layout(gl.reshape(left, codes_smem.shape), LAYOUT, assert_trivial=True)
    right = gl.convert_layout(gl.reshape(right, codes_smem.shape), LAYOUT, assert_trivial=True)
    return left, right
