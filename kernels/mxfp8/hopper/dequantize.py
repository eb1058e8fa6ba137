"""MXFP8 with scales every 32 to bfloat16, in the order that the strict products read; Gluon.

The results are two thirds of the bytes that move, so a thread writes sixteen bytes, eight elements, at once. It reads
their codes two at a time, because within 64 elements only pairs of neighbours stay together in the new order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.core.launch import Launcher, aligned
from kernels.core.triton import cdiv
from kernels.mxfp8.hopper.quantize.pairs import power_bits

_LINES = gl.constexpr(64)  # runs of 64 elements in a program
_WARPS = 4
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [_WARPS, 1], [1, 0]))
# Two elements: s eeee mmm to the bits s 0000eeee mmm0000 of a bfloat16, which is the value times 2^-120, subnormals
# too; then the exact product with 2^120 and that with the scale, which may be subnormal.
_DECODE = gl.constexpr(
    """
    {
    .reg .b32 bits, sign, unit;
    mov.b32 unit, 0x7b807b80;
    prmt.b32 bits, $1, 0, 0x1404;
    and.b32 sign, bits, 0x80008000;
    shr.b32 bits, bits, 4;
    lop3.b32 bits, bits, 0x07f007f0, sign, 0xEA;
    mul.rn.bf16x2 bits, bits, unit;
    mul.rn.bf16x2 $0, bits, $2;
    }
    """
)


@gluon.jit(do_not_specialize=["num_lines"])
def dequantize_kernel(codes, scales, values, num_lines):
    """codes int16 [num_lines, 32], scales int16 [num_lines], values int32 [num_lines, 32]: two elements each."""
    first = gl.program_id(0).to(gl.int64) * _LINES
    line = gl.arange(0, _LINES, gl.SliceLayout(1, _LAYOUT))
    pair = gl.arange(0, 32, gl.SliceLayout(0, _LAYOUT))
    inside = first + line < num_lines
    scale = gl.load(scales + first + line, inside, 0).to(gl.int32)
    # Pair 8 a + 2 b + c goes to 8 b + 4 c + a; a block of 32 has two values of a.
    source = pair % 4 * 8 + pair // 8 * 2 + pair // 4 % 2
    line = gl.expand_dims(line, 1)
    inside = gl.expand_dims(inside, 1)
    code = gl.load(codes + first * 32 + (line * 32 + gl.expand_dims(source, 0)), inside, 0).to(gl.int32)
    powers = gl.where(
        gl.expand_dims(pair % 4 < 2, 0),
        gl.expand_dims(power_bits(scale & 0xFF) * 0x10001, 1),
        gl.expand_dims(power_bits((scale >> 8) & 0xFF) * 0x10001, 1),
    )
    value = gl.inline_asm_elementwise(_DECODE, "=r,r,r", [code, powers], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(values + first * 32 + (line * 32 + gl.expand_dims(pair, 0)), value, inside)


_launch = Launcher(dequantize_kernel, num_warps=_WARPS)


def dequantize_interleaved(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes e4m3 [..., C] with scales uint8 [..., C / 32], contiguous -> bfloat16 [..., C]; C in multiples of 64.

    64 neighbouring elements come in the order in which threads that have 16 neighbouring codes hold an operand of a
    matrix instruction: element 16 a + 4 b + 2 c + d at 16 b + 8 c + 2 a + d.
    """
    values = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    num_lines = codes.numel() // 64
    _launch(
        (cdiv(num_lines, _LINES.value), 1, 1),
        (codes.device, aligned(codes, scales)),
        codes.view(torch.int16),
        scales.view(torch.int16),
        values.view(torch.int32),
        num_lines,
    )
    return values
