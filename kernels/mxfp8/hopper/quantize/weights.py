"""bfloat16 weights, with sides in multiples of 128, in the form that products for Hopper read; Gluon.

With groups of 128 they are quantised, with their scales in a table. With scales every 32 they are quantised and
dequantised again in one pass, because products on Hopper multiply the values, and writing and reading codes would be
wasted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.core.launch import Launcher
from kernels.mxfp8.grouped import VALUES, Quantized, Rounded
from kernels.mxfp8.hopper.quantize.blocks import tile_place
from kernels.mxfp8.hopper.quantize.operators import scales_like
from kernels.mxfp8.hopper.quantize.pairs import (
    REGISTERS,
    WARPS,
    column_layout,
    column_scales,
    factor_bits,
    power_bits,
    row_layout,
    row_scales,
    scaled_columns,
    scaled_rows,
    words_descriptor,
    words_layout,
)
from kernels.mxfp8.hopper.quantize.tiles import has_whole_tiles, quantize_tiles
from kernels.mxfp8.reference import BLOCK


@gluon.jit
def _rounded(words):
    """Both halves to e4m3 and back."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        .reg .b16 p, q;
        shl.b32 a, $1, 16;
        and.b32 b, $1, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 p, b, a;
        cvt.rn.f16x2.e4m3x2 a, p;
        mov.b32 {p, q}, a;
        cvt.f32.f16 a, p;
        cvt.f32.f16 b, q;
        cvt.rn.bf16x2.f32 $0, b, a;
        }""",
        "=r,r",
        [words],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _transposed(words):
    """From the words of two rows: those of the left column and of the right one."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=r,=r,r,r",
        [words],
        dtype=gl.int32,
        is_pure=True,
        pack=2,
    )


@gluon.jit(do_not_specialize=["tile_rows"])
def round_tiles_kernel(x_desc, out_desc, tile_rows, num_rows, num_columns, TRANSPOSE: gl.constexpr):
    """One tile of matrices [num_rows, num_columns], one below another, with `tile_rows` rows of tiles in all."""
    smem = gl.allocate_shared_memory(gl.int32, [128, 64], words_layout())
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = barriers.index(0)
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, x_desc.block_type.nbytes)
    row, column = tile_place(gl.program_id(0), tile_rows, num_columns // 128)
    tma.async_copy_global_to_shared(x_desc, [row, column // 2], full, smem)
    mbarrier.wait(full, 0)
    if TRANSPOSE:
        words = smem.load(column_layout())
        scale_bytes = column_scales(words, 32, False)
        words = _rounded(scaled_columns(words, factor_bits(scale_bytes)))
        words = _transposed(scaled_columns(words, power_bits(scale_bytes)))
        words = gl.reshape(gl.permute(gl.reshape(words, [64, 2, 64]), [2, 1, 0]), [128, 64])
        matrix = row // num_rows
        column, row = row - matrix * num_rows, matrix * num_columns + column
    else:
        words = smem.load(row_layout())
        scale_bytes = row_scales(words, 32, False)
        words = _rounded(scaled_rows(words, factor_bits(scale_bytes)))
        words = scaled_rows(words, power_bits(scale_bytes))
    # The order of `Rounded`, in which two neighbours stay together.
    words = gl.reshape(gl.permute(gl.reshape(words, [128, 2, 4, 4, 2]), [0, 1, 3, 4, 2]), [128, 64])
    smem.store(words)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column // 2], smem)
    tma.store_wait(0)
    mbarrier.invalidate(full)  # here, see `quantize_tiles_kernel`


_launch = Launcher(round_tiles_kernel, num_warps=WARPS, maxnreg=REGISTERS)


def serves(weight: Tensor) -> bool:
    """Whether `operand` takes `weight` [E, N, K]."""
    return weight.device.type == "cuda" and weight.is_contiguous() and has_whole_tiles(weight) and weight.numel() > 0


def operand(weight: Tensor, transpose: bool, group: int) -> Quantized | Rounded:
    """weight [E, N, K] bfloat16 along K, or with `transpose` [E, K, N] along N; groups of 128 are 128 x 128."""
    experts, num_rows, num_columns = weight.shape
    shape = (experts, num_columns, num_rows) if transpose else weight.shape
    if group == BLOCK:
        values = weight.new_empty(shape)
        _launch(
            (experts * (num_rows // 128) * (num_columns // 128), 1, 1),
            (weight.device, transpose),
            words_descriptor(weight.flatten(0, 1)),
            words_descriptor(values.flatten(0, 1)),
            experts * (num_rows // 128),
            num_rows,
            num_columns,
            transpose,
        )
        return Rounded(values)
    codes = weight.new_empty(shape, dtype=torch.float8_e4m3fn)
    scales = scales_like(codes, VALUES)
    nothing = codes.new_empty(0), scales.new_empty(0)
    results = (*nothing, codes, scales) if transpose else (codes, scales, *nothing)
    differ = torch.zeros(1, dtype=torch.int32, device=weight.device)
    quantize_tiles(weight, *results, group, True, VALUES, differ)
    return Quantized(codes, scales, group, differ=differ)


def operands(weight: Tensor) -> tuple[Quantized, Quantized]:
    """weight [E, N, K] bfloat16 in groups of 128 x 128, along K and as [E, K, N] along N; features in whole tiles."""
    weight = weight if serves(weight) else weight.clone(memory_format=torch.contiguous_format)
    experts, num_rows, num_columns = weight.shape
    codes = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
    transposed = weight.new_empty(experts, num_columns, num_rows, dtype=torch.float8_e4m3fn)
    scales, transposed_scales = scales_like(codes, VALUES), scales_like(transposed, VALUES)
    differ = torch.zeros(1, dtype=torch.int32, device=weight.device)
    quantize_tiles(weight, codes, scales, transposed, transposed_scales, 128, True, VALUES, differ)
    return Quantized(codes, scales, 128, differ=differ), Quantized(transposed, transposed_scales, 128, differ=differ)
