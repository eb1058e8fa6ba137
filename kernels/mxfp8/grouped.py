"""Grouped products of operands that are quantised already, or bfloat16: what a fused layer is made of.

Rows are in expert order; expert e owns rows ends[e - 1]:ends[e], and every group begins at a multiple of 128 rows. Rows
after the last end are undefined, in operands and in results, and are not read. An `Operand` is a bfloat16 tensor or a
`Quantized` with blocks along its last axis, which is the axis that is summed over.

The first operand of a weight gradient may be in pairs: the codes of the columns of two matrices [M, C] side by side,
as e4m3 [M, 2C], which has the bytes of one of them in bfloat16. In a tile of 128 x 128 of such a matrix, where the row
j of the tile had its 256 bytes, there are 128 codes of the column j of the first and then 128 of that of the second.

Scales of codes [..., lines, K] come in one of these forms:

    MATRIX   uint8 [..., lines, ceil(K / 32)]
    TILES    uint8 [..., bytes], in tiles of 128 x 4 as tcgen05 instructions read them (`reference.swizzle_scales`)
    WORDS    int32 [K / 128, lines]: the four scales of 128 elements, the first in the lowest byte
    BYTES    float8_e8m0fnu [K / 128, lines]: the scale that a group of 128 shares
    VALUES   bfloat16 [K / 128, lines]: that scale's value; byte 0 stands for 0, and 255 for infinity. It is negated
             if the 128 lines of its square, of 128 x 128 elements, share it

PyTorch's block-scaled products read TILES. Products for Hopper read tables (WORDS, BYTES, VALUES), one row for each
step along K. With groups of 128 they read BYTES of the first operand and VALUES of the second. With scales every 32
they read WORDS of one operand; the other is dequantised beforehand (`Rounded`): weights when they are quantised, in a
weight gradient the narrower one (`swaps`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.mxfp8.reference import BLOCK, MXTensor, swizzle_scales, unswizzle_scales

MATRIX, TILES, WORDS, BYTES, VALUES = range(5)
TABLES = {WORDS: torch.int32, BYTES: torch.float8_e8m0fnu, VALUES: torch.bfloat16}


def in_table(scales: Tensor) -> bool:
    return scales.dtype is not torch.uint8


class Quantized(NamedTuple):
    """codes [..., K] float8_e4m3fn and their scales; `group` elements in a row share a scale.

    With `paired` the codes are in pairs; scales are those of the two matrices' columns, one after the other.
    `differ` int32 [1] comes with VALUES of weights: 0 if the lines of each square share their scale.
    """

    codes: Tensor
    scales: Tensor
    group: int = BLOCK
    paired: bool = False
    differ: Tensor | None = None

    @property
    def lines(self) -> int:
        """The number of rows of blocks, in a matrix without a batch dimension."""
        if in_table(self.scales):
            return self.scales.shape[1]
        return (self.codes if self.in_tiles else self.scales).shape[0]

    @property
    def in_tiles(self) -> bool:
        """Whether the scales are in TILES; then codes are not paired."""
        return not in_table(self.scales) and self.scales.dim() < self.codes.dim()


class Rounded(NamedTuple):
    """An operand in MXFP8 with scales every 32, dequantised: bfloat16 values [..., lines, K].

    64 neighbouring elements come in the order of `hopper.dequantize.dequantize_interleaved`: element
    16 a + 4 b + 2 c + d at 16 b + 8 c + 2 a + d.
    """

    values: Tensor

    @property
    def lines(self) -> int:
        return self.values.shape[0]


Operand = Tensor | Quantized | Rounded


def form_of(group: int, second: bool) -> int:
    """The form of the scales of the first or second operand of a product with groups of `group` elements."""
    if group == BLOCK:
        return MATRIX if second else WORDS
    return VALUES if second else BYTES


def swaps(group: int, dy_lines: int, x_lines: int) -> bool:
    """Whether x, not dy, is the first operand of a weight gradient of dy [dy_lines, M] and x [x_lines, M]."""
    return group == BLOCK and dy_lines < x_lines


def in_tables(dtype: torch.dtype, width: int) -> bool:
    """Whether rows of `width` elements of `dtype` are quantised with their scales in tables."""
    return dtype is torch.bfloat16 and width % 128 == 0


def fprop(a: Operand, b: Operand, ends: Tensor) -> Tensor:
    """a [M, K] times each row's expert in b [E, N, K] -> bfloat16 [M, N]; the input gradient with b transposed."""
    like, group = _describe(a)
    shape = (b if isinstance(b, Tensor) else b[0]).shape
    facts = {"in_features": shape[2], "out_features": shape[1]}
    if like.shape[0] == 0:
        return like.new_empty(0, shape[1], dtype=torch.bfloat16)
    if group == 0:
        return dispatch.choose("grouped_mm", None, like, **facts)(a, b, ends)
    return dispatch.choose("mxfp8_grouped_fprop", None, like, group=group, **facts)(a, b, ends)


def wgrad(dy: Operand, x: Operand, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over each expert's rows of dy^T x -> [E, N, K].

    bfloat16 operands are [M, N] and [M, K], quantised ones [N, M] and [K, M]. dy may be paired, x `Rounded`.
    """
    like, group = _describe(dy)
    n, k = (operand.shape[1] if isinstance(operand, Tensor) else operand.lines for operand in (dy, x))
    facts = {"in_features": k, "out_features": n}
    if like.numel() == 0:
        return like.new_zeros(ends.shape[0], n, k, dtype=dtype)
    if group == 0:
        return dispatch.choose("grouped_wgrad", None, like, **facts, multiple=128)(dy, x, ends).to(dtype)
    return dispatch.choose("mxfp8_grouped_wgrad", None, like, group=group, **facts)(dy, x, ends, dtype)


def _describe(operand: Operand) -> tuple[Tensor, int]:
    return (operand.codes, operand.group) if isinstance(operand, Quantized) else (operand, 0)


def part_of(a: Quantized, first: int, last: int) -> Quantized:
    """Rows of a [M, K]; both bounds are multiples of 128."""
    scales = a.scales[:, first:last] if in_table(a.scales) else a.scales[first:last]
    return Quantized(a.codes[first:last], scales, a.group)


def column_codes(dy: Quantized) -> Quantized:
    """dy [N, M] without pairs."""
    if not dy.paired:
        return dy
    codes = dy.codes.unflatten(1, (-1, 2, 128)).unflatten(0, (-1, 128)).permute(3, 2, 1, 0, 4)
    return Quantized(codes.flatten(3).flatten(0, 2), dy.scales, dy.group)


def matrix_scales(operand: Quantized) -> Tensor:
    """The scales of an operand without pairs as a MATRIX."""
    table = operand.scales
    if operand.in_tiles:
        *_, lines, length = operand.codes.shape
        return unswizzle_scales(table, lines, -(-length // BLOCK))
    if not in_table(table):
        return table
    words = table.t().clone(memory_format=torch.contiguous_format)  # contiguous() keeps the strides of one column
    if table.dtype is torch.int32:
        scales = words.view(torch.uint8)
    else:
        shared = words.view(torch.uint8) if words.element_size() == 1 else (words.view(torch.int16) >> 7 & 0xFF).byte()
        scales = shared.repeat_interleave(4, 1)
    return scales.view(*operand.codes.shape[:-1], -1)


def scale_tiles(operand: Quantized) -> Tensor:
    """The scales of an operand without pairs in TILES, into which other forms are brought here."""
    return operand.scales if operand.in_tiles else swizzle_scales(matrix_scales(operand))


def _values(operand: Quantized | Rounded) -> Tensor:
    """The operand's values: in bfloat16 on a GPU, which holds them exactly, otherwise in float32."""
    if isinstance(operand, Rounded):
        return operand.values.unflatten(-1, (-1, 4, 2, 4, 2)).movedim(-2, -4).flatten(-5)
    dtype = torch.bfloat16 if operand.codes.device.type == "cuda" else torch.float32
    quantized = MXTensor(operand.codes, matrix_scales(operand), operand.codes.dim() - 1)
    return dispatch.choose("mxfp8_dequantize", None, operand.codes)(quantized, dtype)


def _fprop(a: Quantized, b: Quantized | Rounded, ends: Tensor) -> Tensor:
    return fprop(_values(a), _values(b), ends).bfloat16()


def _wgrad(dy: Quantized, x: Quantized | Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return wgrad(_values(column_codes(dy)).t(), _values(x).t(), ends, dtype)


def addressable(x: Tensor) -> Tensor:
    """x as TMA can address it: contiguous, on a boundary of 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def addressable_operands(*operands: Quantized) -> tuple[Tensor, ...]:
    """Codes and scales of each operand, as kernels can address them."""
    return tuple(addressable(tensor) for operand in operands for tensor in operand[:2])


def _hopper(served: int) -> dispatch.Verifier:
    """The verifier of a kernel for scales over `served` elements."""

    def supports(
        *, device: str, capability: Hashable, dtype: torch.dtype, group: int, in_features: int, out_features: int
    ) -> str | None:
        if reason := dispatch.needs_triton(device, capability, (9, 0)):
            return reason
        if group != served:
            return f"takes scales over {served} elements, not over {group}"
        if in_features % 128 or out_features % 128:
            return f"needs features in multiples of 128, got {in_features} and {out_features}"
        return None

    return supports


def block_scaled(
    *, device: str, capability: Hashable, in_features: int, out_features: int, **facts: Hashable
) -> str | None:
    """The verifier of PyTorch's block-scaled products, which have not run anywhere yet."""
    if reason := dispatch.needs_capability(device, capability, (10, 0)):
        return reason
    if in_features % BLOCK or out_features % BLOCK:
        return f"needs features in multiples of {BLOCK}, got {in_features} and {out_features}"
    return None


_g128, _strict = _hopper(128), _hopper(32)

dispatch.declare(
    "mxfp8_grouped_fprop",
    Backend("hopper", "kernels.mxfp8.hopper.operators:fprop", _g128),
    Backend("hopper_strict", "kernels.mxfp8.hopper.operators:strict_fprop", _strict),
    Backend("torch", "kernels.mxfp8.scaled:fprop", block_scaled),
    Backend("reference", _fprop),
)
dispatch.declare(
    "mxfp8_grouped_wgrad",
    Backend("hopper", "kernels.mxfp8.hopper.operators:wgrad", _g128),
    Backend("hopper_strict", "kernels.mxfp8.hopper.operators:strict_wgrad", _strict),
    Backend("torch", "kernels.mxfp8.scaled:wgrad", block_scaled),
    Backend("reference", _wgrad),
)
